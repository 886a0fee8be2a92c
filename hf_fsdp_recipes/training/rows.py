"""Reads a recipe's rows: a Hub id, a folder, a file or a mixture, in one of TRL's formats. SFTTrainer does the rest."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_recipes.errors import RecipeError

if TYPE_CHECKING:
    from hf_fsdp_recipes.training.arguments import Arguments

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
# Source: stanford_alpaca, https://github.com/tatsu-lab/stanford_alpaca (Apache-2.0).
ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)


def read_rows(arguments: "Arguments") -> tuple[Any, Any]:
    """Return the training rows and the evaluation rows, or None. Every rank calls this.

    Raises:
        RecipeError: the dataset does not exist, has no such split, or is in no known format.
    """
    from datasets import load_dataset
    from trl import get_dataset

    script, recipe = arguments.script, arguments.recipe
    if arguments.mixture.datasets:
        rows = get_dataset(arguments.mixture)
    else:
        path, options = find_builder(script.dataset_name, script.dataset_train_split)
        try:
            rows = load_dataset(path, name=script.dataset_config, streaming=script.dataset_streaming, **options)
        except (OSError, ValueError) as error:
            raise RecipeError(f"dataset_name: {script.dataset_name} cannot be read: {error}") from error
    if script.dataset_train_split not in rows:
        raise RecipeError(f"dataset_train_split: {script.dataset_train_split} is none of {', '.join(rows)}.")
    train, evaluation = rows[script.dataset_train_split], rows.get(script.dataset_test_split)
    if evaluation is None and recipe.validation_split_percentage:
        parts = train.train_test_split(recipe.validation_split_percentage / 100, seed=arguments.training.seed)
        train, evaluation = parts["train"], parts["test"]
    return to_trl_format(train, recipe.prompt_format), to_trl_format(evaluation, recipe.prompt_format)


def find_builder(name: str, split: str) -> tuple[str, dict[str, Any]]:
    """Return what `load_dataset` needs for a file, a folder or a Hub id."""
    if not Path(name).is_file():
        return name, {}
    if Path(name).suffix not in BUILDERS:
        raise RecipeError(f"dataset_name: {name} is none of {', '.join(BUILDERS)}.")
    return BUILDERS[Path(name).suffix], {"data_files": {split: name}}


def to_trl_format(rows: Any, prompt_format: str) -> Any:
    """Map instruction/input/output rows to prompt and completion; other rows are in one of TRL's formats already."""
    if rows is None:
        return None
    columns = list(rows.features or next(iter(rows)))
    if not {"instruction", "output"} <= set(columns):
        return rows
    return rows.map(to_alpaca if prompt_format == "alpaca" else to_chat, remove_columns=columns)


def to_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    """Turn an instruction/input/output row into alpaca's prompt and its completion."""
    context, paired, given = row.get("input"), "", ""
    if context:
        paired, given = ", paired with an input that provides further context", f"### Input:\n{context}\n\n"
    return {"prompt": ALPACA.format(paired, row["instruction"], given), "completion": row["output"]}


def to_chat(row: dict[str, Any]) -> dict[str, Any]:
    """Turn an instruction/input/output row into a conversation, for the model's own chat template."""
    question = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": row["output"]}],
    }
