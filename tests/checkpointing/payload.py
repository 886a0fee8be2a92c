"""Pickles that create a file when they are loaded, to test that no checkpoint or export runs code."""

import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (open, (str(self.mark), "w"))


def put_into_values(directory: Path, name: str, payload: Any) -> None:
    """Replace the value `name` of a DCP directory by a payload, stored with `torch.save`."""
    with (directory / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    (index,) = [index for index in metadata.storage_data if index.fqn == name]
    info = metadata.storage_data[index]
    file = directory / info.relative_path
    metadata.storage_data[index] = replace(info, offset=file.stat().st_size, length=len(buffer.getvalue()))
    with file.open("ab") as stream:
        stream.write(buffer.getvalue())
    with (directory / ".metadata").open("wb") as stream:
        pickle.dump(metadata, stream)
