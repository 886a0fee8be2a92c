"""Reads the datasets of a recipe, unprocessed: Hub ids, files, folders, or a mixture of these."""

import codecs
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from datasets import Dataset, IterableDataset, load_dataset

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.arguments import Arguments, is_streaming
from hf_fsdp_recipes.training.data import image_rows
from hf_fsdp_recipes.training.data.data_files import explain_errors, find_files, reader_for
from hf_fsdp_recipes.training.data.row_formats import find_format

if TYPE_CHECKING:
    from trl.scripts.utils import DatasetConfig

Rows: TypeAlias = Dataset | IterableDataset
NOT_UTF8_MARK = "\ufdd0"  # a Unicode noncharacter, so no text contains it


@dataclass(frozen=True)
class DatasetPart:
    """The only dataset of a recipe, or one dataset of a mixture, with its rows as they were read."""

    name: str
    train: Rows
    evaluation: Rows | None = None
    fraction: float | None = None  # share of the mixture; None uses all rows


def load_parts(arguments: Arguments) -> list[DatasetPart]:
    """Read the training rows of each dataset and, if the recipe evaluates, its evaluation rows. Not a collective."""
    script, streaming = arguments.script, is_streaming(arguments)
    if arguments.mixture.datasets:
        return [_load_part(part, streaming, arguments) for part in arguments.mixture.datasets]
    name = script.dataset_name
    splits = read_splits(name, script.dataset_config, streaming)
    train = _select_split(splits, script.dataset_train_split, name)
    return [DatasetPart(name, *_split_rows(train, splits.get(script.dataset_test_split), name, arguments))]


def _load_part(part: "DatasetConfig", streaming: bool, arguments: Arguments) -> DatasetPart:
    """Read one entry of the recipe's `datasets`. TRL reads it, unless it is a local path without data_files or data_dir."""
    from trl import DatasetMixtureConfig, get_dataset

    if part.data_files is None and part.data_dir is None and _is_local(part.path):
        rows = _select_split(read_splits(part.path, part.name, streaming), part.split, part.path, "the part's split")
        rows = rows if part.columns is None else rows.select_columns(part.columns)
    else:
        with explain_errors(part.path):
            single = DatasetMixtureConfig(datasets=[replace(part, fraction=None)], streaming=streaming)
            rows = get_dataset(single)["train"]
    name = part.path if part.data_files is None else str(part.data_files)
    return DatasetPart(name, *_split_rows(rows, None, name, arguments), part.fraction)


def _split_rows(train: Rows, test: Rows | None, name: str, arguments: Arguments) -> tuple[Rows, Rows | None]:
    """Return training rows, and the test split or held-out training rows, or None if the recipe does not evaluate."""
    script, training, recipe = arguments.script, arguments.training, arguments.recipe
    check_num_rows(train, name, training.world_size)
    if hasattr(training, "dataset_text_field"):  # only SFTConfig has it
        columns = train.column_names or []
        required, optional = find_format(columns, training.dataset_text_field) or (columns, ())
        unused = [column for column in columns if column not in (*required, *optional, *image_rows.COLUMNS)]
        if unused:
            distributed.print_main(f"{name}: unused columns: {', '.join(unused)}")
    if training.eval_strategy == "no":
        return train, None
    if test is not None:
        return train, test
    share, is_stream = recipe.validation_split_percentage / 100, not isinstance(train, Dataset)
    if not share and arguments.mixture.datasets:
        share = arguments.mixture.test_split_size
        if not share or is_stream:
            raise DataError(
                "eval_strategy is set, but a mixture (datasets) has no test split. Set test_split_size to hold rows out, which "
                "streams do not support, or set eval_strategy: no."
            )
    if not share:
        raise DataError(
            f"eval_strategy is set, but {name} has no split {script.dataset_test_split!r}. Set dataset_test_split, or "
            f"validation_split_percentage to hold rows out."
        )
    if is_stream:
        raise DataError("rows cannot be held out from a stream. Set a test split, or turn streaming off.")
    split = train.train_test_split(test_size=share, seed=training.seed)
    return split["train"], split["test"]


def read_splits(name: str, config: str | None = None, streaming: bool = False) -> dict[str, Rows]:
    """Read a Hub dataset, a local file (json, jsonl, txt or parquet) or a folder of such files; return {split: rows}."""
    path = Path(name)
    with explain_errors(name):
        if path.exists():
            files = find_files(path)
            reader = reader_for(next(iter(files.values()))[0]) or ""
            by_split = {split: [str(file) for file in found] for split, found in files.items()}
            return dict(load_dataset(reader, data_files=by_split, streaming=streaming, **_decoding(reader)))
        if _is_local(name):
            raise DataError(f"{name} does not exist. Check the path; relative paths start at the current directory.")
        return dict(load_dataset(name, config, streaming=streaming))


def _is_local(name: str) -> bool:
    return Path(name).exists() or reader_for(Path(name)) is not None or name.startswith((".", "/"))


def _decoding(reader: str) -> dict[str, str]:
    """Return options with which a reader replaces invalid UTF-8 with a mark, so that such rows can be dropped and counted."""
    if reader == "parquet":
        return {}
    # datasets 5.2 ignores `encoding_errors` if the encoding is spelled "utf-8".
    codecs.register_error("hf_fsdp_recipes.mark", lambda error: (NOT_UTF8_MARK, error.end))  # type: ignore[attr-defined]
    return {"encoding": "utf8", "encoding_errors": "hf_fsdp_recipes.mark"}


def _select_split(splits: dict[str, Rows], split: str, name: str, setting: str = "dataset_train_split") -> Rows:
    if split not in splits:
        raise DataError(f"{name} has no split {split!r}, only {sorted(splits)}. Set {setting} to one of them.")
    return splits[split]


def check_num_rows(rows: Rows, name: str, num_ranks: int) -> None:
    """Raise a DataError if a dataset has fewer rows than there are ranks. Streams are not checked; their length is unknown."""
    if isinstance(rows, Dataset) and len(rows) == 0:
        raise DataError(f"{name} has no rows. Add some, or choose another dataset.")
    if isinstance(rows, Dataset) and len(rows) < num_ranks:
        raise DataError(
            f"{name} has {len(rows)} rows for {num_ranks} ranks; each rank needs one per step. Use fewer ranks."
        )
