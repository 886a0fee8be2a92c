"""SHARDED_STATE_DICT of model and optimizer through torch DCP, while training goes on or before it does.

`Writer.save` starts a thread that copies this rank's state to host memory and then writes it, over a process
group of its own: files, fsync, checksums, and one rename by rank 0 when every rank is done. The copy runs
beside the next forward and backward; only the next change of the state waits for it. One save is in flight at
a time; a failure is kept and raised at the next call. The layout is the one that Trainer resumes from.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.checkpointing.staging import HostStaging
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.metrics import progress
from hf_fsdp_recipes.patches import saving

logger = logging.getLogger(__name__)

MODEL_DIRECTORY = "pytorch_model_fsdp_0"
OPTIMIZER_DIRECTORY = "optimizer_0"
METADATA_FILE = ".metadata"
PARTS = {"model": MODEL_DIRECTORY, "optimizer": OPTIMIZER_DIRECTORY}  # in the order of writing


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint holds, before it is written.

    Attributes:
        step: the global step.
        state: {"model": ..., "optimizer": ...}, sharded tensors.
        small_files: what else this rank writes: a function of the path, by file name.
        facts: what the manifest says beside the files, on rank 0.
    """

    step: int
    state: Mapping[str, Mapping[str, Any]]
    small_files: Mapping[str, Callable[[Path], None]]
    facts: Mapping[str, Any]


def capture(model: Any, optimizer: Any, plugin: Any) -> dict[str, dict[str, Any]]:
    """Collect the sharded state of model and optimizer, without copies where it lives on the CPU.

    Collective: every rank must call this. LoRA models give their adapters only, whole by name.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    if plugin.fsdp_version == 2:
        options = saving.state_options(plugin)
        state = {"model": saving.model_state(model, plugin)}
        return {**state, "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    with FSDP.state_dict_type(model, plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config):
        return {"model": saving.model_state(model, plugin), "optimizer": FSDP.optim_state_dict(model, optimizer)}


class Writer:
    """Writes snapshots, one at a time. Every rank has one and calls its methods in the same order."""

    def __init__(self, output_dir: str | os.PathLike[str], asynchronous: bool = True) -> None:
        self.output_dir = Path(output_dir)
        self._asynchronous = asynchronous
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._copies: dict[str, HostStaging] = {}
        self._is_staged = threading.Event()
        self._completed: Path | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a save is in flight on this rank."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_started(self) -> bool:
        """Whether a save was started that nobody has waited for yet."""
        return self._thread is not None

    def save(self, snapshot: Snapshot) -> None:
        """Start writing a snapshot. The state must not change before `wait_until_staged` returns.

        Collective: every rank must call this. Waits for the save before it, if that is still in flight.
        A writer that is not asynchronous returns when the checkpoint is complete.

        Raises:
            CheckpointError: the same on every rank: the save before this one failed, or this one cannot start.
        """
        self.wait()
        self._start_group()
        with distributed.sync_errors():
            if distributed.is_main():
                layout.start(self.output_dir, snapshot.step)
        if self._asynchronous:
            self._is_staged.clear()
            self._thread = threading.Thread(target=self._stage_and_write, args=(snapshot,), name="checkpoint-writer")
            self._thread.start()
        else:
            started = time.perf_counter()
            self._write_guarded(snapshot, snapshot.state.__getitem__)
            self.wait()
            self._say_written(time.perf_counter() - started)

    def _say_written(self, seconds: float) -> None:
        """Tell who watches what a save that training waited for has cost. No collective."""
        if self._completed is not None and progress.is_shown():
            num_bytes = sum(file.stat().st_size for file in self._completed.rglob("*") if file.is_file())
            progress.say(f"{self._completed.name}: {num_bytes / 1e6:,.1f} MB written in {seconds:.1f} s")

    def wait_until_staged(self) -> None:
        """Wait until the state may change again. No collective."""
        if self._thread is not None:
            self._is_staged.wait()

    def wait(self) -> Path | None:
        """Wait for the save in flight and return the last completed checkpoint.

        Collective: every rank must call this.

        Raises:
            CheckpointError: the same on every rank, once, if the save failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        distributed.raise_together(failure)
        return self._completed

    @property
    def completed(self) -> Path | None:
        """The last complete checkpoint of this run, if none is being written now. No collective."""
        return None if self.is_writing else self._completed

    def collect_failure(self) -> Exception | None:
        """Return the error of a finished save without waiting, and forget it. No collective."""
        if self.is_writing:
            return None
        failure, self._failure = self._failure, None
        return failure

    def _start_group(self) -> None:
        # Own group: the writer's collectives must not mix with the training's, and run on the CPU.
        if self._group is None and distributed.is_distributed():
            self._group = dist.new_group(backend="gloo")

    def _stage_all(self, state: Mapping[str, Mapping[str, Any]], staged: Mapping[str, Future[Any]]) -> None:
        """Copy part after part, so that the first is written while the second is copied."""
        try:
            for part, future in staged.items():
                future.set_result(self._copies.setdefault(part, HostStaging()).take(state[part]))
            self._is_staged.set()
        except (MemoryError, RuntimeError) as error:
            # The state itself is written then: training waits for the write, and nothing is lost.
            logger.warning("no copy of the state could be made: %s", _describe(error))
            self._copies.clear()
            for part, future in staged.items():
                if not future.done():
                    future.set_result(state[part])
        except BaseException as error:  # the writer waits for these
            for future in staged.values():
                if not future.done():
                    future.set_exception(error)

    def _stage_and_write(self, snapshot: Snapshot) -> None:
        staged: dict[str, Future[Any]] = {part: Future() for part in PARTS}
        stager = threading.Thread(target=self._stage_all, args=(snapshot.state, staged), name="checkpoint-stager")
        stager.start()
        try:
            self._write_guarded(snapshot, lambda part: staged[part].result())
        finally:
            stager.join()
            self._is_staged.set()

    def _write_guarded(self, snapshot: Snapshot, state_of: Callable[[str], Mapping[str, Any]]) -> None:
        try:
            self._write(snapshot, state_of)
        except CheckpointError as error:
            self._failure = error
        except BaseException as error:  # DCP's own CheckpointException is no Exception
            self._failure = CheckpointError(
                f"the checkpoint of step {snapshot.step} was not written: {_describe(error)}. Earlier checkpoints are "
                f"intact. Remedy: check free space and permissions of {self.output_dir}."
            )

    def _write(self, snapshot: Snapshot, state_of: Callable[[str], Mapping[str, Any]]) -> None:
        directory = layout.incomplete_directory_for(self.output_dir, snapshot.step)
        with self._agreed():
            for name, write in snapshot.small_files.items():
                write(directory / name)
                _sync(directory / name)
        mine: dict[str, Any] = {}
        for part, folder in PARTS.items():
            state: Mapping[str, Any] = {}
            with self._agreed():
                state = state_of(part)
            mine |= self._save_state(state, part, directory / folder)
        with self._agreed():
            mine |= layout.describe_files(directory, list(snapshot.small_files))
        described = self._gather(mine)
        final = layout.directory_for(self.output_dir, snapshot.step)
        with self._agreed():
            if distributed.is_main():
                files = {name: facts for part in described for name, facts in part.items()}
                layout.commit(directory, final, files, {"step": snapshot.step, **snapshot.facts})
        self._completed = final

    def _save_state(self, state: Mapping[str, Any], key: str, directory: Path) -> dict[str, Any]:
        """Write one part; return what the manifest says of this rank's files."""
        import torch.distributed.checkpoint as dcp

        with self._agreed():
            if distributed.is_main():
                directory.mkdir()
        with progress.bar(_local_bytes(state), f"save {key}", leave=False) as shown:
            writer, described = saving.storage_writer(directory, shown.update)
            dcp.save({key: dict(state)}, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        mine = {f"{directory.name}/{name}": facts for name, facts in described.items()}
        with self._agreed():
            if distributed.is_main():
                _sync(directory / METADATA_FILE)
                mine |= layout.describe_files(directory.parent, [f"{directory.name}/{METADATA_FILE}"])
        return mine

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    @contextlib.contextmanager
    def _agreed(self) -> Any:
        """Fail on every rank if one fails, over the writer's own group."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failures = [report for report in self._gather(None if error is None else _describe(error)) if report]
        if error is not None:
            raise error
        if failures:
            raise CheckpointError(f"the checkpoint was not written: {failures[0]}. Earlier checkpoints are intact.")


def _describe(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # DCP collects the ranks' errors; the system's own says most
    if failures:
        causes = [failure[0] for failure in failures.values()]
        return _describe(next((cause for cause in causes if isinstance(cause, OSError)), causes[0]))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def _local_bytes(value: Any) -> int:
    """Return the bytes that this rank holds of a state: those of whole tensors, of DTensors' and ShardedTensors' shards."""
    if isinstance(value, Mapping):
        return sum(_local_bytes(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return sum(_local_bytes(inner) for inner in value)
    if hasattr(value, "local_shards"):
        return sum(shard.tensor.nbytes for shard in value.local_shards())
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.nbytes if isinstance(local, torch.Tensor) else 0


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def save_tensors(value: Any) -> Callable[[Path], None]:
    """Return a function that `torch.save`s a value under a path; the value is taken as it is now."""
    return lambda path: torch.save(value, path)


def save_bytes(content: bytes) -> Callable[[Path], None]:
    """Return a function that writes bytes under a path."""

    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def save_text(text: str) -> Callable[[Path], None]:
    """Return a function that writes text under a path."""

    def write(path: Path) -> None:
        path.write_text(text)

    return write
