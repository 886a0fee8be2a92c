"""Writes SHARDED_STATE_DICT checkpoints with torch DCP, in the background or synchronously.

`Writer.save` starts two threads: one copies this rank's state to host memory, the other writes the copy to files with fsync
and checksums. Rank 0 renames the directory when every rank is done. The threads use a separate process group and, on
an accelerator, a separate stream. The copy overlaps the next forward and backward; only the next optimizer step waits for it.
One save is in flight at a time; if it fails, the next call of `save` or `wait` raises the error.
"""

import contextlib
import functools
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.checkpointing.dcp_writer import CachedPlanner, DirectWriter, forget_plans
from hf_fsdp_recipes.checkpointing.divergence import check_weights
from hf_fsdp_recipes.checkpointing.layout import METADATA_FILE, PARTS, sync_path
from hf_fsdp_recipes.checkpointing.lock import check_lock
from hf_fsdp_recipes.checkpointing.staging import CopyStream, HostStaging
from hf_fsdp_recipes.checkpointing.state import local_tensors
from hf_fsdp_recipes.errors import CheckpointError, DivergenceError, RecipeError
from hf_fsdp_recipes.metrics import progress

logger = logging.getLogger(__name__)

State = Mapping[str, object]
# A state, and an event that is reached when its copy to host memory is done. Without an event, it can be written immediately.
StagedState = tuple[State, torch.Event | None]


@dataclass(frozen=True)
class Snapshot:
    """The contents of one checkpoint."""

    step: int
    state: Mapping[str, State]  # {"model": ..., "optimizer": ...}, sharded tensors
    small_files: Mapping[str, bytes]  # {name: content} of this rank's other files
    facts: Mapping[str, object]  # additional manifest entries, used on rank 0


class Writer:
    """Writes snapshots as checkpoints, one at a time. Every rank creates a writer and calls its methods in the same order.

    Args:
        output_dir: the run's output directory.
        asynchronous: whether training continues while a snapshot is written.
        on_complete: called on every rank with the path of each complete checkpoint, from the thread that wrote it.
    """

    def __init__(
        self,
        output_dir: str | Path,
        asynchronous: bool = True,
        on_complete: Callable[[Path], None] | None = None,
    ) -> None:
        forget_plans()  # an earlier run in this process may have left save plans in torch's cache
        self._on_complete = on_complete
        self.output_dir = Path(output_dir)
        self._asynchronous = asynchronous
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._staging: dict[str, HostStaging] = {}
        self._is_staged = threading.Event()  # set once the copies are done or queued, or the write has ended
        self._copies: CopyStream | None = None
        self._completed: Path | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a save is in flight on this rank."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_started(self) -> bool:
        """Whether a save was started and `wait` has not been called since."""
        return self._thread is not None

    @property
    def completed(self) -> Path | None:
        """The last complete checkpoint of this run; None while a save is in flight. Not a collective."""
        return None if self.is_writing else self._completed

    def save(self, snapshot: Snapshot) -> None:
        """Start writing a snapshot. The state must not change before `wait_until_staged` returns.

        Collective: every rank must call this. Waits for a previous save that is still in flight. A synchronous writer
        returns when the checkpoint is complete.

        Raises:
            CheckpointError: on every rank, if the previous save failed or this one cannot start; from a synchronous writer,
                also if this one fails.
        """
        self.wait()
        self._group = distributed.patient_group("checkpoint-writer")
        with distributed.sync_errors():
            if distributed.is_main():
                layout.start(self.output_dir, snapshot.step)
        if self._asynchronous:
            self._is_staged.clear()
            state = dict(snapshot.state)
            self._copies = CopyStream(state)
            self._copies.wait_for_training()
            write = functools.partial(self._stage_and_write, replace(snapshot, state={}), state)
            self._thread = _start_thread(write, "checkpoint-writer")
        else:
            self._write_guarded(snapshot, snapshot.state.__getitem__)
            self.wait()

    def wait_until_staged(self) -> None:
        """Wait for the copy of the state to host memory, so that training can then change the state. Not a collective.

        On an accelerator, this blocks only until the copies are queued; kernels that training queues later run after them.
        """
        if self._thread is not None and self._copies is not None:
            self._is_staged.wait()
            self._copies.hold_training()

    def wait(self) -> Path | None:
        """Wait for the save in flight and return the last completed checkpoint.

        Collective: every rank must call this.

        Raises:
            CheckpointError: on every rank, once, if the save failed.
            RecipeError: on every rank, if another run has taken over the directory.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        try:
            check_lock(self.output_dir)  # can fail only on rank 0, which holds the lock
        except RecipeError as error:
            failure = error
        distributed.raise_together(failure)
        return self._completed

    @property
    def failure(self) -> Exception | None:
        """The error of a finished save that `wait` has not raised yet. Not a collective."""
        return None if self.is_writing else self._failure

    def _stage_all(
        self, state: dict[str, State], staged: Mapping[str, "Future[StagedState]"], copies: CopyStream
    ) -> None:
        """Copy the model, then the optimizer, so that the model is written while the optimizer is copied."""
        try:
            try:
                with copies.current():
                    for part, future in staged.items():
                        copied = self._staging.setdefault(part, HostStaging()).copy(state[part])
                        future.set_result((copied, copies.record_copies()))
                    self._is_staged.set()
                    copies.synchronize()
                state.clear()  # frees FSDP1's temporary copy on the device
            except (MemoryError, RuntimeError) as error:
                copies.synchronize()  # copies must end before memory is freed; raises if the accelerator has failed
                # Fall back to writing the state without a copy.
                logger.warning(
                    "not enough host memory to stage the state, so training waits for the write: %s", _cause(error)
                )
                self._staging.clear()
                for part, future in staged.items():
                    if not future.done():
                        future.set_result((state[part], None))
        except BaseException as error:  # pass it to the writing thread, which waits for these futures
            for future in staged.values():
                if not future.done():
                    future.set_exception(error)

    def _stage_and_write(self, snapshot: Snapshot, state: dict[str, State]) -> None:
        assert self._copies is not None
        staged: dict[str, Future[StagedState]] = {part: Future() for part in PARTS}
        stager = _start_thread(functools.partial(self._stage_all, state, staged, self._copies), "checkpoint-stager")

        def wait_for(part: str) -> State:
            copied, is_copied = staged[part].result()
            if is_copied is not None:
                is_copied.synchronize()
            return copied

        try:
            self._write_guarded(snapshot, wait_for, self._copies)
        finally:
            if stager is not None:
                stager.join()
            self._is_staged.set()

    def _write_guarded(
        self,
        snapshot: Snapshot,
        state_of: Callable[[str], State],
        copies: CopyStream | None = None,
    ) -> None:
        try:
            with contextlib.nullcontext() if copies is None else copies.current():
                self._write(snapshot, state_of)
        except DivergenceError as error:
            self._failure = error
        except BaseException as error:
            self._failure = CheckpointError(describe_failure(snapshot.step, error, self.output_dir))
        if self._failure is not None:
            self._discard(snapshot.step)

    def _discard(self, step: int) -> None:
        """Delete what a failed save has written, once every rank has stopped writing."""
        forget_plans()
        with contextlib.suppress(RuntimeError, RecipeError):  # if a rank has exited, or another run has taken over
            distributed.raise_together(None, self._group)
            if distributed.is_main():
                check_lock(self.output_dir)
                shutil.rmtree(layout.incomplete_directory_for(self.output_dir, step), ignore_errors=True)

    def _write(self, snapshot: Snapshot, state_of: Callable[[str], State]) -> None:
        directory = layout.incomplete_directory_for(self.output_dir, snapshot.step)
        names = list(snapshot.small_files)
        entries: dict[str, layout.ManifestEntry] = {}
        with _sync_errors(self._group):
            _check_directory(directory)
        for part, folder in PARTS.items():
            with _sync_errors(self._group):
                state = state_of(part)
                if part == "model":
                    check_weights(local_tensors(state), snapshot.step, self.output_dir)
            entries |= self._write_state(state, part, directory / folder)
            if distributed.is_main():
                names.append(f"{folder}/{METADATA_FILE}")
        with _sync_errors(self._group):
            for name, content in snapshot.small_files.items():
                (directory / name).write_bytes(content)
            for name in names:
                sync_path(directory / name)
            entries |= layout.manifest_entries(directory, names)
        gathered = distributed.gather_on_main(entries, self._group)
        final = layout.directory_for(self.output_dir, snapshot.step)
        with _sync_errors(self._group):
            if distributed.is_main():
                check_lock(self.output_dir)
                files = {name: entry for of_rank in gathered for name, entry in of_rank.items()}
                layout.commit(directory, final, files, {"step": snapshot.step, **snapshot.facts})
        self._completed = final
        try:
            if self._on_complete is not None:
                self._on_complete(final)
        except Exception as error:  # the checkpoint is complete, so the save has not failed
            logger.warning("%s is complete, but uploading it or deleting old checkpoints failed: %s", final, error)

    def _write_state(self, state: State, part: str, directory: Path) -> dict[str, layout.ManifestEntry]:
        """Write the model or the optimizer; return the manifest entries of this rank's `.distcp` files.

        Makes the same calls as `dcp.save` (torch 2.13, `state_dict_saver.py`), but rank 0 does not send the metadata of all
        tensors to every rank. For a 405B model on 512 ranks, this metadata is 86 MB, and each rank takes 5 s to read it.
        """
        num_bytes = sum(tensor.nbytes for _, tensor in local_tensors(state))
        with progress.bar(num_bytes, f"save {part}", leave=False) as bar:
            writer, planner, metadata = DirectWriter(directory, bar.update), CachedPlanner(part), None
            with _sync_errors(self._group):
                planner.set_up_planner({part: dict(state)}, writer.storage_meta(), distributed.is_main())
                writer.set_up_storage_writer(distributed.is_main(), rank=distributed.rank())
                plan = writer.prepare_local_plan(planner.create_local_plan())
            plans = distributed.gather_on_main(plan, self._group)
            with _sync_errors(self._group):
                if distributed.is_main():
                    plans, metadata = planner.create_global_plan(plans)
                    plans = writer.prepare_global_plan(plans)
            plan = distributed.scatter_from_main(plans, self._group)
            with _sync_errors(self._group):
                written = writer.write_data(planner.finish_plan(plan), planner).wait()
            gathered = distributed.gather_on_main(written, self._group)
            with _sync_errors(self._group):
                if distributed.is_main():
                    writer.finish(metadata, gathered)
        return {f"{directory.name}/{name}": entry for name, entry in writer.manifest_entries.items()}


def _check_directory(directory: Path) -> None:
    """Raise a CheckpointError if this rank does not see the directory that rank 0 has created."""
    with contextlib.suppress(FileNotFoundError):
        list(directory.parent.iterdir())  # makes NFS look for directories that another node has created
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is missing on rank {distributed.rank()}. Mount the same output_dir on every node."
        )


def _start_thread(work: Callable[[], None], name: str) -> threading.Thread | None:
    """Start `work` in a thread and return the thread. If the system allows no more threads, do the work first and return None."""
    thread = threading.Thread(target=work, name=name)
    try:
        thread.start()
    except RuntimeError as error:
        logger.warning("training waits for the save, because no thread could be started for it: %s", error)
        work()
        return None
    return thread


@contextlib.contextmanager
def _sync_errors(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Like `distributed.sync_errors`, but errors other than a RecipeError become a CheckpointError with the cause. Collective."""
    with distributed.sync_errors(group):
        try:
            yield
        except RecipeError:
            raise
        except Exception as error:
            raise CheckpointError(_cause(error)) from error


def describe_failure(step: int, error: BaseException, output_dir: str | Path) -> str:
    """Return a message that says why a checkpoint was not written, and what to do."""
    return (
        f"the checkpoint of step {step} was not written: {_cause(error).removesuffix('.')}. Earlier checkpoints are "
        f"intact. Check free space and permissions of {output_dir}."
    )


def _cause(error: BaseException) -> str:
    """Return the most useful part of an error: the operating system's message if it has one, otherwise its last line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if "inline_container.cc" in str(error):  # torch's message gives only a position in the file
        return "torch.save could not write a file"
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
