"""Manages the directory of an export: checks where it may be written, writes its marker, and renames it when it is complete.

The marker is a file that lists the export's files, and is written last. An existing directory is only replaced if its marker
lists everything in it.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import xxhash
from filelock import FileLock, Timeout

from hf_fsdp_recipes.checkpointing.layout import sync_path
from hf_fsdp_recipes.errors import ExportError, LoadError, summarize
from hf_fsdp_recipes.loading.export_marker import MARKER, MARKER_FORMAT, Checksums, read_marker

logger = logging.getLogger(__name__)


def parse_shard_size(size: int | str, argument: str = "max_shard_size") -> int:
    """Convert a size such as "5GB" to bytes. Raise an ExportError for a size that `save_pretrained` does not accept.

    `argument` is the name of the argument or recipe field, for the error.
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
    """Raise an ExportError before any work if an export cannot be written. Rank 0 only; changes nothing.

    `num_bytes` is the export's size, if known; `source` is the directory that is exported, or None for a model in memory. If
    `output_dir` is a symbolic link, its target is checked.
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
            raise ExportError(
                f"{final} cannot be created: {parent} is not a writable directory. Choose another output directory."
            )
        if num_bytes is not None:
            check_free_space(parent, num_bytes)
    except (OSError, RuntimeError) as error:  # Python 3.12 raises RuntimeError for a loop of links
        raise ExportError(f"{output_dir} cannot be used for an export: {error}. Choose another directory.") from error


def check_base_model(output_dir: str | os.PathLike[str], name: str | os.PathLike[str] | None) -> None:
    """Raise an ExportError if an export would replace its base model. `name` is that model's directory or Hub id, if known."""
    if name and Path(name).is_dir() and os.path.realpath(name) == os.path.realpath(output_dir):
        raise ExportError(
            f"{output_dir} is the model that this export is based on, so it will not be replaced. Choose another output "
            f"directory."
        )


def check_free_space(directory: Path, num_bytes: int) -> None:
    """Raise an ExportError if a directory's file system has too little free space for an export."""
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
    try:
        files = read_marker(final)
    except LoadError as error:
        raise ExportError(str(error)) from error
    known = {final / name for name in [MARKER, *files]} | set(_folders(final, files))
    foreign = sorted(path for path in final.rglob("*") if path not in known)
    if foreign:
        extra = foreign[0].relative_to(final)
        raise ExportError(
            f"{final} contains {extra}, which is not part of the export there, so the directory will not be replaced. Move "
            f"{extra}, or choose another directory."
        )


def _folders(directory: Path, files: Iterable[str]) -> list[Path]:
    """Return the folders below `directory` that hold the listed files, innermost first, without symbolic links."""
    parents = {directory / parent for name in files for parent in PurePosixPath(name).parents}
    return sorted((folder for folder in parents - {directory} if not folder.is_symlink()), reverse=True)


def write_marker(directory: Path, checksums: Iterable[dict[str, Checksums]]) -> None:
    """Write the marker that lists all files, then flush everything to disk. Rank 0 only, when the files are complete.

    `checksums` has each rank's checksums of the weights. This function computes the checksums of the other files.
    Raises an ExportError if a part of the weights was not written, or written twice.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    parts = list(checksums)
    entries = {}
    for path in files:
        name, num_bytes = path.relative_to(directory).as_posix(), path.stat().st_size
        ranges = sorted(found for part in parts for found in part.get(name, []))
        end = 0
        for start, length, _ in [*ranges, (num_bytes, 0, "")] if ranges else []:
            if start != end:
                state = "were not written" if start > end else "were written twice"
                first, last = sorted((start, end))
                raise ExportError(f"{path}: bytes {first:,} to {last:,} {state}. Please report this as a bug.")
            end = start + length
        ranges = ranges or [(0, num_bytes, xxhash.xxh3_64_hexdigest(path.read_bytes()))]
        entries[name] = {"bytes": num_bytes, "xxh3": ranges}
    (directory / MARKER).write_text(json.dumps({"format": MARKER_FORMAT, "files": entries}) + "\n")
    for path in (*directory.rglob("*"), directory):
        sync_path(path)


def incomplete_directory_for(final: Path) -> Path:
    """Return the path that an export is written to until it is complete."""
    # The suffix differs from that of unfinished checkpoints, because an export may be named checkpoint-<step>, too.
    return final.with_name(f".{final.name}.export")


@contextlib.contextmanager
def lock(final: Path) -> Iterator[None]:
    """Keep other processes from exporting to `final`, if the file system has locks. Rank 0 only.

    Raises an ExportError if another process is exporting there.
    """
    file = final.with_name(f".{final.name}.export.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    found = FileLock(file)
    try:
        found.acquire(timeout=0)
        if not file.exists():  # the previous holder deleted the file after this process opened it, so this lock is void
            found.release()
            raise Timeout(str(file))
    except Timeout as error:
        raise ExportError(
            f"another export to {final} is running. Wait for it or choose another directory; if none is running, delete {file}."
        ) from error
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        found.release()


def start(final: Path) -> None:
    """Create the directory that an export is written into, and delete interrupted exports. Rank 0 only.

    If a crash in `replace` left an earlier export under a temporary name, that export is restored. A replaced export that cannot
    be deleted stays.
    """
    incomplete = incomplete_directory_for(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    for replaced in _list_replaced(final):
        with contextlib.suppress(OSError, ExportError, LoadError):
            if final.exists():
                _check_replaceable(replaced)
                _delete(replaced)
            elif all((replaced / name).is_file() for name in read_marker(replaced)):  # not if it was being deleted
                replaced.rename(final)
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir()


def _choose_replaced(final: Path) -> Path:
    replaced = final.with_name(f".{final.name}.replaced")
    return _choose_free_name(replaced) if replaced.exists() else replaced


def _list_replaced(final: Path) -> list[Path]:
    name = re.compile(rf"\.{re.escape(final.name)}\.replaced(-\d+)?")
    return sorted((path for path in final.parent.iterdir() if name.fullmatch(path.name)), reverse=True)


def replace(final: Path, use_free_name: bool = False) -> Path:
    """Rename a finished export to its final name, delete the earlier export there, and return the new path. Rank 0 only.

    If `final` cannot be replaced, raises an ExportError; with `use_free_name`, uses the first free `<final>-<n>` instead and
    logs a warning. If the process dies after it has renamed only the earlier export, the next export's `start` restores that one.
    """
    incomplete, replaced = incomplete_directory_for(final), _choose_replaced(final)
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
        with contextlib.suppress(OSError):  # the next export tries again
            _delete(replaced)
    return final


def _choose_free_name(final: Path) -> Path:
    number = 1
    while (free := final.with_name(f"{final.name}-{number}")).exists():
        number += 1
    return free


def _delete(directory: Path) -> None:
    """Delete an export that `_check_replaceable` has accepted: the files that its marker lists, the marker and the directory.

    Raises an OSError, and keeps the marker, if other files are there.
    """
    files = list(read_marker(directory)) if (directory / MARKER).is_file() else []
    for name in files:
        (directory / name).unlink(missing_ok=True)
    for folder in _folders(directory, files):
        if folder.is_dir():
            folder.rmdir()
    if any(path.name != MARKER for path in directory.iterdir()):  # NFS keeps files that are still open
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(directory))
    (directory / MARKER).unlink(missing_ok=True)
    directory.rmdir()
