"""Writes and reads directories of prepared rows: `hf-fsdp prepare-data` writes one, and a recipe uses it as dataset_name.

Such a directory contains the output of `datasets.save_to_disk`, and `prepared.json` with the settings that the rows depend on.
It has a temporary name until it is complete.
"""

import json
import os
import shutil
from pathlib import Path

from datasets import DatasetDict, load_from_disk
from transformers import PreTrainedTokenizerBase

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.arguments import PREPARED_FILE, Arguments, is_streaming, parse_arguments
from hf_fsdp_recipes.training.data.dataset_parts import check_num_rows
from hf_fsdp_recipes.training.data.preparation import TrainingRows, prepare
from hf_fsdp_recipes.training.tokenizer import load_tokenizer, tokenizer_for_rows, tokenizer_hash

# The machine that prepares the rows may not support the recipe's precision, which has no effect on the rows.
CPU_OVERRIDES = ("--use_cpu", "true", "--bf16", "false", "--fp16", "false", "--tf32", "false")
# Together with the tokenizer, these determine a row's tokens and labels.
TRAINING_SETTINGS = (
    "max_length",
    "packing",
    "packing_strategy",
    "eval_packing",
    "truncation_mode",
    "completion_only_loss",
    "assistant_only_loss",
    "dataset_text_field",
    "shuffle_dataset",
)
RECIPE_SETTINGS = ("add_special_tokens", "append_concat_token", "prompt_template")


def prepare_directory(argv: list[str], output: Path) -> list[str]:
    """Prepare a recipe's rows in a new directory, without a GPU or a process group. Return the lines to print about them."""
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # a launcher's precision, which CPU_OVERRIDES turns off
    arguments = parse_arguments([*argv, *CPU_OVERRIDES])
    if output.exists():
        raise DataError(f"{output} already exists. Delete it, or choose a different --output.")
    if is_streaming(arguments):
        raise DataError(
            "a stream cannot be prepared in advance. Add --dataset_streaming false (--streaming false for a mixture)."
        )
    tokenizer = tokenizer_for_rows(load_tokenizer(arguments), arguments.training)
    rows = prepare(arguments, tokenizer)
    if rows.has_images:
        raise DataError(
            "rows with images cannot be prepared in advance, because they are tokenized during training. Pass the original dataset "
            "to the training command."
        )
    splits = {"train": rows.train} | ({} if rows.evaluation is None else {"test": rows.evaluation})
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        DatasetDict(splits).save_to_disk(partial)
        (partial / PREPARED_FILE).write_text(json.dumps(_manifest(arguments, tokenizer, rows), indent=2) + "\n")
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    lines = [f"{name}: {counts.describe(arguments.training.max_length)}" for name, counts in rows.counts.items()]
    evaluation = "" if rows.evaluation is None else f", {len(rows.evaluation):,} for evaluation"
    return [*lines, f"prepared: {output} ({len(rows.train):,} sequences for training{evaluation})"]


def _manifest(arguments: Arguments, tokenizer: PreTrainedTokenizerBase, rows: TrainingRows) -> dict[str, object]:
    return {
        "tokenizer": {"name": arguments.model.model_name_or_path, "sha256": tokenizer_hash(tokenizer)},
        **_settings(arguments),
        "num_sequences": {"train": len(rows.train), "test": len(rows.evaluation or ())},
        "rows": {name: counts.as_dict() for name, counts in rows.counts.items()},
    }


def _settings(arguments: Arguments) -> dict[str, object]:
    settings: dict[str, object] = {name: getattr(arguments.training, name) for name in TRAINING_SETTINGS}
    settings |= {name: getattr(arguments.recipe, name) for name in RECIPE_SETTINGS}
    return settings if arguments.training.packing else settings | {"packing_strategy": None}


def read_cache(arguments: Arguments, tokenizer: PreTrainedTokenizerBase) -> TrainingRows:
    """Memory-map prepared rows; raise a DataError if they do not fit this run's settings or number of ranks.

    Every rank calls this, but it is not a collective.
    """
    directory, training = Path(arguments.script.dataset_name), arguments.training
    expected_hash = tokenizer_hash(tokenizer_for_rows(tokenizer, training))
    try:
        manifest = json.loads((directory / PREPARED_FILE).read_text())
        is_same_tokenizer = manifest["tokenizer"]["sha256"] == expected_hash
        differences = [] if is_same_tokenizer else [f"the tokenizer was different ({manifest['tokenizer']['name']})"]
        differences += [
            f"{name} was {manifest.get(name, 'not recorded')} and is now {expected}"
            for name, expected in _settings(arguments).items()
            if manifest.get(name) != expected
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{directory / PREPARED_FILE} is damaged: {error!r}. Prepare the rows again.") from error
    if differences:
        raise DataError(
            f"{directory} was prepared with other settings: {'; '.join(differences)}. Use the same settings, or run hf-fsdp "
            f"prepare-data again."
        )
    splits = load_from_disk(directory)
    check_num_rows(splits["train"], str(directory), training.world_size)
    if training.eval_strategy == "no":
        return TrainingRows(splits["train"])
    if "test" not in splits:
        raise DataError(
            f"eval_strategy is set, but {directory} was prepared without evaluation rows. Prepare it again with eval_strategy "
            f"and, if there is no test split, validation_split_percentage."
        )
    return TrainingRows(splits["train"], splits["test"])
