"""Which rows can be trained on: what becomes of each one is decided before the first step and counted.

Judges rows before tokenizing (empty, not UTF-8, refused by the chat template) and after it (only special tokens,
nothing left to learn). Does not tokenize.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.data.read_files import NOT_UTF8_MARK

GIANT_CHARACTERS = 1_000_000  # more text than any sequence holds; tokenizing costs about 180 bytes a character
GIANT_CHARACTERS_PER_TOKEN = 64
NO_LABEL = -100


class Fate(IntEnum):
    """What becomes of a row."""

    KEPT = 0
    CUT = 1
    GIANT = 2
    EMPTY = 3
    NOT_UTF8 = 4
    UNANSWERED = 5
    REFUSED = 6
    SPECIAL = 7
    UNLEARNABLE = 8
    UNMARKED = 9


KEPT = (Fate.KEPT, Fate.CUT, Fate.GIANT)
WORDS = {
    Fate.EMPTY: "empty",
    Fate.NOT_UTF8: "not UTF-8",
    Fate.UNANSWERED: "without an answer",
    Fate.REFUSED: "refused by the chat template",
    Fate.UNMARKED: "whose answers the chat template does not mark",
    Fate.SPECIAL: "of special tokens only",
    Fate.UNLEARNABLE: "without anything to learn",
}


@dataclass
class Tally:
    """How many rows there were and what became of them."""

    num_rows: int = 0
    fates: Counter[Fate] = field(default_factory=Counter)

    @property
    def num_kept(self) -> int:
        """Return the rows that are trained on, whole or cut."""
        return self.num_rows - sum(self.fates[fate] for fate in WORDS)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.num_rows + other.num_rows, self.fates + other.fates)

    def describe(self, max_length: int | None) -> str:
        """Return the line that a run prints: rows kept, dropped and why, cut."""
        dropped = [f"{self.fates[fate]:,} {words}" for fate, words in WORDS.items() if self.fates[fate]]
        if self.fates[Fate.UNLEARNABLE] and max_length is not None:
            dropped[-1] += f" after cutting at {max_length}"
        text = f"kept {self.num_kept:,} of {self.num_rows:,} rows" + (f": {', '.join(dropped)}" if dropped else "")
        return text + (f"; {self.fates[Fate.CUT]:,} cut at {max_length}" if self.fates[Fate.CUT] else "")

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name, ready for JSON."""
        named = {fate.name.lower(): self.fates[fate] for fate in (Fate.CUT, *WORDS)}
        return {"rows": self.num_rows, "kept": self.num_kept} | named


def sift(rows: Any, judge: Callable[..., dict[str, int]], num_proc: int | None, **facts: Any) -> tuple[Any, Tally]:
    """Return the rows that `judge` keeps, in their order, and the count of all fates.

    Nothing is copied: what is kept is a selection of `rows`, which come back as they are when all are kept.
    """
    judged = rows.map(judge, remove_columns=rows.column_names, fn_kwargs=facts, num_proc=num_proc, desc="Sifting rows")
    fates = judged.with_format("numpy")[:]["fate"] if len(rows) else np.zeros(0, dtype=np.int64)
    values, counts = np.unique(fates, return_counts=True)
    tally = Tally(
        len(rows), Counter({Fate(int(value)): int(count) for value, count in zip(values, counts, strict=True)})
    )
    kept = np.flatnonzero(np.isin(fates, KEPT))
    return (rows if len(kept) == len(rows) else rows.select(kept)), tally


def judge_row(
    row: dict[str, Any],
    *,
    text_field: str,
    tokenizer: Any,
    chat_template: str | None,
    needs_answer: bool,
    max_characters: int | None,
) -> dict[str, int]:
    """Return the fate of a row as it was read.

    Args:
        row: in a format that SFTTrainer takes.
        text_field: the column of plain text.
        tokenizer: whose chat template has to take the row's messages.
        chat_template: to use instead of the tokenizer's own.
        needs_answer: whether a conversation without an assistant has nothing to learn.
        max_characters: above which a text is cut before it is tokenized.
    """
    if "input_ids" in row:
        return {"fate": Fate.KEPT if row["input_ids"] else Fate.EMPTY}
    texts = _texts(row, text_field)
    if None in texts or not _says_something(texts):
        return {"fate": Fate.EMPTY}
    if any(NOT_UTF8_MARK in text for text in texts if text):
        return {"fate": Fate.NOT_UTF8}
    answers = _answers(row)
    if answers is not None and (answers or needs_answer) and not _says_something(answers):
        return {"fate": Fate.UNANSWERED}
    try:
        marks = _render(row, tokenizer, chat_template)
    except Exception:  # whatever a template raises: jinja's own errors, and what its expressions run into
        return {"fate": Fate.REFUSED}
    if needs_answer and not marks:
        return {"fate": Fate.UNMARKED}
    is_giant = max_characters is not None and any(len(text) > max_characters for text in texts if text)
    return {"fate": Fate.GIANT if is_giant else Fate.KEPT}


def _says_something(texts: list[str | None]) -> bool:
    return any(text.strip() for text in texts if text)


def _texts(row: dict[str, Any], text_field: str) -> list[str | None]:
    """Return every text of a row, None for each place where something else stands."""
    if "messages" in row:
        return _spoken(row["messages"]) if isinstance(row["messages"], list) else [None]
    if "prompt" in row:
        return _spoken(row["prompt"]) + _spoken(row["completion"])
    return _spoken(row[text_field])


def _answers(row: dict[str, Any]) -> list[str | None] | None:
    """Return the texts that answer: the completion, or what the assistant says; None for plain text."""
    if "messages" in row:
        return _spoken([message for message in row["messages"] if message["role"] == "assistant"])
    return _spoken(row["completion"]) if "prompt" in row else None


def _spoken(value: Any) -> list[str | None]:
    """Return the texts of a string or of a list of messages."""
    if isinstance(value, list):
        return [_message_text(message) for message in value]
    return [value if isinstance(value, str) else None]


def _message_text(message: Any) -> str | None:
    if not isinstance(message, dict) or not message.get("role"):
        return None
    content = message.get("content")
    if isinstance(content, list):  # parts, as multimodal templates take them
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    if content is None and message.get("tool_calls"):
        return str(message["tool_calls"])
    return content if isinstance(content, str) else None


def _render(row: dict[str, Any], tokenizer: Any, chat_template: str | None) -> list[tuple[int, int]]:
    """Render the row's conversation, where there is one; return where the template marks what the assistant says."""
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = row.get("messages") or row.get("prompt")
    if not isinstance(conversation, list):
        return []
    if "prompt" in row:
        conversation = conversation + row["completion"]
    _, marks = render_jinja_template(
        [conversation],
        chat_template=chat_template or tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **(row.get("chat_template_kwargs") or {})},
    )
    return [(start, end) for start, end in marks[0] if end > start]


def cut_giant(row: dict[str, Any], *, text_field: str, max_characters: int) -> dict[str, Any]:
    """Cut a row's texts at so many characters each; what is beyond them would be tokenized only to be thrown away."""
    names = [name for name in (text_field, "messages", "prompt", "completion") if row.get(name)]
    return {name: _cut(row[name], max_characters) for name in names}


def _cut(value: Any, max_characters: int) -> Any:
    if isinstance(value, list):
        return [message | {"content": _cut(message["content"], max_characters)} for message in value]
    return value[:max_characters] if isinstance(value, str) else value


def judge_tokens(
    row: dict[str, Any], *, special_ids: list[int], max_length: int | None, keeps_end: bool
) -> dict[str, int]:
    """Return the fate of a tokenized row; `max_length` in tokens, None where nothing is cut."""
    ids, labels = np.asarray(row["input_ids"]), np.asarray(row["labels"])
    if np.isin(ids, special_ids).all():
        return {"fate": Fate.SPECIAL}
    limit = len(ids) if max_length is None else max_length
    is_cut = len(ids) > limit
    labels = labels[-limit:] if keeps_end else labels[:limit]
    # The first label is never predicted: there is nothing before it.
    if not (labels[1:] != NO_LABEL).any():
        return {"fate": Fate.UNLEARNABLE}
    return {"fate": Fate.CUT if is_cut else Fate.KEPT}


def check_kept(tally: Tally, name: str, max_length: int | None) -> None:
    """Refuse a dataset of which nothing is left.

    Raises:
        DataError: every row was dropped.
    """
    if tally.num_kept == 0:
        raise DataError(
            f"{name} has nothing to train on: {tally.describe(max_length)}. Rule: rows with text to learn from. Remedy: "
            f"look at the columns, the chat template and max_length."
        )
