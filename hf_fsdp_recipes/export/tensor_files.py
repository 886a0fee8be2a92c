"""Writes safetensors files: first the headers, so that ranks can then fill in tensors in any order.

Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from hf_fsdp_recipes.checkpointing.direct_io import DirectFile, new_buffer, split_at_blocks
from hf_fsdp_recipes.export.borders import Border
from hf_fsdp_recipes.export.export_directory import check_free_space
from hf_fsdp_recipes.loading.export_marker import Checksums
from hf_fsdp_recipes.loading.safetensors_index import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to write; its data begins at byte `start` of the file."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class FilePlan:
    """The files of one export. The keys of `headers` and `num_bytes` are file names, those of `tensors` are tensor names."""

    headers: Mapping[str, bytes]
    num_bytes: Mapping[str, int]
    tensors: Mapping[str, PlannedTensor]
    total_bytes: int

    def index(self) -> str | None:
        """Return the text of `*.safetensors.index.json`, or None for a single file."""
        if len(self.headers) == 1:
            return None
        content = {
            "metadata": {
                "total_parameters": sum(math.prod(tensor.shape) for tensor in self.tensors.values()),
                "total_size": self.total_bytes,
            },
            "weight_map": {name: tensor.file for name, tensor in self.tensors.items()},
        }
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    def header_checksums(self) -> dict[str, Checksums]:
        """Return the checksums of the files' headers."""
        return {file: [(0, len(text), xxhash.xxh3_64_hexdigest(text))] for file, text in self.headers.items()}

    def main_dtype(self) -> torch.dtype:
        """Return the floating-point dtype whose tensors take the most bytes."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.tensors.values():
            if tensor.dtype.is_floating_point:
                num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + num_bytes
        return max(sizes, key=lambda dtype: sizes[dtype])


def plan_files(
    tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], max_shard_bytes: int, pattern: str
) -> FilePlan:
    """Assign tensors to files as `save_pretrained` does, and lay out each file. Any rank may call this.

    `tensors` are names, shapes and dtypes in the order of the state dict. In `pattern`, `{suffix}` stands for `-00001-of-00002`.
    Unlike this function, `save_pretrained` keeps tensors that share memory, such as fused experts, in one file.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    meta = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in tensors}
    split = split_torch_state_dict_into_shards(meta, filename_pattern=pattern, max_shard_size=max_shard_bytes)
    headers, num_bytes, planned = {}, {}, {}
    for file, names in split.filename_to_tensors.items():
        # The safetensors library sorts in the same way: larger dtypes come first, so that they are aligned.
        ordered = sorted(names, key=lambda name: (-meta[name].dtype.itemsize, name))
        entries: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in ordered:
            size = meta[name].numel() * meta[name].dtype.itemsize
            entries[name] = {
                "dtype": DTYPE_NAMES[meta[name].dtype],
                "shape": list(meta[name].shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        num_bytes[file] = len(headers[file]) + offset
        for name in ordered:
            start = len(headers[file]) + entries[name]["data_offsets"][0]
            planned[name] = PlannedTensor(name, file, meta[name].dtype, tuple(meta[name].shape), start)
    total = sum(tensor.numel() * tensor.dtype.itemsize for tensor in meta.values())
    return FilePlan(headers, num_bytes, planned, total)


def create_files(plan: FilePlan, directory: Path) -> None:
    """Create all files with their headers and full sizes; raise an ExportError if there is not enough space. One rank only.

    The files are closed before other ranks open them, so that other nodes see the headers and sizes. They are sparse, because
    writing to blocks reserved by `fallocate` took ten times as long on a new ext4 disk.
    """
    check_free_space(directory, sum(plan.num_bytes.values()))
    for file, header in plan.headers.items():
        descriptor = os.open(directory / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.ftruncate(descriptor, plan.num_bytes[file])
            os.pwrite(descriptor, header, 0)
        finally:
            os.close(descriptor)


class FileWriter:
    """Writes ranges of elements to planned files; each rank has its own writer. `close` flushes the files to disk.

    Attributes:
        checksums: the checksums of everything written so far.
        borders: with `keeps_borders`, the bytes at the start or end of each write that fill only part of a page. `write` collects
            them here, and rank 0 writes those of all ranks.
    """

    def __init__(self, plan: FilePlan, directory: Path, keeps_borders: bool = False) -> None:
        self.keeps_borders = keeps_borders
        self.borders: list[Border] = []
        self._plan = plan
        self._directory = directory
        self._files: dict[str, DirectFile] = {}
        self._buffer = new_buffer()
        self.checksums: dict[str, Checksums] = {}

    def write(self, name: str, first: int, values: torch.Tensor) -> None:
        """Write elements (1-D, contiguous, CPU, in the planned dtype) of a tensor, starting at element `first`."""
        tensor = self._plan.tensors[name]
        offset = tensor.start + first * tensor.dtype.itemsize
        content = memoryview(values.view(torch.uint8).numpy())
        self.checksums.setdefault(tensor.file, []).append((offset, len(content), xxhash.xxh3_64_hexdigest(content)))
        if self.keeps_borders:
            head, content, tail = split_at_blocks(content, offset)
            ends = (offset, head), (offset + len(head) + len(content), tail)
            self.borders += [(tensor.file, start, bytes(part)) for start, part in ends if part]
            offset += len(head)
        if content:
            self.write_bytes(tensor.file, offset, content)

    def write_bytes(self, file: str, offset: int, content: bytes | memoryview) -> None:
        """Write bytes at an offset of a file."""
        if file not in self._files:
            self._files[file] = DirectFile(self._directory / file)
        self._files[file].write(content, offset, self._buffer)

    def close(self) -> None:
        """Flush all writes to disk."""
        for file in self._files.values():
            file.close()
        self._files = {}
