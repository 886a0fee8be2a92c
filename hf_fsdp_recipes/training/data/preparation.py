"""Prepares rows for SFTTrainer: filters, tokenizes, mixes and packs them."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets, interleave_datasets
from transformers import PreTrainedTokenizerBase
from trl import get_training_chat_template, pack_dataset
from trl.chat_template_utils import has_generation_markers

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.arguments import Arguments
from hf_fsdp_recipes.training.data.dataset_parts import DatasetPart, check_num_rows, load_parts
from hf_fsdp_recipes.training.data.filtering import RowCounts, RowStatus, check_any_kept, filter_rows, find_token_fault
from hf_fsdp_recipes.training.data.image_rows import has_images, open_images
from hf_fsdp_recipes.training.data.row_formats import Row, to_sft_format
from hf_fsdp_recipes.training.data.row_tokenizer import RowTokenizer, has_trainable_label, is_conversational
from hf_fsdp_recipes.training.tokenizer import check_chat_template
from hf_fsdp_recipes.training.trainers import find_kind

if TYPE_CHECKING:
    from hf_fsdp_recipes.training.data.streaming import RowStream

SPLITTING_STRATEGIES = ("bfd_split", "wrapped")  # these do not truncate a long row; its rest goes to the next sequence
FEATURES = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32")), "status": Value("int8")})


@dataclass
class TrainingRows:
    """The datasets for the trainer."""

    train: "Dataset | RowStream"
    evaluation: Dataset | IterableDataset | None = None
    counts: dict[str, RowCounts] = field(default_factory=dict)  # keys: "<dataset name> (<split>)"
    has_images: bool = False  # if true, SFTTrainer tokenizes the rows during training, with the model's processor


class Preparation:
    """Prepares rows according to a run's arguments, with the tokenizer from `tokenizer_for_rows`."""

    def __init__(self, arguments: Arguments, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.training = arguments.training
        self.recipe = arguments.recipe
        # Use the largest id: if added tokens leave gaps between ids, the number of tokens is smaller.
        self._vocabulary_size = 1 + max(tokenizer.get_vocab().values())

    def max_length(self, packing: bool) -> int | None:
        """Return the length in tokens to which rows are truncated, or None if nothing is truncated."""
        splits = packing and self.training.packing_strategy in SPLITTING_STRATEGIES
        return None if splits else self.training.max_length

    def tokenize(self, rows: Dataset, name: str, packing: bool, first: int = 1) -> tuple[Dataset, RowCounts]:
        """Return `input_ids` and `labels` of the rows that can be trained on, and the counts of all rows by status.

        `first` is the number of the first row, for error messages. Raises a DataError for unknown columns, a malformed row, or a
        chat template that is missing, broken or does not mark the assistant's messages.
        """
        training = self.training
        rows = to_sft_format(rows, name, training.dataset_text_field, self.recipe.prompt_template, first)
        tokenize_row = self._row_tokenizer(rows, name, packing)
        tokenized = rows.map(
            tokenize_row,
            remove_columns=rows.column_names,
            features=FEATURES,
            num_proc=training.dataset_num_proc,
            desc=f"Tokenizing {name}",
        )
        statuses = np.array(tokenized["status"][:], dtype=np.int64)
        for invalid in np.flatnonzero(statuses == RowStatus.INVALID_TOKENS)[:1].tolist():
            fault = find_token_fault(rows[invalid], self._vocabulary_size)
            raise DataError(f"{name}, row {first + invalid}: {fault}. Tokenize the rows with this run's tokenizer.")
        kept, counts = filter_rows(tokenized, statuses)
        for rejected in np.flatnonzero(statuses == RowStatus.REJECTED)[:1].tolist():
            counts.rejection = tokenize_row.explain_rejection(rows[rejected])
        return kept, counts

    def pack(self, rows: Dataset, name: str, packing: bool) -> Dataset:
        """Pack tokenized rows if `packing` is on, and shuffle them if `shuffle_dataset` is set."""
        training = self.training
        if packing:
            rows = self._shuffle(rows)  # otherwise each sequence would hold neighboring rows, which may be alike
            options = {"num_proc": training.dataset_num_proc, "desc": f"Packing {name}"}
            rows = pack_dataset(rows, training.max_length, training.packing_strategy, options)
        rows = self._shuffle(rows)
        if packing and self.max_length(packing) is None:  # a sequence may hold only a part of a prompt, without labels
            rows = rows.filter(has_trainable_label, num_proc=training.dataset_num_proc)
        return rows

    def _shuffle(self, rows: Dataset) -> Dataset:
        return rows.shuffle(seed=self.training.seed) if self.training.shuffle_dataset else rows

    def _row_tokenizer(self, rows: Dataset, name: str, packing: bool) -> RowTokenizer:
        training = self.training
        is_completion = {"prompt", "completion"} <= set(rows.column_names)
        return RowTokenizer(
            tokenizer=self.tokenizer,
            text_column=training.dataset_text_field,
            chat_template=self._training_template(rows, name),
            completion_only=is_completion if training.completion_only_loss is None else training.completion_only_loss,
            assistant_only=training.assistant_only_loss,
            add_special_tokens=self.recipe.add_special_tokens,
            append_end_token=self.recipe.append_concat_token,
            max_length=self.max_length(packing),
            keep_end=training.truncation_mode == "keep_end" and not packing,
            special_ids=tuple(sorted(self.tokenizer.all_special_ids)),
            vocabulary_size=self._vocabulary_size,
        )

    def _training_template(self, rows: Dataset, name: str) -> str | None:
        """Return TRL's chat template for training if assistant_only_loss needs one, or None to use the tokenizer's."""
        if "input_ids" in rows.column_names:
            return None
        columns = {"messages", "prompt", self.training.dataset_text_field} & set(rows.column_names)
        first: Row = next((row for row in rows if any(row[column] for column in columns)), {})
        holds_messages, template = is_conversational(first), self.tokenizer.chat_template
        if holds_messages and template is None:
            raise DataError(
                f"{name} holds messages, but the tokenizer has no chat template. Set chat_template_path to a .jinja file or a "
                f"model that has one, or use prompt/completion data."
            )
        if holds_messages:
            check_chat_template(self.tokenizer, "the tokenizer's chat template")
        needs_end_token = self.recipe.append_concat_token or "completion" in rows.column_names
        if not holds_messages and needs_end_token and self.tokenizer.eos_token is None:
            raise DataError(f"{name} needs an end token, but the tokenizer has none. Set eos_token.")
        if not self.training.assistant_only_loss:
            return None
        if not holds_messages:
            raise DataError(
                f"assistant_only_loss needs messages, but {name} has none. Use completion_only_loss for prompt/completion rows."
            )
        if has_generation_markers(template):
            return None
        try:
            return get_training_chat_template(self.tokenizer)
        except Exception as error:
            raise DataError(
                "assistant_only_loss needs a chat template that marks the assistant's messages. Set chat_template_path to one "
                "with {% generation %} and {% endgeneration %} around them."
            ) from error


def prepare(arguments: Arguments, tokenizer: PreTrainedTokenizerBase) -> TrainingRows:
    """Read and prepare all training and evaluation rows of a run. Any rank may call this; not a collective."""
    training, preparation, parts = arguments.training, Preparation(arguments, tokenizer), load_parts(arguments)
    if any(has_images(part.train) for part in parts):
        rows = _join([open_images(part, training.dataset_text_field) for part in parts], arguments)
        if not {"messages", "completion"} & set(rows.train.column_names):
            training.remove_unused_columns = False  # TRL 1.16 drops the text column of rows with images
        return replace(rows, has_images=True)
    counts: dict[str, RowCounts] = {}

    def tokenize(part: DatasetPart, raw: Dataset, split: str, packing: bool) -> Dataset:
        tokenized, found = preparation.tokenize(raw, part.name, packing)
        check_any_kept(found, part.name, preparation.max_length(packing))
        key = f"{part.name} ({split})"
        counts[key] = counts.get(key, RowCounts()) + found
        return tokenized

    tokenized = [tokenize(part, part.train, "train", training.packing) for part in parts]
    train = preparation.pack(_mix(tokenized, parts, arguments), "train", training.packing)
    check_num_rows(train, " + ".join(part.name for part in parts) + " (prepared)", training.world_size)
    if parts[0].evaluation is None:
        return TrainingRows(train, counts=counts)
    packing = packs_evaluation(arguments)
    held_out = [tokenize(part, part.evaluation, "evaluation", packing) for part in parts]
    return TrainingRows(train, preparation.pack(concatenate_datasets(held_out), "eval", packing), counts)


def read_rows(arguments: Arguments) -> TrainingRows:
    """Read the rows for a trainer other than SFTTrainer; TRL prepares them later. Any rank may call this; not a collective.

    Raises:
        DataError: a dataset does not have the trainer's columns, or has images.
    """
    kind, parts = find_kind(arguments.training), load_parts(arguments)
    for part in parts:
        columns = part.train.column_names
        if not any(set(required) <= set(columns) for required in kind.columns):
            needed = " or ".join(" + ".join(required) for required in kind.columns)
            raise DataError(f"{part.name} has columns {columns}. {kind.name} needs {needed}; rename or add columns.")
        if has_images(part.train):
            raise DataError(f"{part.name} has images, which hf-fsdp {kind.name} does not support. Use rows of text.")
    return _join(parts, arguments)


def _join(parts: list[DatasetPart], arguments: Arguments) -> TrainingRows:
    """Mix the training rows of the recipe's datasets, and concatenate their evaluation rows."""
    columns = {part.name: sorted(part.train.column_names) for part in parts}
    if len({tuple(names) for names in columns.values()}) > 1:
        raise DataError(f"the datasets have different columns: {columns}. Give them the same columns.")
    train = _mix([part.train for part in parts], parts, arguments)
    check_num_rows(train, " + ".join(columns), arguments.training.world_size)
    has_evaluation = parts[0].evaluation is not None
    return TrainingRows(train, concatenate_datasets([part.evaluation for part in parts]) if has_evaluation else None)


def packs_evaluation(arguments: Arguments) -> bool:
    """Return whether evaluation rows are packed. By default, they are packed if training rows are."""
    training = arguments.training
    return training.packing if training.eval_packing is None else training.eval_packing


def _mix(tokenized: list[Dataset], parts: list[DatasetPart], arguments: Arguments) -> Dataset:
    """Draw rows in proportion to the datasets' fractions, or concatenate all rows if there are none."""
    fractions = [part.fraction for part in parts if part.fraction is not None]
    if len(parts) == 1 or not fractions:
        return concatenate_datasets(tokenized)
    return interleave_datasets(
        tokenized,
        probabilities=[fraction / sum(fractions) for fraction in fractions],
        seed=arguments.training.seed,
        stopping_strategy=arguments.recipe.stopping_strategy,
    )
