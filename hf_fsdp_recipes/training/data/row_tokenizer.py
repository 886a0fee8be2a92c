"""Turns a row into the same tokens and labels as TRL's SFTTrainer, or returns why the row is dropped.

`SFTTrainer._prepare_dataset` is not used, because it needs a trainer with a model, and the barriers inside it can time out.
RowTokenizer needs no trainer and works row by row, so it also runs on rank 0 alone, without GPUs, and on blocks of a stream.
tests/training/test_preparation.py compares RowTokenizer's results with SFTTrainer's.

Source: trl 1.16 `SFTTrainer._prepare_dataset`: `add_eos`, `tokenize_fn`, `build_labels`, `truncate`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.utils import logging
from trl.data_utils import common_prefix_length

from hf_fsdp_recipes.training.data.filtering import NO_LABEL, TOKEN_COLUMNS, RowStatus, check_row, find_token_fault
from hf_fsdp_recipes.training.data.row_formats import Row
from hf_fsdp_recipes.training.tokenizer import describe_template_error

logger = logging.get_logger(__name__)
# Texts that exceed both limits are shortened first, because tokenization takes about 180 bytes of memory per character.
MAX_CHARACTERS = 1_000_000
MAX_CHARACTERS_PER_TOKEN = 64
CACHE_VERSION = 2  # part of the key under which `datasets` caches rows; increment it when tokenization changes


@dataclass(frozen=True, eq=False)
class RowTokenizer:
    """A function for `datasets.map` that returns `input_ids`, `labels` and `status` of a row."""

    tokenizer: PreTrainedTokenizerBase
    text_column: str
    chat_template: str | None  # None uses the tokenizer's own
    completion_only: bool
    assistant_only: bool
    add_special_tokens: bool  # applies to plain text only
    append_end_token: bool  # applies to plain text only
    max_length: int | None  # number of tokens; None truncates nothing
    keep_end: bool  # whether truncation keeps the end of a row instead of its start
    special_ids: tuple[int, ...]
    vocabulary_size: int
    cache_version: int = CACHE_VERSION

    def __call__(self, row: Mapping[str, Any]) -> Row:
        """Check, tokenize, label and truncate a row."""
        row = dict(row)
        status = check_row(row, self.text_column, self.assistant_only)
        if status is not RowStatus.KEPT:
            return _dropped(status)
        if "input_ids" in row and find_token_fault(row, self.vocabulary_size):
            return _dropped(RowStatus.INVALID_TOKENS)
        row = self._shorten(row)
        try:
            tokens = self._tokenize(row)
        except Exception:  # a chat template may raise anything
            if is_conversational(row):
                return _dropped(RowStatus.REJECTED)
            raise
        if "input_ids" not in row and "assistant_masks" in tokens and 1 not in tokens["assistant_masks"]:
            return _dropped(RowStatus.NO_MARKED_ANSWER)
        return self._finish(list(tokens["input_ids"]), self._labels(tokens))

    def explain_rejection(self, row: Row) -> str:
        """Return why the chat template rejects a row."""
        try:
            self._tokenize(self._shorten(row))
        except Exception as error:
            return describe_template_error(error)
        return ""

    def _shorten(self, row: Row) -> Row:
        """Shorten very long texts, whose end truncation would drop anyway."""
        if self.max_length is None or self.keep_end:
            return row
        limit = max(MAX_CHARACTERS, self.max_length * MAX_CHARACTERS_PER_TOKEN)
        names = (self.text_column, "messages", "prompt", "completion")
        return row | {name: _shorten_text(row[name], limit) for name in names if name in row}

    def _tokenize(self, row: Row) -> Row | BatchEncoding:
        """Return `input_ids` and the masks that select the tokens to train on."""
        if "input_ids" in row:
            return _without_padding(row)
        if "prompt" in row and "completion" in row:
            return self._tokenize_completion(row)
        if "messages" in row:
            return self._render(row["messages"], row, return_assistant_tokens_mask=self.assistant_only)
        if self.add_special_tokens and self.append_end_token:
            return self.tokenizer(text=self._with_end_token(row)[self.text_column])
        end = [self.tokenizer.eos_token_id] if self.append_end_token else []
        tokens = self.tokenizer(text=row[self.text_column], add_special_tokens=self.add_special_tokens)
        return {"input_ids": tokens["input_ids"] + end}

    def _tokenize_completion(self, row: Row) -> Row:
        if is_conversational(row):
            prompt = self._render(row["prompt"], row, add_generation_prompt=True)["input_ids"]
            messages = row["prompt"] + row["completion"]
            tokens = self._render(messages, row, return_assistant_tokens_mask=self.assistant_only)
        else:
            row = self._with_end_token(row)
            prompt = self.tokenizer(text=row["prompt"])["input_ids"]
            tokens = self.tokenizer(text=row["prompt"] + row["completion"])
        num_prompt = common_prefix_length(prompt, tokens["input_ids"])
        if num_prompt < len(prompt):
            logger.warning_once(
                "The tokens of a prompt are not a prefix of the tokens of prompt and completion: tokens merge across the "
                "boundary, or the chat template renders a prompt without an answer differently. The completion starts at "
                f"the first difference, before {self.tokenizer.decode(prompt[num_prompt:])!r}. Printed once."
            )
        mask = [0] * num_prompt + [1] * (len(tokens["input_ids"]) - num_prompt)
        return {**tokens, "completion_mask": mask}

    def _render(self, messages: list[object], row: Row, **options: bool) -> BatchEncoding:
        tools = row.get("tools") or None
        tools = json.loads(tools) if isinstance(tools, str) else tools
        kwargs = (
            options | {"chat_template": self.chat_template, "tools": tools} | (row.get("chat_template_kwargs") or {})
        )
        return self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **kwargs)

    def _with_end_token(self, row: Row) -> Row:
        end = self.tokenizer.eos_token
        for column in (self.text_column, "completion"):
            if isinstance(row.get(column), str) and not row[column].endswith(end):
                return row | {column: row[column] + end}
        return row

    def _labels(self, tokens: Row | BatchEncoding) -> list[int]:
        if tokens.get("labels") is not None:
            return list(tokens["labels"])
        names = ("completion_mask", "assistant_masks") if self.completion_only else ("assistant_masks",)
        masks = [tokens[name] for name in names if tokens.get(name) is not None]
        return [token if all(bits) else NO_LABEL for token, *bits in zip(tokens["input_ids"], *masks, strict=False)]

    def _finish(self, ids: list[int], labels: list[int]) -> Row:
        """Truncate the row; drop it if nothing is left to train on."""
        if set(ids) <= set(self.special_ids):
            return _dropped(RowStatus.SPECIAL_TOKENS_ONLY)
        limit = len(ids) if self.max_length is None else self.max_length
        status = RowStatus.TRUNCATED if len(ids) > limit else RowStatus.KEPT
        part = slice(-limit, None) if self.keep_end else slice(limit)
        tokens = {"input_ids": ids[part], "labels": labels[part], "status": int(status)}
        return tokens if has_trainable_label(tokens) else _dropped(RowStatus.NOTHING_TO_LEARN)


def is_conversational(row: Row) -> bool:
    """Return whether a row holds messages rather than text or tokens."""
    return isinstance(row["prompt"] if "prompt" in row and "completion" in row else row.get("messages"), list)


def has_trainable_label(row: Row) -> bool:
    """Return whether any token but the first has a label; the first token is never predicted."""
    return any(label != NO_LABEL for label in row["labels"][1:])


def _without_padding(row: Row) -> Row:
    mask = row.get("attention_mask")
    if mask is None or all(mask):
        return row
    columns = [name for name in TOKEN_COLUMNS if row.get(name) is not None]
    return row | {name: [value for value, bit in zip(row[name], mask, strict=True) if bit] for name in columns}


def _dropped(status: RowStatus) -> Row:
    return {"input_ids": [], "labels": [], "status": int(status)}


def _shorten_text(value: object, num_characters: int) -> object:
    if isinstance(value, str):
        return value[:num_characters]
    if isinstance(value, dict) and isinstance(value.get("content"), str):  # a message
        return value | {"content": value["content"][:num_characters]}
    return [_shorten_text(message, num_characters) for message in value] if isinstance(value, list) else value
