"""Provides torch DCP with a writer that bypasses the page cache and computes checksums, and a planner that reuses plans.

Source: torch 2.13 `distributed/checkpoint/filesystem.py`: FileSystemWriter writes through its attribute `fs`;
`default_planner.py`: `enable_plan_caching` stores plans under the name of the planner's class.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem

from hf_fsdp_recipes.checkpointing.direct_io import ChecksummedStream
from hf_fsdp_recipes.checkpointing.layout import ManifestEntry


class DirectWriter(FileSystemWriter):
    """A DCP writer that flushes each `.distcp` file to disk when it closes the file. The caller must flush `.metadata`.

    Attributes:
        manifest_entries: {file name: size and checksums} of the `.distcp` files that this rank has written.

    Args:
        directory: where the files are written.
        notify: called with the number of bytes of each write.
    """

    def __init__(self, directory: Path, notify: Callable[[int], object] = lambda num_bytes: None) -> None:
        # By default, torch copies tensors ahead of their write, which synchronizes the stream that training uses.
        super().__init__(directory, sync_files=False, per_thread_copy_ahead=0)
        self.manifest_entries: dict[str, ManifestEntry] = {}
        self.fs = _DirectFileSystem(notify, self.manifest_entries)


class CachedPlanner(DefaultSavePlanner):
    """A save planner that reuses the plan of the previous save, so that rank 0 plans for all ranks only once.

    Args:
        part: "model" or "optimizer"; their plans are cached separately.
    """

    def __init__(self, part: str) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = f"{type(self).__name__} {part}"


def forget_plans() -> None:
    """Discard the cached plans. Call it on every rank after a failed save, and before another model is saved.

    torch compares only names and shapes with a cached plan, so it would reuse the plan for a model with other dtypes. A
    failed save may also leave a plan in the cache.
    """
    for name, cached in vars(SavePlanner).items():
        if name.startswith("_cached_") and isinstance(cached, dict):
            for key in [key for key in cached if key.startswith(CachedPlanner.__name__)]:
                del cached[key]


class _DirectFileSystem(FileSystem):
    def __init__(self, notify: Callable[[int], object], manifest_entries: dict[str, ManifestEntry]) -> None:
        self._notify = notify
        self._manifest_entries = manifest_entries

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IO[bytes]]:
        if mode != "wb" or not str(path).endswith(".distcp"):
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = ChecksummedStream(Path(path), self._notify)
        with io.BufferedWriter(file) as stream:  # torch.save makes about 40 small writes per tensor; collect them
            yield stream
        self._manifest_entries[Path(path).name] = file.manifest_entry()
