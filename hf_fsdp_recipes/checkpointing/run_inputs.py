"""Describes what a run depends on in addition to its arguments: the training rows, and the base model of an adapter."""

import functools
import json
import re
import zlib
from collections.abc import Sized
from pathlib import Path

_NUM_ROWS = 16
_SAMPLE_BYTES = 64 * 1024
_MEDIA = re.compile(r"\b(Image|Audio|Video|Pdf)\(")


def describe_rows(rows: object) -> dict[str, int]:
    """Return a dataset's number of rows and a checksum of some rows, or an empty dict if the dataset has no length.

    Only a `datasets.Dataset` gets a checksum, because other datasets may return different values each time they are read.
    """
    from datasets import Dataset

    if not isinstance(rows, Sized):
        return {}
    facts = {"num_train_rows": len(rows)}
    if isinstance(rows, Dataset):
        # The checksum differs if the data file was replaced by another with the same name and number of rows.
        known = rows.with_format(None).remove_columns(
            [n for n, kind in rows.features.items() if _MEDIA.search(str(kind))]
        )
        sample = [known[number] for number in range(0, len(rows), max(1, len(rows) // _NUM_ROWS))]
        facts["rows_crc32"] = zlib.crc32(json.dumps(sample, default=str).encode())
    return facts


@functools.cache
def checksum_weights(name_or_path: str, revision: str | None = None) -> int | None:
    """Return a checksum over parts of each of a model's safetensors files, or None if this machine has no such files.

    A copy of the files in another directory has the same checksum. Other weights of the same shapes have a different checksum.
    """
    from huggingface_hub import snapshot_download

    directory = Path(name_or_path)
    try:
        if not directory.is_dir():
            directory = Path(snapshot_download(name_or_path, revision=revision, local_files_only=True))
        checksum = 0
        for file in sorted(directory.glob("*.safetensors")):
            num_bytes = file.stat().st_size
            with file.open("rb") as stream:
                for start in (0, num_bytes // 2, max(0, num_bytes - _SAMPLE_BYTES)):
                    stream.seek(start)
                    checksum = zlib.crc32(stream.read(_SAMPLE_BYTES), checksum)
    except (OSError, ValueError):  # huggingface_hub's errors are subclasses of these
        return None
    return checksum or None
