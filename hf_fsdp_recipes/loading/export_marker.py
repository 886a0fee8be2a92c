"""Reads an export's marker (a file that lists the export's files and checksums), and verifies an export before it is loaded."""

import contextlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import xxhash

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import UNREADABLE, LoadError, RecipeError
from hf_fsdp_recipes.loading.read_ranges import count_readers

MARKER = "export_manifest.json"
MARKER_FORMAT = 1
# Users may add files to an export, but none with these names, because they would change which model is loaded.
LOADED = ("[!.]*.safetensors*", "config.json", "generation_config.json", "adapter_config.json")
# A block is still in the core's cache when its checksum is computed, which is twice as fast as with blocks of 2 MB.
BLOCK_BYTES = 256 * 1024
Checksums = list[tuple[int, int, str]]  # first byte, number of bytes and XXH3 of each range that was written


def read_marker(directory: Path) -> dict[str, tuple[int, Checksums]]:
    """Map each file of an export, as a path relative to the export, to its size and checksums.

    Raises:
        LoadError: the marker cannot be read, or names a file outside the export.
    """
    try:
        marker = json.loads((directory / MARKER).read_text())
        files = {
            str(name): (int(entry["bytes"]), [(int(a), int(n), str(found)) for a, n, found in entry["xxh3"]])
            for name, entry in marker["files"].items()
        }
    except UNREADABLE as error:
        raise _unusable(directory, f"cannot be read ({error!r})") from error
    outside = [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    if outside or marker.get("format") != MARKER_FORMAT:
        what = f"lists {outside[0]!r}" if outside else f"has format {marker.get('format')!r}, not {MARKER_FORMAT}"
        raise _unusable(directory, what)
    return files


def _unusable(directory: Path, what: str) -> LoadError:
    return LoadError(
        f"{directory / MARKER} {what}, so this export cannot be checked or replaced. Export again into a new directory."
    )


def check_together(
    directory: str | os.PathLike[str], is_read_by_all: bool, error_class: type[RecipeError] = LoadError
) -> None:
    """Verify an export before it is read. Ranks that see the same copy each verify a part of its checksums.

    Does nothing if the directory has no marker, as with a model from the Hub. On two busy cores, with the files in the
    page cache, two ranks needed 0.3 s to verify a bfloat16 model of 0.4B parameters, and 9.7 s to load it.

    Collective: every rank must call this. Ranks wait for each other without a timeout.

    Args:
        directory: the export; may exist on some ranks only.
        is_read_by_all: whether every rank reads the copy that it sees, for example on its node's disk. If True, all
            copies are verified; if False, only rank 0's copy.
        error_class: class of the error to raise.

    Raises:
        RecipeError: an `error_class` on every rank, if a file is missing, was added or has changed.
    """
    status = _stat_file(Path(directory) / MARKER)
    own = status and (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    copies = distributed.gather_objects(own)
    with distributed.sync_errors(distributed.patient_group()):
        if own is not None and (is_read_by_all or own == copies[0]):
            rank = distributed.rank() if distributed.is_distributed() else 0
            try:
                check_files(Path(directory), copies[:rank].count(own), copies.count(own))
            except LoadError as error:
                raise error_class(str(error)) from error


def check_files(directory: Path, part: int = 0, num_parts: int = 1) -> None:
    """If an export has a marker, check the export's file names and sizes, and a part of the checksums.

    The checksums are divided into `num_parts` parts; this call checks the part with index `part`. Any process may call this.

    Raises:
        LoadError: a file is missing, was added or has changed.
    """
    if _stat_file(directory / MARKER) is None:
        return
    files = read_marker(directory)
    for name, (num_bytes, _) in files.items():
        status = _stat_file(directory / name)
        if status is None:
            raise _changed(directory / name, "is missing or cannot be read")
        if status.st_size != num_bytes:
            raise _changed(directory / name, f"has {status.st_size:,} bytes, not {num_bytes:,}")
    for file in (file for pattern in LOADED for file in directory.glob(pattern)):
        if file.name not in files:
            raise _changed(file, "was added")
    ranges = [(directory / name, *checksum) for name, (_, checksums) in files.items() for checksum in checksums]
    own = ranges[len(ranges) * part // num_parts : len(ranges) * (part + 1) // num_parts]
    with ThreadPoolExecutor(count_readers()) as pool:
        for (file, *_), is_intact in zip(own, pool.map(lambda written: _is_intact(*written), own), strict=True):
            if not is_intact:
                raise _changed(file, "differs from its checksum")


def _changed(file: Path, state: str) -> LoadError:
    return LoadError(
        f"{file} {state}: the export changed after it was written. Export again, or delete {MARKER} if you changed it on "
        f"purpose."
    )


def _stat_file(file: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError, ValueError):
        status = file.stat()
        return status if stat.S_ISREG(status.st_mode) else None
    return None


def _is_intact(file: Path, start: int, num_bytes: int, expected: str) -> bool:
    value = xxhash.xxh3_64()
    with contextlib.suppress(OSError, ValueError, OverflowError), file.open("rb", buffering=0) as stream:
        stream.seek(start)
        buffer = memoryview(bytearray(min(num_bytes, BLOCK_BYTES)))
        while num_bytes and (num_read := stream.readinto(buffer[:num_bytes])):
            value.update(buffer[:num_read])
            num_bytes -= num_read
        return not num_bytes and value.hexdigest() == expected
    return False
