"""Finds the data files at a path, and explains which files cannot be read and why."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import DataError, summarize
from hf_fsdp_recipes.training.data.row_formats import find_format

FILE_READERS = {".json": "json", ".jsonl": "json", ".txt": "text", ".parquet": "parquet"}
FILE_TYPES = ".json, .jsonl, .txt or .parquet"
# Types of data files that are not read, even if a folder also has files that are.
OTHER_DATA = frozenset([".arrow", ".bz2", ".csv", ".gz", ".tsv", ".xz", ".zip", ".zst"])
JSON_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}


def reader_for(file: Path) -> str | None:
    """Return the name of the `datasets` reader for a file, or None if there is none."""
    return FILE_READERS.get(file.suffix.lower())


def find_files(path: Path) -> dict[str, list[Path]]:
    """Return a path's data files as {split: files}; in a folder, test*, eval* and valid* are in split test, all others in train.

    Skips files and folders below the path whose names start with a dot or two underscores. Skips files without rows, with a
    warning. Raises a DataError if no file is left, if file types are mixed, or if the only file is a single JSON object with the
    rows in one of its fields.
    """
    visible = [path] if path.is_file() else _list_visible(path)
    files = [file for file in visible if reader_for(file)]
    if not files:
        others = ", ".join(sorted({file.suffix or file.name for file in visible})[:9])
        has = f"only {others} files. Convert them to" if others else "no files. Add"
        raise DataError(f"{path} has no readable data, because it has {has} {FILE_TYPES}.")
    by_reader = {reader_for(file): file for file in files}
    if len(by_reader) > 1:
        mixed = ", ".join(file.name for file in by_reader.values())
        raise DataError(f"{path} mixes file types: {mixed}. Keep one of json/jsonl, txt and parquet per folder.")
    unread = [str(file.relative_to(path)) for file in visible if file.suffix in OTHER_DATA and not reader_for(file)]
    if unread:
        distributed.warn_main(
            f"{path}: {len(unread)} data files are not read, because only {FILE_TYPES} files are: {', '.join(unread[:3])}"
        )
    empty = [file for file in files if not _has_rows(file)]
    if len(empty) == len(files):
        raise DataError(f"{path} has no rows. Add some, or choose another dataset.")
    if empty:
        names = ", ".join(str(file.relative_to(path)) for file in empty[:3])
        distributed.warn_main(f"{path}: skipped {len(empty)} of {len(files)} files, which have no rows: {names}")
    if len(files) == 1:
        _check_not_nested(files[0])
        return {"train": files}
    splits: dict[str, list[Path]] = {"train": [], "test": []}
    for file in files:
        if file not in empty:
            splits["test" if file.stem.startswith(("test", "eval", "valid")) else "train"].append(file)
    return {split: found for split, found in splits.items() if found}


def _list_visible(folder: Path) -> list[Path]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return [file for file in files if not any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)]


def _has_rows(file: Path) -> bool:
    """Return whether a file has rows. Refuse JSON that does not start with an object or a list, as it may crash pyarrow."""
    start = _read_start(file)
    if reader_for(file) == "json" and start[:1] not in (b"", b"{", b"["):
        raise DataError(
            f"{file} starts with {start[:20].decode(errors='replace')!r}, not with a JSON object or list in UTF-8. Correct it."
        )
    return start not in (b"", b"[]")


def _read_start(file: Path) -> bytes:
    with file.open("rb") as content:
        return content.read(1024).removeprefix(b"\xef\xbb\xbf").strip()


def _check_not_nested(file: Path) -> None:
    """Refuse a file that is one JSON object with the rows in one of its fields, such as {"data": [...]}."""
    is_object = reader_for(file) == "json" and _read_start(file).startswith(b"{")
    rows: list[object] = []
    with contextlib.suppress(ValueError):  # the reader reports invalid JSON later
        rows = [row for _, row in islice(_read_json(file), 2)] if is_object else []
    row = rows[0] if len(rows) == 1 and isinstance(rows[0], dict) else {}
    nested = [name for name, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if nested and find_format(list(row), "text") is None:
        raise DataError(
            f"{file} is a single object with the rows in {nested[0]!r}. Store them as a list, or as one object per line."
        )


@contextlib.contextmanager
def explain_errors(name: str) -> Iterator[None]:
    """Turn any error while a dataset is read into a DataError.

    If the dataset is local, its files are read again, so that the message can name the file, the line and the reason.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        path, fault = Path(name), None
        if path.is_dir() or (path.is_file() and reader_for(path)):
            fault = _find_fault(name, [file for files in find_files(path).values() for file in files])
        reason = summarize(error.__cause__ or error)
        raise DataError(
            fault or f"{name} cannot be read: {reason}. Use a Hub id, a {FILE_TYPES} file, or a folder of such files."
        ) from error


def _find_fault(name: str, files: list[Path]) -> str | None:
    """Describe the first file that is broken or whose columns differ from those of the files before it."""
    seen: dict[Path, set[tuple[str, str]]] = {}
    for file in files:
        try:
            seen[file] = set(_read_columns(file))
        except Exception as error:
            return f"{file} cannot be read: {summarize(error, 'line')}. Correct or remove it."
        first = next((other for other in seen if seen[other]), file)
        if seen[file] - seen[first]:
            return (
                f"{first} and {file} differ: the first has {_describe(seen[first] - seen[file])}, the second "
                f"{_describe(seen[file] - seen[first])}. Give all files of a dataset the same columns, or use a mixture."
            )
    return None if any(seen.values()) else f"{name} has no rows with columns. Add some, or choose another dataset."


def _describe(columns: set[tuple[str, str]]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in sorted(columns)) or "no other columns"


def _read_columns(file: Path) -> Iterable[tuple[str, str]]:
    """Return a file's columns with their types."""
    if reader_for(file) == "parquet":
        return [(field.name, str(field.type)) for field in pq.read_schema(file)]
    columns: dict[str, str] = {}
    for line, row in _read_json(file) if reader_for(file) == "json" else ():
        if not isinstance(row, dict):
            raise ValueError(f"line {line} is {json.dumps(row)[:40]}, not an object")
        for name, value in row.items():
            if value is not None:
                columns.setdefault(name, JSON_TYPES[type(value)])
    return columns.items()


def _read_json(file: Path) -> Iterator[tuple[int, object]]:
    """Yield (line number, row) for each row of a json or jsonl file; in a single JSON document, the line number is always 1."""
    with file.open(encoding="utf-8-sig", errors="replace") as text:
        start = next((line for line in text if line.strip()), "").strip()
        text.seek(0)
        is_document = start.startswith("[") or (file.suffix.lower() == ".json" and not start.endswith("}"))
        line = 1
        try:
            for line, part in enumerate([text.read()] if is_document else text, 1):
                if part.strip():
                    value = json.loads(part if is_document else part.rstrip())
                    for row in value if is_document and isinstance(value, list) else [value]:
                        yield line, {"text": row} if is_document and isinstance(row, str) else row
        except json.JSONDecodeError as error:
            raise ValueError(f"line {line + error.lineno - 1}, column {error.colno}: {error.msg}") from error
