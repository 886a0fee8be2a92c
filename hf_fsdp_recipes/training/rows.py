"""Reads a recipe's rows from the Hub, a folder, a file or a mixture, and brings them into one of TRL's formats."""

from pathlib import Path
from typing import Any

from datasets import load_dataset

from hf_fsdp_recipes.errors import RecipeError, describe
from hf_fsdp_recipes.training.arguments import Arguments

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
COLUMNS = (
    "messages",
    "conversations",
    "prompt",
    "input_ids",
)  # TRL's columns, in addition to dataset_text_field
# Source: stanford_alpaca, https://github.com/tatsu-lab/stanford_alpaca (Apache-2.0).
ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)


def read_rows(arguments: Arguments) -> tuple[Any, Any]:
    """Return the training rows, and the evaluation rows or None. Every rank calls this.

    Raises:
        RecipeError: the dataset cannot be read, lacks the split or a known column, or has fewer rows than there are ranks.
    """
    script, recipe, training = arguments.script, arguments.recipe, arguments.training
    name = script.dataset_name or "datasets"
    try:
        rows = _load(arguments)
    except Exception as error:  # the datasets library raises errors of many classes
        cause = error.__cause__ or error
        raise RecipeError(f"{name} cannot be read: {describe(cause)}") from error
    if script.dataset_train_split not in rows:
        raise RecipeError(
            f"dataset_train_split: {script.dataset_train_split} is none of {', '.join(rows)}."
        )
    train, evaluation = rows[script.dataset_train_split], rows.get(script.dataset_test_split)
    if not arguments.is_streamed and len(train) < training.world_size:
        raise RecipeError(
            f"{name} has {len(train)} rows for {training.world_size} ranks. Each rank needs at least one."
        )
    if evaluation is None and recipe.validation_split_percentage:
        parts = train.train_test_split(recipe.validation_split_percentage / 100, seed=training.seed)
        train, evaluation = parts["train"], parts["test"]
    train, evaluation = (to_trl_format(rows, recipe.prompt_format) for rows in (train, evaluation))
    columns = list(train.features or next(iter(train)))
    known = (*COLUMNS, training.dataset_text_field)
    if not set(columns) & set(known):
        raise RecipeError(
            f"{name} has the columns {', '.join(columns)}. One of {', '.join(known)} is needed."
        )
    return train, evaluation


def _load(arguments: Arguments) -> Any:
    from trl import get_dataset

    script = arguments.script
    if arguments.mixture.datasets:
        return get_dataset(arguments.mixture)
    path = Path(script.dataset_name)
    if not path.exists() and (
        script.dataset_name.startswith((".", "/", "~")) or path.suffix in BUILDERS
    ):
        raise RecipeError("there is no such file or folder.")
    if path.is_file() and path.suffix not in BUILDERS:
        raise RecipeError(f"a file has to end in one of {', '.join(BUILDERS)}.")
    source: dict[str, Any] = {"path": script.dataset_name, "name": script.dataset_config}
    if path.exists():  # dataset_config applies only to a dataset on the Hub
        source["name"] = None
    if path.is_file():
        source |= {
            "path": BUILDERS[path.suffix],
            "data_files": {script.dataset_train_split: str(path)},
        }
    return load_dataset(**source, streaming=script.dataset_streaming)


def to_trl_format(rows: Any, prompt_format: str) -> Any:
    """Turn instruction/input/output rows into prompt/completion rows. Other rows are already in one of TRL's formats."""
    if rows is None:
        return None
    columns = list(rows.features or next(iter(rows)))
    if not {"instruction", "output"} <= set(columns):
        return rows
    return rows.map(to_alpaca if prompt_format == "alpaca" else to_chat, remove_columns=columns)


def to_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    """Turn an instruction/input/output row into Alpaca's prompt and a completion."""
    context, paired, given = row.get("input"), "", ""
    if context:
        paired, given = (
            ", paired with an input that provides further context",
            f"### Input:\n{context}\n\n",
        )
    return {"prompt": ALPACA.format(paired, row["instruction"], given), "completion": row["output"]}


def to_chat(row: dict[str, Any]) -> dict[str, Any]:
    """Turn an instruction/input/output row into a conversation for the model's own chat template."""
    question = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": row["output"]}],
    }
