"""A dataset name, file or folder in, what SFTTrainer takes out: the format is recognised from the columns.

Reads and reshapes rows; tokenizing, packing and masking are SFTTrainer's.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_recipes import ranks
from hf_fsdp_recipes.errors import DataError

FILE_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
KNOWN_FORMATS = (
    "messages",
    "prompt + completion",
    "instruction (+ input) + output",
    "text (or the column that dataset_text_field names)",
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


def load_data(arguments: Any) -> tuple[Any, Any]:
    """Load the training rows and, where asked for, the evaluation rows, in a form that SFTTrainer takes.

    Collective: every rank must call this. Rank 0 reads first, so that the others find its cache.

    Returns:
        (train, evaluation or None), datasets of `messages`, `prompt`/`completion` or text rows.

    Raises:
        DataError: the same on every rank: no such dataset or split, no rows, unknown columns, or fewer rows
            than ranks.
    """
    loaded: tuple[Any, Any] = (None, None)
    for turn in (True, False):
        with ranks.agreed():
            if ranks.is_main() == turn:
                loaded = _load(arguments)
    return loaded


def _load(arguments: Any) -> tuple[Any, Any]:
    script, training = arguments.script, arguments.training
    splits = read_splits(script.dataset_name, script.dataset_config, script.dataset_streaming)
    train = _pick(splits, script.dataset_train_split, script.dataset_name)
    wants_evaluation = training.eval_strategy != "no"
    evaluation = None
    if wants_evaluation and script.dataset_test_split in splits:
        evaluation = splits[script.dataset_test_split]
    elif wants_evaluation and arguments.recipe.validation_split_percentage > 0:
        train, evaluation = _hold_out(train, arguments.recipe.validation_split_percentage, training.seed)
    elif wants_evaluation:
        raise DataError(
            f"eval_strategy is {training.eval_strategy} and {script.dataset_name} has no split "
            f"{script.dataset_test_split!r}. Remedy: name one in dataset_test_split, or set validation_split_percentage."
        )
    check_rows(train, script.dataset_name, training.world_size)
    reshape = lambda rows: to_sft_format(  # noqa: E731 - the same reshaping for both
        rows, script.dataset_name, training.dataset_text_field, arguments.recipe.prompt_template
    )
    return reshape(train), None if evaluation is None else reshape(evaluation)


def read_splits(name: str, config: str | None = None, streaming: bool = False) -> dict[str, Any]:
    """Read a Hub dataset, a local json/jsonl/parquet file or a folder of them, as splits by name.

    Raises:
        DataError: there is no such thing, or it cannot be read.
    """
    from datasets import load_dataset

    path = Path(name)
    try:
        if path.exists():
            files = _data_files(path)
            reader = FILE_READERS[next(iter(files.values()))[0].suffix]
            by_split = {split: [str(file) for file in found] for split, found in files.items()}
            return dict(load_dataset(reader, data_files=by_split, streaming=streaming))
        if path.suffix in FILE_READERS or name.startswith((".", "/")):
            raise DataError(f"{name} is not there. Remedy: check the path (it is taken from the current directory).")
        return dict(load_dataset(name, config, streaming=streaming))
    except DataError:
        raise
    except Exception as error:
        lines = [line for line in str(error.__cause__ or error).splitlines() if line.strip()] or [type(error).__name__]
        raise DataError(
            f"{name} cannot be read: {lines[0]} Remedy: a Hub id, a json, jsonl or parquet file, or a folder of them."
        ) from error


def _data_files(path: Path) -> dict[str, list[Path]]:
    """Return the readable files of a path by split; in a folder, `test*` and `eval*` files are the test split."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in FILE_READERS)
    if not files or any(file.suffix not in FILE_READERS for file in files):
        raise DataError(f"{path} holds no data that is known. Rule: {', '.join(FILE_READERS)} files.")
    if len({FILE_READERS[file.suffix] for file in files}) > 1:
        raise DataError(f"{path} mixes json and parquet files. Rule: one kind a folder.")
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


def _hold_out(rows: Any, percentage: float, seed: int) -> tuple[Any, Any]:
    if not hasattr(rows, "train_test_split"):
        raise DataError("validation_split_percentage needs rows that can be counted. Remedy: turn streaming off.")
    split = rows.train_test_split(test_size=percentage / 100, seed=seed)
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
    """Keep or build the columns that SFTTrainer knows: messages, prompt/completion, or text.

    Raises:
        DataError: lists the columns found and the formats known.
    """
    columns = _columns(rows)
    if "messages" in columns:
        return rows
    if {"prompt", "completion"} <= set(columns):
        return rows
    if {"instruction", "output"} <= set(columns):
        reshape = _alpaca_to_chat if prompt_template == "chat" else _alpaca_to_completion
        return _map(rows, reshape, columns)
    if text_field in columns:
        return rows
    raise DataError(
        f"{name} has the columns {columns}. Rule: one of these formats: {'; '.join(KNOWN_FORMATS)}. Remedy: rename columns, "
        f"or point dataset_text_field at the one that holds the text."
    )


def _columns(rows: Any) -> list[str]:
    if rows.column_names is not None:
        return list(rows.column_names)
    return sorted(next(iter(rows), {}))  # a stream does not know its columns before its first row


def _map(rows: Any, reshape: Callable[[dict[str, Any]], dict[str, Any]], columns: Sequence[str]) -> Any:
    return rows.map(reshape, remove_columns=list(columns))


def _alpaca_to_completion(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": alpaca_prompt(row), "completion": row["output"] or ""}


def _alpaca_to_chat(row: dict[str, Any]) -> dict[str, Any]:
    question = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"] or ""}]}


def alpaca_prompt(row: dict[str, Any]) -> str:
    """Return the alpaca prompt of a row with `instruction` and perhaps `input`."""
    template = ALPACA_WITH_INPUT if row.get("input") else ALPACA_WITHOUT_INPUT
    return template.format(instruction=row["instruction"], input=row.get("input"))
