"""Writes a copy of a run's sharded state to disk, in a thread, while training continues.

Only one save is in flight at a time. The ranks agree on its outcome: either all ranks get the same
error, or none gets one.
"""

import logging
import os
import socket
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.utils.serialization import config

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import CheckpointError, describe
from hf_fsdp_recipes.saving.directory import Files, RunDirectory, sync
from hf_fsdp_recipes.saving.hashing import HashingFileSystem, read_facts
from hf_fsdp_recipes.saving.host_copy import HostCopy, Originals, State
from hf_fsdp_recipes.training.sharded_optimizer import local_part
from hf_fsdp_recipes.upstream.torch_internals import make_save_planner

logger = logging.getLogger(__name__)


@dataclass
class Save:
    """One save: the state to write, and what rank 0 needs to complete the checkpoint."""

    written: Path  # the directory in which the files are written
    final: Path  # the checkpoint's final path
    facts: Mapping[str, object]  # entries of the manifest besides the files
    keep: int | None  # Trainer's save_total_limit
    best: str | None  # path of Trainer's best checkpoint, which must not be deleted
    error: Exception | None = None  # this rank's error while Trainer's own files were written
    parts: Mapping[str, State] = field(default_factory=dict)  # {folder: state dict}


class Writer:
    """Writes saves as checkpoints.

    Every rank creates a writer and calls its methods in the same order.

    Args:
        directory: the run's output directory. Only rank 0 changes it.
        group: a gloo group of all ranks that nothing else uses.
    """

    def __init__(self, directory: RunDirectory, group: dist.ProcessGroup) -> None:
        self.directory = directory
        self._group = group
        node = socket.gethostname()
        num_ranks_of_that_name = distributed.gather(node, group).count(node)
        # Some launchers do not set the variable, and containers may share a name.
        num_ranks_on_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks_of_that_name))
        self._host_copy = HostCopy(num_ranks_on_node)
        self._threads = ThreadPoolExecutor(2, "checkpoint-writing")  # one writes, one checks
        self._written: Future[None] | None = None

    def start(self, save: Save, asynchronous: bool) -> None:
        """Start a save. When this returns, the state may change. Collective.

        With `asynchronous`, the ranks copy the state to host memory, and the copy is written in the
        background. Otherwise, or if a rank cannot copy its state, all ranks wait until it is
        written.
        """
        is_copied = asynchronous and self._copy_state(save)
        checked = self._threads.submit(check_finite, save.parts)
        self._written = self._threads.submit(self._write, save, checked)
        if not is_copied:
            wait([self._written])

    def _copy_state(self, save: Save) -> bool:
        """Replace a save's state by a copy of it. Return whether all ranks have one. Collective."""
        try:
            with distributed.agreed(self._group):
                if save.error is not None:
                    raise save.error  # there is nothing to copy; `_write` raises it on all ranks
                originals = Originals(save.parts)
                self._host_copy.check(originals)
            with distributed.agreed(self._group):
                copied = self._host_copy.take(originals)
        except Exception as error:  # the state itself can still be written
            self._host_copy.close()
            if distributed.is_main():
                logger.warning(
                    "training waits while this save is written, without a copy: %s",
                    describe(error),
                )
            return False
        save.parts = copied
        return True

    @property
    def has_failed(self) -> bool:
        """Whether a save has ended with an error that `wait` has not returned. Not a collective."""
        written = self._written
        return written is not None and written.done() and written.exception() is not None

    def wait(self) -> str | None:
        """Wait for the save in flight. Return its error, or None if it succeeded. Collective."""
        assert self._written is not None
        error = self._written.exception()
        self._written = None
        return None if error is None else describe(error)

    def close(self) -> None:
        """Wait for the threads and free the host memory."""
        self._threads.shutdown()
        self._host_copy.close()

    def _write(self, save: Save, checked: Future[None]) -> None:
        try:
            distributed.raise_agreed(save.error, self._group)
            files: Files = {}
            for folder, state in save.parts.items():
                files |= self._write_part(save.written / folder, state)
            with distributed.agreed(self._group):
                checked.result()
                files |= self._hash_small_files(save.written)
            for files_of_rank in distributed.gather(files, self._group):
                files |= files_of_rank
            distributed.run_on_main(
                lambda: self.directory.publish(save.written, save.final, save.facts, files),
                self._group,
            )
        except Exception:
            wait([checked])  # it may still read the state
            # Every rank has stopped writing, because the ranks agree on errors.
            if distributed.is_main():
                rmtree(save.written, ignore_errors=True)
            raise
        if distributed.is_main():
            self.directory.prune(save.final.parent, save.keep, save.best)

    def _write_part(self, folder: Path, state: State) -> Files:
        """Write one part of the sharded state. Return size and hash of this rank's files."""
        # By default, torch copies tensors before it writes them. This copy synchronizes the stream
        # that training uses. `sync_files` is not needed, because our files are flushed to disk when
        # they are closed.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0, sync_files=False)
        hashing = HashingFileSystem()
        writer.fs = hashing
        try:
            # The manifest's hashes replace the CRC. `patch` exists only at run time.
            with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                dcp.save(
                    dict(state),
                    storage_writer=writer,
                    planner=make_save_planner(folder.name),
                    process_group=self._group,
                )
        except dcp.CheckpointException as error:
            # This is not a subclass of Exception. It is the same on every rank.
            first, _ = next(iter(error.failures.values()))
            raise CheckpointError(describe(first)) from error
        return {f"{folder.name}/{name}": facts for name, facts in hashing.files.items()}

    def _hash_small_files(self, directory: Path) -> Files:
        """Flush Trainer's files to disk, and return their sizes and hashes.

        Rank 0 hashes all files that it sees. Other ranks hash their own random state.
        """
        if distributed.is_main():
            paths = list(directory.iterdir())
        else:
            paths = [directory / f"rng_state_{distributed.rank()}.pth"]
        files: Files = {}
        for path in paths:
            if path.is_file():
                sync(path)
                files[path.name] = read_facts(path)
        return files


def check_finite(parts: Mapping[str, State]) -> None:
    """Raise a CheckpointError if a weight has NaN or infinity: its checkpoint could not be used."""
    for state in parts.values():
        for name, value in state.get("model", {}).items():
            if isinstance(value, Tensor) and not is_finite(local_part(value)):
                raise CheckpointError(
                    f"{name} contains NaN or infinity. "
                    "Resume from an earlier checkpoint with other settings."
                )


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity.

    Float8 tensors are not checked and count as finite.
    """
    if not tensor.numel() or not tensor.is_floating_point() or tensor.itemsize == 1:
        return True
    extremes = torch.stack(torch.aminmax(tensor))  # which are NaN if any element is
    return bool(extremes.isfinite().all())
