"""From rows as they were read to rows that SFTTrainer trains on: sifted, tokenized, masked, mixed, cut or packed.

Every step that TRL has is TRL's own, called before SFTTrainer is built, so that it can be counted, written to disk
(`prepared`), done by one rank while the others wait as long as it takes, and done block by block (`streaming`).
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.data import filtering
from hf_fsdp_recipes.training.data.filtering import Fate, Tally
from hf_fsdp_recipes.training.data.read_files import Part, check_rows, load_parts, to_sft_format

SPLITTING_STRATEGIES = ("bfd_split", "wrapped")  # cut rows go on in the next sequence; nothing is thrown away
COLUMNS = ["input_ids", "labels", "seq_lengths"]


@dataclass
class TrainingRows:
    """What SFTTrainer gets, and the account of it.

    Attributes:
        tallies: what became of the rows, by dataset name and split.
    """

    train: Any
    evaluation: Any = None
    tallies: dict[str, Tally] = field(default_factory=dict)


class Preparation:
    """Turns rows into training rows, as one run's arguments say.

    Args:
        arguments: the recipe's.
        tokenizer: as `tokens.tokenizer_for_rows` returns it.
    """

    def __init__(self, arguments: Any, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.training = arguments.training
        self.prompt_template = arguments.recipe.prompt_template
        self.add_special_tokens = arguments.recipe.add_special_tokens
        self.append_concat_token = arguments.recipe.append_concat_token

    def max_length(self, packing: bool) -> int | None:
        """Return where a row is cut, in tokens, the rest thrown away; None: nowhere."""
        splits = packing and self.training.packing_strategy in SPLITTING_STRATEGIES
        return None if splits else self.training.max_length

    def tokenize(self, rows: Any, name: str, packing: bool) -> tuple[Any, Tally]:
        """Return `input_ids` and `labels` of the rows that can be trained on, uncut, and the account of all rows.

        Raises:
            DataError: unknown columns, or a chat template that is missing or cannot mark the assistant's words.
        """
        training, processes = self.training, self.training.dataset_num_proc
        rows = to_sft_format(rows, name, training.dataset_text_field, self.prompt_template)
        template = self._check_template(rows, name)
        limit = self._max_characters(packing)
        rows, raw = filtering.sift(
            rows, filtering.judge_row, processes, text_field=training.dataset_text_field, tokenizer=self.tokenizer,
            chat_template=template, needs_answer=training.assistant_only_loss, max_characters=limit,
        )  # fmt: skip
        if raw.fates[Fate.GIANT]:
            facts = {"text_field": training.dataset_text_field, "max_characters": limit}
            rows = rows.map(filtering.cut_giant, fn_kwargs=facts, num_proc=processes)
        if len(rows) == 0:
            return rows, raw
        if training.dataset_text_field in rows.column_names and not (
            self.add_special_tokens and self.append_concat_token
        ):
            rows = self._tokenize_as_it_stands(rows)
        uncut = _changed(training, max_length=None, shuffle_dataset=False)
        rows = self._call_trl(rows, uncut, False, name, template).select_columns(COLUMNS[:2])
        max_length = self.max_length(packing)
        rows, tokenized = filtering.sift(
            rows, filtering.judge_tokens, processes, special_ids=sorted(self.tokenizer.all_special_ids),
            max_length=max_length, keeps_end=training.truncation_mode == "keep_end",
        )  # fmt: skip
        return rows, Tally(raw.num_rows, raw.fates + tokenized.fates)

    def finish(self, rows: Any, name: str, packing: bool) -> Any:
        """Cut or pack tokenized rows, and shuffle them where `shuffle_dataset` says so."""
        rows = self._call_trl(rows, self.training, packing, name, None)
        if packing and self.max_length(packing) is None:  # a piece may hold nothing but a prompt
            facts: dict[str, Any] = {"special_ids": [], "max_length": None, "keeps_end": False}
            rows, _ = filtering.sift(rows, filtering.judge_tokens, self.training.dataset_num_proc, **facts)
        return rows

    def _tokenize_as_it_stands(self, rows: Any) -> Any:
        """Tokenize text without the tokenizer's own first token, or without an end token; TRL adds both."""
        end = [self.tokenizer.eos_token_id] if self.append_concat_token else []

        def tokenize(row: dict[str, Any]) -> dict[str, Any]:
            text = row[self.training.dataset_text_field]
            ids = self.tokenizer(text, add_special_tokens=self.add_special_tokens)["input_ids"]
            return {"input_ids": ids + end, "labels": ids + end}

        return rows.map(tokenize, remove_columns=rows.column_names, num_proc=self.training.dataset_num_proc)

    def _check_template(self, rows: Any, name: str) -> str | None:
        """Return the chat template to use instead of the tokenizer's own, which is needed where that one marks nothing."""
        from trl.chat_template_utils import get_training_chat_template, has_generation_markers
        from trl.data_utils import is_conversational

        # Of a row that says something: TRL looks at the first message, which an empty conversation does not have.
        telling = next((row for row in rows if row.get("messages") or row.get("prompt")), None)
        holds_conversations = telling is not None and is_conversational(telling)
        own = self.tokenizer.chat_template
        if holds_conversations and own is None:
            raise DataError(
                f"{name} holds messages and the tokenizer has no chat template. Remedy: chat_template_path (a .jinja file or "
                "a model that has one), or prompt/completion data."
            )
        if not self.training.assistant_only_loss or "input_ids" in rows.column_names:
            return None
        if not holds_conversations:
            raise DataError(
                f"assistant_only_loss and {name} holds no messages. Remedy: completion_only_loss, for prompt/completion rows."
            )
        if has_generation_markers(own):
            return None
        try:
            return get_training_chat_template(self.tokenizer)
        except Exception as error:
            raise DataError(
                "assistant_only_loss and the chat template does not mark what the assistant says. Rule: the words stand "
                "between {% generation %} and {% endgeneration %}. Remedy: a template with both in chat_template_path."
            ) from error

    def _max_characters(self, packing: bool) -> int | None:
        limit = self.max_length(packing)
        if limit is None or self.training.truncation_mode == "keep_end":
            return None
        return max(filtering.GIANT_CHARACTERS, limit * filtering.GIANT_CHARACTERS_PER_TOKEN)

    def _call_trl(self, rows: Any, training: Any, packing: bool, name: str, template: str | None) -> Any:
        """Run SFTTrainer's own preparation without an SFTTrainer. Source: trl 1.16, SFTTrainer._prepare_dataset."""
        from trl import SFTTrainer

        wish = training.completion_only_loss
        is_completion = {"prompt", "completion"} <= set(rows.column_names)
        trainer = SimpleNamespace(
            _tokenizer=self.tokenizer,
            chat_template=template,
            completion_only_loss=is_completion if wish is None else wish,
        )
        with _one_rank_alone():
            try:
                return SFTTrainer._prepare_dataset(trainer, rows, self.tokenizer, training, packing, None, name)
            except RuntimeError as error:
                if "assistant" not in str(error):
                    raise
                raise DataError(
                    f"assistant_only_loss and a row of {name} in which the template marks no word of the assistant's. Remedy: "
                    "leave out conversations without an answer, and see to it that every answer is marked."
                ) from error


def _changed(training: Any, **changes: Any) -> Any:
    changed = copy.copy(training)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


@contextlib.contextmanager
def _one_rank_alone() -> Iterator[None]:
    """Keep TRL from waiting for the other ranks in a barrier, which has a time-out; `ranks.in_turns` waits instead."""
    from trl.trainer import sft_trainer

    upstream = sft_trainer.global_then_local_main_first
    sft_trainer.global_then_local_main_first = contextlib.nullcontext
    try:
        yield
    finally:
        sft_trainer.global_then_local_main_first = upstream


def prepare(arguments: Any, tokenizer: Any) -> TrainingRows:
    """Read and prepare all that a run trains and evaluates on. One rank; no collective.

    Raises:
        DataError: nothing is left of a dataset, or too little for these ranks.
    """
    training, preparation = arguments.training, Preparation(arguments, tokenizer)
    rows = TrainingRows(None)
    parts = load_parts(arguments)
    train = [_prepared(preparation, part, part.train, "train", training.packing, rows) for part in parts]
    rows.train = preparation.finish(_mix(train, parts, arguments), "train", training.packing)
    check_rows(rows.train, " + ".join(part.name for part in parts) + " (prepared)", training.world_size)
    if parts[0].evaluation is not None:
        packing = training.packing if training.eval_packing is None else training.eval_packing
        held_out = [_prepared(preparation, part, part.evaluation, "evaluation", packing, rows) for part in parts]
        rows.evaluation = preparation.finish(_joined(held_out), "eval", packing)
    return rows


def _prepared(preparation: Preparation, part: Part, raw: Any, split: str, packing: bool, rows: TrainingRows) -> Any:
    """Tokenize one part and enter it in the account."""
    tokenized, tally = preparation.tokenize(raw, part.name, packing)
    filtering.check_kept(tally, part.name, preparation.max_length(packing))
    key = f"{part.name} ({split})"
    rows.tallies[key] = rows.tallies.get(key, Tally()) + tally
    return tokenized


def _joined(parts: list[Any]) -> Any:
    from datasets import concatenate_datasets

    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def _mix(tokenized: list[Any], parts: list[Part], arguments: Any) -> Any:
    """Draw rows by the parts' fractions, or join all of them where there are none."""
    from datasets import interleave_datasets

    fractions = [part.fraction for part in parts if part.fraction is not None]
    if len(parts) == 1 or not fractions:
        return _joined(tokenized)
    return interleave_datasets(
        tokenized,
        probabilities=[fraction / sum(fractions) for fraction in fractions],
        seed=arguments.training.seed,
        stopping_strategy=arguments.recipe.stopping_strategy,
    )


def print_tallies(tallies: dict[str, Tally], max_length: int | None) -> None:
    """Print what became of the rows, one line a dataset and split, from rank 0."""
    for name, tally in tallies.items():
        distributed.print_main(f"{name}: {tally.describe(max_length)}")
