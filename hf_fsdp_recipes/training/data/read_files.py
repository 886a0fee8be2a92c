"""A dataset name, file or folder in, rows in a format that SFTTrainer takes out, recognised from the columns.

Reads and reshapes rows; `preparation` drops what cannot be trained on and has TRL tokenize and pack the rest.
"""

import codecs
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.arguments import is_streaming

FILE_READERS = {".json": "json", ".jsonl": "json", ".txt": "text", ".parquet": "parquet"}
NOT_UTF8_MARK = "\ufdd0"  # a code point that Unicode keeps for such internal use: no text holds it
KNOWN_FORMATS = (
    "messages",
    "prompt + completion",
    "instruction (+ input) + output",
    "text (or the column that dataset_text_field names)",
    "input_ids (+ labels), tokenized already",
)
# The prompt that the alpaca models were trained with. Source: tatsu-lab/stanford_alpaca.
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Part:
    """One dataset of a mixture, or the only one: rows as they were read.

    Attributes:
        fraction: its share of the mixture; None: as many rows as it has.
    """

    name: str
    train: Any
    evaluation: Any = None
    fraction: float | None = None


def load_parts(arguments: Any) -> list[Part]:
    """Read the training rows and, where asked for, the evaluation rows, of each dataset that is named.

    Every rank calls this; no collective.

    Raises:
        DataError: no such dataset or split, no rows, or nothing to evaluate on.
    """
    script, streaming = arguments.script, is_streaming(arguments)
    if arguments.mixture.datasets:
        return [_load_part(part, streaming, arguments) for part in arguments.mixture.datasets]
    splits = read_splits(script.dataset_name, script.dataset_config, streaming)
    train = _pick(splits, script.dataset_train_split, script.dataset_name)
    train, evaluation = _find_evaluation(train, splits.get(script.dataset_test_split), script.dataset_name, arguments)
    return [Part(script.dataset_name, train, evaluation)]


def _load_part(part: Any, streaming: bool, arguments: Any) -> Part:
    """Read one entry of `datasets`: a local one as `dataset_name` would be, any other through TRL."""
    from trl import DatasetMixtureConfig, get_dataset

    if part.data_files is None and part.data_dir is None and _is_local(part.path):
        rows = _pick(read_splits(part.path, part.name, streaming), part.split, part.path)
        rows = rows if part.columns is None else rows.select_columns(part.columns)
    else:
        with _clear_errors(part.path):
            alone = DatasetMixtureConfig(datasets=[replace(part, fraction=None)], streaming=streaming)
            rows = get_dataset(alone)["train"]
    name = part.path if part.data_files is None else str(part.data_files)
    train, evaluation = _find_evaluation(rows, None, name, arguments)
    return Part(name, train, evaluation, part.fraction)


def _find_evaluation(train: Any, test: Any, name: str, arguments: Any) -> tuple[Any, Any]:
    """Return the training and evaluation rows: of a split, held out of the training rows, or none if none are wanted."""
    script, training, recipe = arguments.script, arguments.training, arguments.recipe
    check_rows(train, name, training.world_size)
    if training.eval_strategy == "no":
        return train, None
    if test is not None:
        return train, test
    if recipe.validation_split_percentage > 0:
        return _hold_out(train, recipe.validation_split_percentage / 100, training.seed)
    if arguments.mixture.datasets and arguments.mixture.test_split_size:
        return _hold_out(train, arguments.mixture.test_split_size, training.seed)
    raise DataError(
        f"eval_strategy is {training.eval_strategy} and {name} has no split "
        f"{script.dataset_test_split!r}. Remedy: name one in dataset_test_split, or set validation_split_percentage."
    )


def read_splits(name: str, config: str | None = None, streaming: bool = False) -> dict[str, Any]:
    """Read a Hub dataset, a local json/jsonl/parquet file or a folder of them, as splits by name.

    Raises:
        DataError: there is no such thing, or it cannot be read.
    """
    from datasets import load_dataset

    path = Path(name)
    with _clear_errors(name):
        if path.exists():
            files = _data_files(path)
            reader = FILE_READERS[next(iter(files.values()))[0].suffix]
            by_split = {split: [str(file) for file in found] for split, found in files.items()}
            return dict(load_dataset(reader, data_files=by_split, streaming=streaming, **_decoding(reader)))
        if _is_local(name):
            raise DataError(f"{name} is not there. Remedy: check the path (it is taken from the current directory).")
        return dict(load_dataset(name, config, streaming=streaming))


def _is_local(name: str) -> bool:
    return Path(name).exists() or Path(name).suffix in FILE_READERS or name.startswith((".", "/"))


@contextlib.contextmanager
def _clear_errors(name: str) -> Iterator[None]:
    """Turn what the readers raise into one DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        lines = [line for line in str(error.__cause__ or error).splitlines() if line.strip()] or [type(error).__name__]
        raise DataError(
            f"{name} cannot be read: {lines[0]} Remedy: a Hub id, a json, jsonl, txt or parquet file, or a folder of them."
        ) from error


def _decoding(reader: str) -> dict[str, str]:
    """Return how a reader of text marks bytes that are no UTF-8, so that their rows can be dropped and counted.

    Source: datasets 5.2, packaged_modules/json: only an encoding other than the literal "utf-8" is decoded with
    `encoding_errors`; "utf8" is the same encoding.
    """
    if reader == "parquet":
        return {}
    codecs.register_error("hf_fsdp_recipes.mark", lambda error: (NOT_UTF8_MARK, error.end))  # type: ignore[attr-defined]
    return {"encoding": "utf8", "encoding_errors": "hf_fsdp_recipes.mark"}


def _data_files(path: Path) -> dict[str, list[Path]]:
    """Return the readable files of a path by split; in a folder, `test*` and `eval*` files are the test split."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in FILE_READERS)
    if not files or any(file.suffix not in FILE_READERS for file in files):
        raise DataError(f"{path} holds no data that is known. Rule: {', '.join(FILE_READERS)} files.")
    if len({FILE_READERS[file.suffix] for file in files}) > 1:
        raise DataError(f"{path} mixes kinds of files. Rule: json and jsonl, or txt, or parquet.")
    if all(_is_empty(file) for file in files):
        raise DataError(f"{path} has no rows. Rule: there is something to train on.")
    held_out = [file for file in files if file.stem.startswith(("test", "eval", "valid")) and len(files) > 1]
    splits = {"train": [file for file in files if file not in held_out], "test": held_out}
    return {split: found for split, found in splits.items() if found}


def _is_empty(file: Path) -> bool:
    """Tell whether a file holds nothing, which the readers report in words of their own."""
    return file.stat().st_size < 16 and file.read_bytes().strip() in (b"", b"[]")


def _pick(splits: dict[str, Any], wanted: str, name: str) -> Any:
    if wanted not in splits:
        raise DataError(f"{name} has no split {wanted!r}, only {sorted(splits)}. Remedy: set dataset_train_split.")
    return splits[wanted]


def _hold_out(rows: Any, share: float, seed: int) -> tuple[Any, Any]:
    if not hasattr(rows, "train_test_split"):
        raise DataError("validation_split_percentage needs rows that can be counted. Remedy: turn streaming off.")
    split = rows.train_test_split(test_size=share, seed=seed)
    return split["train"], split["test"]


def check_rows(rows: Any, name: str, num_ranks: int) -> None:
    """Refuse data that cannot feed every rank. A stream's rows cannot be counted and pass.

    Raises:
        DataError: no rows, or fewer rows than ranks.
    """
    if not hasattr(rows, "__len__"):
        return
    if len(rows) == 0:
        raise DataError(f"{name} has no rows. Rule: there is something to train on.")
    if len(rows) < num_ranks:
        raise DataError(
            f"{name} has {len(rows)} rows for {num_ranks} ranks. Rule: every rank gets a row a step. Remedy: fewer ranks."
        )


def to_sft_format(rows: Any, name: str, text_field: str = "text", prompt_template: str = "alpaca") -> Any:
    """Keep or build the columns that SFTTrainer knows: messages, prompt/completion, text, or input_ids.

    Raises:
        DataError: lists the columns found and the formats known.
    """
    columns = list(rows.column_names)
    if "input_ids" in columns or "messages" in columns or {"prompt", "completion"} <= set(columns):
        return rows
    if {"instruction", "output"} <= set(columns):
        reshape = _alpaca_to_chat if prompt_template == "chat" else _alpaca_to_completion
        return rows.map(reshape, remove_columns=columns)
    if text_field in columns:
        return rows
    raise DataError(
        f"{name} has the columns {columns}. Rule: one of these formats: {'; '.join(KNOWN_FORMATS)}. Remedy: rename columns, "
        f"or point dataset_text_field at the one that holds the text."
    )


def _alpaca_to_completion(row: dict[str, Any]) -> dict[str, Any]:
    prompt = alpaca_prompt(row) if row["instruction"] else None  # without a question there is nothing to learn
    return {"prompt": prompt, "completion": row["output"]}


def _alpaca_to_chat(row: dict[str, Any]) -> dict[str, Any]:
    question = (
        "\n\n".join(part for part in (row["instruction"], row.get("input")) if part) if row["instruction"] else None
    )
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]}


def alpaca_prompt(row: dict[str, Any]) -> str:
    """Return the alpaca prompt of a row with `instruction` and perhaps `input`."""
    template = ALPACA_WITH_INPUT if row.get("input") else ALPACA_WITHOUT_INPUT
    return template.format(instruction=row["instruction"], input=row.get("input"))
