"""Writes one checkpoint at a time in background threads, while training continues.

The ranks agree on the outcome: either all ranks get the same error, or none gets one.
"""

import logging
import os
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.serialization import config

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import CheckpointError, WeightsError, describe
from hf_fsdp_recipes.saving import hashing
from hf_fsdp_recipes.saving.directory import MANIFEST, OutputDirectory, sync
from hf_fsdp_recipes.saving.host_copy import HostCopy
from hf_fsdp_recipes.upstream.torch_internals import make_save_planner, make_writer
from hf_fsdp_recipes.weights.rows import local_part
from hf_fsdp_recipes.weights.values import is_finite

logger = logging.getLogger(__name__)


@dataclass
class Save:
    """One save. Trainer begins it, the threads write it, and it ends after all `on_save`."""

    step: int
    written: Path  # the directory in which the files are written
    facts: Mapping[str, object]  # entries of the manifest besides the files
    keep: int | None  # Trainer's save_total_limit
    best: tuple[Any, ...]  # Trainer's best metric, and its step and checkpoint
    error: Exception | None = None  # why the save has failed before it was started, on all ranks
    state: dict[str, Any] = field(default_factory=dict)  # {folder: sharded state}
    # Size and hash of each sharded file that this rank has written.
    files: Future[Any] = field(default_factory=Future)
    checked: Future[Any] = field(default_factory=Future)  # fails if a weight is not finite
    ended: Future[None] | None = None  # None until all callbacks have added their files


class Saver:
    """The threads that write. Every rank creates one, and starts the same saves in the same order.

    Args:
        directory: the run's output directory. Only rank 0 changes it.
    """

    def __init__(self, directory: OutputDirectory) -> None:
        self._directory = directory
        self._group = distributed.host_group("saver") if distributed.is_distributed() else None
        node = socket.gethostname()
        num_ranks_of_that_name = distributed.gather(node).count(node)
        # Some launchers do not set the variable, and containers may share a name.
        num_ranks_on_node = int(os.getenv("LOCAL_WORLD_SIZE", num_ranks_of_that_name))
        self._host_copy = HostCopy(num_ranks_on_node)
        self._has_warned = False
        self._threads = ThreadPoolExecutor(2, "checkpoint")  # one writes, one checks

    def start(self, save: Save, asynchronous: bool) -> None:
        """Start to write the state. When this returns, the state may change. Collective.

        With `asynchronous`, the ranks copy the state to host memory, and the copy is written in the
        background. Otherwise, or if a rank cannot copy its state, all ranks wait until it is
        written.
        """
        is_copied = asynchronous and self._copy_state(save)
        weights = [
            (name, value)
            for part in save.state.values()
            for name, value in part.get("model", {}).items()
            if isinstance(value, DTensor)  # buffers may contain infinity
        ]
        save.checked = self._threads.submit(check_finite, weights)
        save.files = self._threads.submit(self._write, save)
        if not is_copied:
            wait([save.checked, save.files])

    def complete(self, save: Save) -> None:
        """Let the save end: no more files will be added. Every rank calls this."""
        save.ended = self._threads.submit(self._complete, save)

    def close(self) -> None:
        """Wait for the threads and free the host memory."""
        self._threads.shutdown()
        self._host_copy.close()

    def _copy_state(self, save: Save) -> bool:
        """Replace a save's state by a copy of it. Return whether all ranks have one. Collective."""
        try:
            with distributed.agreed():
                self._host_copy.check(save.state)
            with distributed.agreed():
                copied = self._host_copy.take(save.state)
        except Exception as error:  # the state itself can still be written
            self._host_copy.close()
            if distributed.is_main() and not self._has_warned:
                logger.warning(
                    "training waits while saves are written, without a copy: %s",
                    describe(error),
                )
            self._has_warned = True
            return False
        save.state = copied
        return True

    def _write(self, save: Save) -> dict[str, dict]:
        """Write the sharded state. Return size and hash of this rank's files."""
        files: dict[str, dict] = {}
        for folder, state in save.state.items():
            of_folder: dict[str, dict] = {}
            writer = make_writer(save.written / folder, partial(hashing.open_hashed, of_folder))
            try:
                # The manifest's hashes replace the CRC. `patch` exists only at run time.
                with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                    dcp.save(
                        state,
                        storage_writer=writer,
                        planner=make_save_planner(folder),
                        process_group=self._group,
                    )
            except dcp.CheckpointException as error:
                # This is not a subclass of Exception. It is the same on every rank.
                first, _ = next(iter(error.failures.values()))
                raise CheckpointError(describe(first)) from error
            files |= {f"{folder}/{name}": facts for name, facts in of_folder.items()}
        return files

    def _complete(self, save: Save) -> None:
        try:
            with distributed.agreed(self._group):
                files = self._files_of_rank(save)
            files_of_ranks = distributed.gather(files, self._group)
            distributed.run_on_main(lambda: self._publish(save, files_of_ranks), self._group)
        except Exception:
            # Every rank has stopped writing, because the ranks agree on errors.
            if distributed.is_main():
                with suppress(OSError):  # the outcome is that of all ranks
                    self._directory.discard(save.written)
            raise

    def _files_of_rank(self, save: Save) -> dict[str, dict]:
        """Return size and hash of the files that this rank has written."""
        if save.error is not None:
            raise save.error
        wait([save.files, save.checked])
        save.state = {}
        files = save.files.result()
        save.checked.result()
        # On a network file system, rank 0 may see the file of another rank late.
        own = save.written / f"rng_state_{distributed.rank()}.pth"
        if own.is_file():
            files[own.name] = hash_small_file(own)
        return files

    def _publish(self, save: Save, files_of_ranks: list[dict[str, dict]]) -> None:
        """Hash the files that have no hash yet, and give the checkpoint its name. Rank 0 only."""
        files: dict[str, dict] = {}
        for of_rank in files_of_ranks:
            files |= of_rank
        self._directory.add_others_files(save.written)
        for path in save.written.rglob("*"):
            name = str(path.relative_to(save.written))
            if name == MANIFEST:
                raise CheckpointError(
                    f"a callback wrote {name}, a name that this package uses. Rename its file."
                )
            if path.is_file() and not path.is_symlink() and name not in files:
                files[name] = hash_small_file(path)
        self._directory.publish(save.written, save.facts, files)
        self._directory.prune(save.keep, save.step, save.best[-1])


def hash_small_file(path: Path) -> dict[str, object]:
    """Flush a file to disk, and return its size and hash."""
    sync(path)
    return hashing.read_facts(path)


@torch.no_grad()
def check_finite(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise a WeightsError if a weight has NaN or infinity: its checkpoint could not be used."""
    for name, tensor in weights:
        if not is_finite(local_part(tensor)):
            raise WeightsError(
                f"{name} contains NaN or infinity. "
                "Resume from an earlier checkpoint with other settings."
            )
