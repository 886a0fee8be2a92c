"""Reads a recipe's rows, and brings them into one of TRL's formats.

They come from the Hub, a folder, a file or a mixture.
"""

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    get_dataset_config_names,
    load_dataset,
)

from hf_fsdp_recipes.errors import RecipeError, describe
from hf_fsdp_recipes.training.arguments import Arguments

Row = dict[str, Any]
Rows: TypeAlias = Dataset | IterableDataset

# {ending of a file: the builder of the datasets library}
BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
# Columns of texts, in addition to dataset_text_field. The first that are all there are used.
TEXTS = (
    ("instruction", "output"),
    ("input_ids",),
    ("prompt", "completion"),
    ("messages",),
    ("conversations",),
)
# Source: stanford_alpaca, https://github.com/tatsu-lab/stanford_alpaca (Apache-2.0).
ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def read_rows(arguments: Arguments) -> tuple[Rows, Rows | None]:
    """Return the training rows, and the rows for evaluation or None. Every rank calls this.

    None is for runs that do not evaluate, even if rows are held out.

    Raises:
        RecipeError: the dataset cannot be read, lacks the split or a known column, or has fewer
            rows than there are ranks.
    """
    script = arguments.script
    split = script.dataset_train_split
    training = arguments.training
    percentage = arguments.recipe.validation_split_percentage
    name = script.dataset_name or "datasets"
    try:
        splits = _load(arguments)
    except Exception as error:  # the datasets library raises errors of many classes
        raise RecipeError(f"{name} cannot be read: {describe(error.__cause__ or error)}") from error
    if split not in splits:
        raise RecipeError(f"dataset_train_split: {split} is none of {', '.join(splits)}.")
    train = splits[split]
    evaluation = splits.get(script.dataset_test_split)
    if not arguments.is_streamed and len(train) < training.world_size:
        raise RecipeError(
            f"{name} has {len(train)} rows for {training.world_size} ranks. "
            "Each rank needs at least one."
        )
    if evaluation is None and percentage:
        train, evaluation = train.train_test_split(percentage / 100, seed=training.seed).values()

    def prepare(rows: Rows) -> Rows:
        _check_texts(rows, name, training.dataset_text_field)
        return to_trl_format(rows, arguments.recipe.prompt_format)

    if evaluation is None or training.eval_strategy == "no":
        return prepare(train), None
    return prepare(train), prepare(evaluation)


def _check_texts(rows: Rows, name: str, text_column: str) -> None:
    """Refuse unknown columns, and a dataset in which texts are missing."""
    columns = columns_of(rows)
    known = (*TEXTS, (text_column,))
    used = [names for names in known if set(names).issubset(columns)]
    if not used:
        choices = "; ".join(map(" and ".join, known))
        raise RecipeError(
            f"{name} has the columns {', '.join(columns)}. One of these is needed: {choices}."
        )
    for column in used[0] if isinstance(rows, Dataset) else ():
        gaps = find_gaps(rows.with_format("arrow")[column][:])
        if gaps:
            raise RecipeError(
                f"{name}: column {column} lacks its text in {len(set(gaps))} rows, first in row "
                f"{min(gaps) + 1}. Fill the gaps, or remove these rows."
            )


def find_gaps(values: pa.ChunkedArray) -> list[int]:
    """Return the indices of rows that are null, or whose conversation lacks messages or contents.

    Contents may be null in messages that have more than a role and a content, like tool calls.
    """
    gaps = np.flatnonzero(values.is_null()).tolist()
    fields = pc.list_flatten(values).flatten() if pa.types.is_list(values.type) else ()
    if len(fields) == 2:
        gaps += np.flatnonzero(np.equal(pc.list_value_length(values), 0)).tolist()
        for field in fields:
            gaps += pc.list_parent_indices(values).filter(field.is_null()).to_pylist()
    return gaps


def _load(arguments: Arguments) -> DatasetDict | IterableDatasetDict:
    from trl import get_dataset

    streaming = arguments.is_streamed
    arguments.mixture.streaming = streaming
    if arguments.mixture.datasets:
        return get_dataset(arguments.mixture)
    script = arguments.script
    name = str(script.dataset_name)
    path = Path(name)
    if path.suffix in BUILDERS and not path.is_dir():
        return load_dataset(
            BUILDERS[path.suffix],
            data_files={script.dataset_train_split: name},
            streaming=streaming,
        )
    if path.is_file():
        raise RecipeError(f"a file has to end in one of {', '.join(BUILDERS)}.")
    if path.is_dir() or name.startswith((".", "/", "~")):
        name = str(path.absolute())
        if get_dataset_config_names(name) == ["default"]:
            # The folder defines no configs. That of the recipe is meant for the recipe's dataset.
            script.dataset_config = None
    return load_dataset(name, script.dataset_config, streaming=streaming)


def columns_of(rows: Rows) -> list[str]:
    """Return the names of the columns. For some streams, read the first row."""
    return list(rows.features or next(iter(rows)))


def to_trl_format(rows: Rows, prompt_format: str) -> Rows:
    """Turn instruction/input/output rows into prompt/completion rows.

    Other rows are already in one of TRL's formats.
    """
    columns = columns_of(rows)
    if not {"instruction", "output"}.issubset(columns):
        return rows
    return rows.map(to_alpaca if prompt_format == "alpaca" else to_chat, remove_columns=columns)


def to_alpaca(row: Row) -> Row:
    """Turn an instruction/input/output row into Alpaca's prompt and a completion."""
    context = row.get("input")
    template = ALPACA_WITH_INPUT if context else ALPACA
    return {
        "prompt": template.format(instruction=row["instruction"], input=context),
        "completion": row["output"],
    }


def to_chat(row: Row) -> Row:
    """Turn an instruction/input/output row into a conversation for the model's chat template."""
    question = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": row["output"]}],
    }
