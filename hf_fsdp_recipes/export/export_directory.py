"""The directory of an export: where it may be written, its marker, and the step that makes it appear.

The marker lists the export's files and is written last. A directory is only replaced if its marker lists everything in it.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import xxhash

from hf_fsdp_recipes.checkpointing.fsync import sync_path
from hf_fsdp_recipes.checkpointing.layout import UNREADABLE, find_size
from hf_fsdp_recipes.errors import ExportError, summarize

logger = logging.getLogger(__name__)

MARKER = "export_manifest.json"
MARKER_FORMAT = 1
Checksums = dict[str, list[tuple[int, int, str]]]  # by file: first byte, number of bytes and XXH3 of each written range


class Entry(NamedTuple):
    """Size of a file in an export, and (first byte, number of bytes, XXH3) of each range that was written."""

    num_bytes: int
    checksums: list[tuple[int, int, str]]


def parse_shard_size(size: int | str, argument: str = "max_shard_size") -> int:
    """Convert a file size that `save_pretrained` accepts, such as "5GB", to bytes. Any rank may call this.

    Raises:
        ExportError: the size is invalid or not positive; names `argument`.
    """
    from huggingface_hub.serialization._base import parse_size_to_int

    try:
        num_bytes = int(size) if str(size).lstrip("-").isdigit() else parse_size_to_int(str(size))
    except (ValueError, OverflowError):
        num_bytes = 0
    if num_bytes <= 0:
        raise ExportError(f"{argument} is {size!r}. Use a number of bytes, or a size in KB, MB, GB or TB such as 5GB.")
    return num_bytes


def check_target(
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str,
    num_bytes: int | None = None,
    source: str | os.PathLike[str] | None = None,
    use_free_name: bool = False,
) -> None:
    """Find out before any work whether an export can be written. Rank 0 only; changes nothing.

    Args:
        output_dir: the export's directory; a symbolic link stands for its target.
        max_shard_size: as in `export_model`.
        num_bytes: size of the export, if known.
        source: the directory to export, if the export is made from one.
        use_free_name: as in `export_model`.

    Raises:
        ExportError: the size is invalid, or the directory cannot be created, is not an export, contains other files, or is
            on a full disk.
    """
    parse_shard_size(max_shard_size)
    try:
        final = Path(output_dir).resolve()
        if source is not None and final == Path(source).resolve():
            raise ExportError(f"{final} is the directory to export. Choose another output directory.")
        if final.exists() and not use_free_name:
            _check_replaceable(final)
        parent = next(folder for folder in final.parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ExportError(f"{final} cannot be created: {parent} is not a writable directory.")
        if num_bytes is not None:
            check_free_space(parent, num_bytes)
    except (OSError, RuntimeError) as error:  # Python 3.12 raises RuntimeError for a loop of links
        raise ExportError(f"{output_dir} cannot be used for an export: {error}. Choose another directory.") from error


def check_free_space(directory: Path, num_bytes: int) -> None:
    """Check that a directory's file system has room for an export.

    Raises:
        ExportError: there is too little.
    """
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise ExportError(
            f"the export needs {num_bytes:,} bytes, but {directory} has only {free:,} free. Free some space or choose another "
            f"output directory."
        )


def _check_replaceable(final: Path) -> None:
    if not final.is_dir() or os.path.ismount(final):
        kind = "a mount point" if final.is_dir() else "a file"
        raise ExportError(
            f"{final} is {kind}, which an export cannot replace. Choose a directory inside it or elsewhere."
        )
    if not any(final.iterdir()):
        return
    if not (final / MARKER).is_file():
        raise ExportError(
            f"{final} exists and has no {MARKER}, so it is not an export and will not be replaced. Move it, or choose another "
            f"directory."
        )
    files = read_marker(final)
    known = {final / name for name in [MARKER, *files]} | set(_folders(final, files))
    foreign = sorted(path for path in final.rglob("*") if path not in known)
    if foreign:
        raise ExportError(
            f"{final} contains {foreign[0].relative_to(final)}, which is not part of its export, so it will not be replaced. "
            f"Move that, or choose another directory."
        )


def _folders(directory: Path, files: Iterable[str]) -> list[Path]:
    """Return the subfolders of listed files, the innermost first."""
    parents = {directory / parent for name in files for parent in PurePosixPath(name).parents}
    return sorted(parents - {directory}, reverse=True)


def read_marker(directory: Path) -> dict[str, Entry]:
    """Return the sizes and checksums of an export's files by name, relative to the export.

    Raises:
        ExportError: the marker cannot be read, or names a file outside the export.
    """
    try:
        marker = json.loads((directory / MARKER).read_text())
        files = {
            str(name): Entry(int(entry["bytes"]), [(int(a), int(n), str(found)) for a, n, found in entry["xxh3"]])
            for name, entry in marker["files"].items()
        }
    except UNREADABLE as error:
        raise ExportError(f"{directory / MARKER} cannot be read ({error!r}). Move the directory.") from error
    outside = [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    if outside or marker.get("format") != MARKER_FORMAT:
        what = f"lists {outside[0]!r}" if outside else f"has format {marker.get('format')!r}, not {MARKER_FORMAT}"
        raise ExportError(f"{directory / MARKER} {what}. Move the directory.")
    return files


def write_marker(directory: Path, checksums: Iterable[Checksums]) -> None:
    """Write the marker that lists all files, then flush everything to disk. Rank 0 only, when the files are complete.

    Args:
        directory: the export.
        checksums: of the weights; other files are read.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    parts = list(checksums)
    entries = {}
    for path in files:
        name, num_bytes = path.relative_to(directory).as_posix(), path.stat().st_size
        ranges = sorted(found for part in parts for found in part.get(name, []))
        ranges = ranges or [(0, num_bytes, xxhash.xxh3_64_hexdigest(path.read_bytes()))]
        entries[name] = {"bytes": num_bytes, "xxh3": ranges}
    (directory / MARKER).write_text(json.dumps({"format": MARKER_FORMAT, "files": entries}) + "\n")
    for path in (*directory.rglob("*"), directory):
        sync_path(path)


def check_files(directory: Path) -> None:
    """Check names, sizes and checksums of an export's files, if it has a marker. Any process may call this.

    Raises:
        ExportError: a file is missing or has changed.
    """
    if not (directory / MARKER).is_file():
        return
    for name, (num_bytes, checksums) in read_marker(directory).items():
        file = directory / name
        found = find_size(file)
        if found != num_bytes or not _has_checksums(file, checksums):
            state = "is missing" if found is None else "differs from its checksum"
            state = state if found in (None, num_bytes) else f"has {found:,} bytes, not {num_bytes:,}"
            raise ExportError(
                f"{file} {state}: it changed after the export. Export again, or delete {MARKER} if you changed it on purpose."
            )


def _has_checksums(file: Path, checksums: list[tuple[int, int, str]]) -> bool:
    with contextlib.suppress(OSError, ValueError, OverflowError), file.open("rb") as stream:
        for start, num_bytes, expected in checksums:
            stream.seek(start)
            if xxhash.xxh3_64_hexdigest(stream.read(num_bytes)) != expected:
                return False
        return True
    return False


def incomplete_directory_for(final: Path) -> Path:
    """Return the path that an export is written to before it is complete."""
    return final.with_name(f".{final.name}.incomplete")


def start(final: Path) -> None:
    """Create the directory that an export is written into, and delete interrupted exports. Rank 0 only.

    If a crash in `replace` left an earlier export under a temporary name, that export is restored.
    """
    incomplete, replaced = incomplete_directory_for(final), _replaced(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    if replaced.exists() and not final.exists():
        replaced.rename(final)
    elif replaced.exists():
        _delete(replaced)
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir()


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def replace(final: Path, use_free_name: bool = False) -> Path:
    """Give a finished export its final name, then delete the files of the one that it replaces. Rank 0 only.

    After a crash between the two renames, `start` restores the earlier export.

    Args:
        final: the export's directory.
        use_free_name: if `final` cannot be replaced, choose the first free `<final>-<n>` and log a warning.

    Returns:
        The export's directory.

    Raises:
        ExportError: other files were added to the earlier export in the meantime; it is kept.
    """
    incomplete, replaced = incomplete_directory_for(final), _replaced(final)
    if final.exists():
        try:
            _check_replaceable(final)
            final.rename(replaced)
        except (ExportError, OSError) as error:
            if not use_free_name:
                raise
            final = _choose_free_name(final)
            logger.warning("%s. The export is in %s instead.", summarize(error, "sentence"), final)
    incomplete.rename(final)
    sync_path(final.parent)
    if replaced.exists():
        with contextlib.suppress(OSError):  # NFS keeps files that are still open; the next export deletes them
            _delete(replaced)
    return final


def _choose_free_name(final: Path) -> Path:
    number = 1
    while (free := final.with_name(f"{final.name}-{number}")).exists():
        number += 1
    return free


def _delete(directory: Path) -> None:
    """Delete the files that an export's marker lists, the marker last, and the directory if nothing else is left."""
    files = list(read_marker(directory)) if (directory / MARKER).is_file() else []
    for name in files:
        (directory / name).unlink(missing_ok=True)
    for folder in _folders(directory, files):
        if folder.is_dir():
            folder.rmdir()
    (directory / MARKER).unlink(missing_ok=True)
    directory.rmdir()
