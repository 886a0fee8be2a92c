"""A directory of prepared rows: written once by `hf-fsdp prepare-data`, taken by a recipe as its dataset_name.

It is what `datasets.save_to_disk` writes, plus `prepared.json`: what the rows were made with. Complete or absent.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.arguments import is_streaming, parse_arguments
from hf_fsdp_recipes.training.data.read_files import check_rows
from hf_fsdp_recipes.training.data.tokenize import TrainingRows, prepare
from hf_fsdp_recipes.training.tokenizer import load_tokenizer, tokenizer_for_rows, tokenizer_hash

MANIFEST = "prepared.json"
# A recipe for GPUs asks for precisions that this machine may not have; rows do not depend on them.
CPU_ONLY = ("--use_cpu", "true", "--bf16", "false", "--fp16", "false", "--tf32", "false")
# What decides, beside the tokenizer, which tokens a row becomes and which of them are learned.
DECISIVE = (
    "max_length",
    "packing",
    "packing_strategy",
    "eval_packing",
    "truncation_mode",
    "completion_only_loss",
    "assistant_only_loss",
)
DECISIVE_IN_RECIPE = ("add_special_tokens", "append_concat_token")  # fmt: skip


def is_prepared(name: str | None) -> bool:
    """Tell whether a dataset name is a directory that `write` has made."""
    return name is not None and (Path(name) / MANIFEST).is_file()


def prepare_directory(argv: list[str], output: Path) -> list[str]:
    """Prepare what a recipe trains on, without a GPU or a process group; return what there is to say about it.

    Raises:
        RecipeError, DataError: as `parse_arguments` and `write`.
    """
    arguments = parse_arguments([*argv, *CPU_ONLY])
    rows = write(arguments, load_tokenizer(arguments), output)
    lines = [f"{name}: {tally.describe(arguments.training.max_length)}" for name, tally in rows.tallies.items()]
    evaluation = "" if rows.evaluation is None else f", {len(rows.evaluation):,} to evaluate on"
    return [*lines, f"prepared: {output} ({len(rows.train):,} sequences to train on{evaluation})"]


def write(arguments: Any, tokenizer: Any, output: Path) -> TrainingRows:
    """Prepare what a recipe trains on and write it. One process, no process group.

    Raises:
        DataError: the directory exists, the recipe streams, or its data cannot be trained on.
    """
    from datasets import DatasetDict

    if output.exists():
        raise DataError(
            f"{output} is there already. Rule: nothing is overwritten. Remedy: another --output, or remove it."
        )
    if is_streaming(arguments):
        raise DataError(
            "a stream is not prepared beforehand. Remedy: --dataset_streaming false (streaming, in a mixture)."
        )
    tokenizer = tokenizer_for_rows(tokenizer, arguments.training)
    rows = prepare(arguments, tokenizer)
    splits = {"train": rows.train} | ({} if rows.evaluation is None else {"test": rows.evaluation})
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        DatasetDict(splits).save_to_disk(partial)
        (partial / MANIFEST).write_text(json.dumps(_facts(arguments, tokenizer, rows), indent=2) + "\n")
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return rows


def _facts(arguments: Any, tokenizer: Any, rows: TrainingRows) -> dict[str, Any]:
    return {
        "tokenizer": {"name": arguments.model.model_name_or_path, "sha256": tokenizer_hash(tokenizer)},
        **_decisive(arguments),
        "num_sequences": {"train": len(rows.train), "test": len(rows.evaluation or ())},
        "rows": {name: tally.as_dict() for name, tally in rows.tallies.items()},
    }


def _decisive(arguments: Any) -> dict[str, Any]:
    facts = {name: getattr(arguments.training, name) for name in DECISIVE}
    facts |= {name: getattr(arguments.recipe, name) for name in DECISIVE_IN_RECIPE}
    return facts if arguments.training.packing else facts | {"packing_strategy": None}


def read(arguments: Any, tokenizer: Any) -> TrainingRows:
    """Map prepared rows into memory, if they are what this run would make. Every rank calls this; no collective.

    Raises:
        DataError: they were made with another tokenizer, length, packing or masking, or there is nothing to evaluate on.
    """
    from datasets import load_from_disk

    directory, training = Path(arguments.script.dataset_name), arguments.training
    made_with = json.loads((directory / MANIFEST).read_text())
    _check(directory, made_with, arguments, tokenizer_hash(tokenizer_for_rows(tokenizer, training)))
    splits = load_from_disk(directory)
    check_rows(splits["train"], str(directory), training.world_size)
    if training.eval_strategy == "no":
        return TrainingRows(splits["train"])
    if "test" not in splits:
        raise DataError(
            f"eval_strategy is {training.eval_strategy} and {directory} was prepared without rows to evaluate on. Remedy: "
            "prepare it with eval_strategy and, where there is no test split, validation_split_percentage."
        )
    return TrainingRows(splits["train"], splits["test"])


def _check(directory: Path, made_with: dict[str, Any], arguments: Any, found_hash: str) -> None:
    faults = [
        f"{name} {made_with.get(name)} (this run: {wanted})"
        for name, wanted in _decisive(arguments).items()
        if made_with.get(name) != wanted
    ]
    if made_with["tokenizer"]["sha256"] != found_hash:
        faults.insert(0, f"the tokenizer of {made_with['tokenizer']['name']}, which is not this run's")
    if faults:
        raise DataError(
            f"{directory} was prepared with {'; '.join(faults)}. Rule: the run trains on what was prepared. Remedy: the same "
            f"arguments, or hf-fsdp prepare-data anew."
        )
