"""Workarounds for torch: aborts at exit, private parts of DTensor and FSDP2, and checkpoints that could run code.

`wait_for_gloo_at_exit` prevents an abort when a rank exits right after a collective. A gloo worker (`pt_gloo_runloop`) first
wakes the thread that waits for the collective and then releases the collective's tensors, for which it needs the GIL. If the
interpreter starts to shut down in between, CPython up to 3.13 ends the worker with `pthread_exit`, which unwinds through a C++
destructor and aborts. `destroy_process_group` does not help: FSDP2 keeps other references to the group, so no worker is joined.

`wait_for_gloo_workers` prevents a hang at the same moment under DDP. DDP's C++ reducer may hold the last reference to the process
group; the group's destructor then joins a worker that waits for the GIL, which the joining thread holds.

Source: torch 2.13 `ProcessGroupGloo.cpp`, `runLoop`; https://github.com/pytorch/pytorch/issues/190489; CPython 3.11
`Python/ceval_gil.h`, `take_gil`.
"""

import atexit
import contextlib
import functools
import gc
import io
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from hf_fsdp_recipes.errors import CheckpointError, PatchError
from hf_fsdp_recipes.patches.registry import Original, Patch, versions_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, LoadPlanner
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem

WORKER_NAME = "pt_gloo_runloop"
PAUSE_SECONDS = 0.02  # longer than the interpreter's 5 ms switch interval
TIMEOUT_SECONDS = 5.0  # limit, in case a worker waits for ranks that never join a collective
_is_registered = False
Chunks = set[tuple[str, int, int]]  # file, offset and length of each chunk to read from a DCP directory
_before_read: Callable[[Path, Chunks], None] | None = None


def wait_for_gloo_at_exit() -> None:
    """Wait for gloo's workers when this process exits. Idempotent; not a collective.

    Call this early: exit handlers run in reverse order, and this one must run after handlers that use collectives.
    """
    global _is_registered
    # Python 3.14 does not need this: at shutdown, it suspends a thread that asks for the GIL instead of unwinding it.
    if not _is_registered and sys.version_info < (3, 14):
        atexit.register(wait_for_gloo_workers)
        _is_registered = True


def wait_for_gloo_workers() -> None:
    """Sleep until all gloo workers of this process have taken the GIL and are idle, for at most 5 s; not a collective.

    Call this before the process group is destroyed.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    num_idle_checks = 0
    # Check twice, because a worker that waits for the GIL also looks idle.
    while _worker_states() and num_idle_checks < 2 and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
        num_idle_checks = num_idle_checks + 1 if _worker_states() <= {"S"} else 0


def _worker_states() -> set[str]:
    """Return the scheduler states of this process's gloo workers, such as R (runnable) and S (sleeping)."""
    states = set()
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(") ")
        except OSError:  # the thread has just ended
            continue
        if name == WORKER_NAME:
            states.add(rest.split()[0])
    return states


@contextlib.contextmanager
def deferred_save_errors() -> Iterator[None]:
    """Raise the first error of `torch.save` in the `with` body only at its end.

    A rank whose `torch.save` fails then still takes part in the collectives that follow, so the other ranks do not wait for it.
    """
    save, failures = torch.save, []

    def save_or_keep_error(*args: Any, **kwargs: Any) -> None:
        try:
            save(*args, **kwargs)
        except Exception as error:
            failures.append(error)

    torch.save = save_or_keep_error
    try:
        yield
    finally:
        torch.save = save
    if failures:
        raise failures[0]


def set_local_tensor(dtensor: DTensor, local: torch.Tensor) -> DTensor:
    """Replace a DTensor's local tensor with one of the same shape and dtype, and return the DTensor.

    Unlike with `DTensor.from_local`, the local tensor and the mesh may be on different devices.
    """
    if not isinstance(getattr(dtensor, "_local_tensor", None), torch.Tensor):
        raise PatchError(
            f"torch {version('torch')} does not keep a DTensor's local tensor in _local_tensor. Install {versions_of('torch')}."
        )
    dtensor._local_tensor = local
    return dtensor


# Gradients that are reduced in a dtype other than the parameters'.


if hasattr(FSDPParam, "to_accumulated_grad_if_needed"):  # torch 2.15 no longer reads the gathered parameter

    @Patch(
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_accumulated_grad_if_needed(self)",
        feature="reduction dtype",
        changes="A parameter that was never gathered is skipped, because it has no gradient.",
        reason="torch reads the gathered parameter, which does not exist for a frozen output head: TRL's fused loss uses the "
        "head's weight without calling the head. With gradient accumulation, the first step would fail.",
        upstream="to file: accumulating gradients with a reduce_dtype fails for a unit whose forward never ran",
    )
    def _convert_if_gathered(original: Original, self: FSDPParam) -> None:
        if hasattr(self, "_unsharded_param"):
            original(self)


# Checkpoints that could run code.

_METADATA = "Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata BytesStorageMetadata "
# Allowed classes by module: plain data that is built without running code from the file.
_ALLOWED = {
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": _METADATA + "ChunkStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",  # written by older torch
    "collections": "OrderedDict",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",  # Python 3.13
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only instances of the allowed classes. If the pickle alters a class, restores the class and raises an error."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._attributes: dict[type, dict[str, Any]] = {}

    def load(self) -> object:
        try:
            return super().load()
        finally:
            for each, before in self._attributes.items():
                if vars(each) != before:
                    for name in vars(each).keys() - before.keys():
                        delattr(each, name)
                    for name in before:
                        if vars(each)[name] is not before[name]:
                            setattr(each, name, before[name])
                    raise pickle.UnpicklingError(f"it alters the class {each.__name__}")

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _ALLOWED.get(module, "").split():
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which torch does not write there")
        found = super().find_class(module, name)
        if not isinstance(found, type):
            return functools.partial(found)  # so that the pickle cannot change the function's attributes
        self._attributes.setdefault(found, dict(vars(found)))
        return found


def load_metadata(stream: IO[bytes]) -> "Metadata":
    """Return the DCP `Metadata` in a `.metadata` file without running code from it; raise a CheckpointError if it is invalid."""
    from torch.distributed.checkpoint.metadata import Metadata

    name = getattr(stream, "name", ".metadata")
    is_collecting = gc.isenabled()
    gc.disable()  # garbage collection would take most of the time for a million chunks from hundreds of ranks
    try:
        metadata = _MetadataUnpickler(stream).load()
        paths = {PurePosixPath(info.relative_path) for info in (getattr(metadata, "storage_data", None) or {}).values()}
    except Exception as error:  # damaged pickles raise almost any exception
        raise CheckpointError(
            f"{name} cannot be read: {str(error) or type(error).__name__}. Use another checkpoint."
        ) from error
    finally:
        if is_collecting:
            gc.enable()
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{name} is not the metadata of a checkpoint. Use another checkpoint.")
    for path in paths:
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{name} refers to {path}, which is outside the checkpoint. Use another checkpoint.")
    return metadata


@Patch(
    "torch.distributed.checkpoint.FileSystemReader.read_metadata(self)",
    feature="checkpointing",
    changes="`.metadata` may only refer to the classes that DCP writes there.",
    reason="torch unpickles the file, so resuming could run any code in the checkpoint.",
    upstream="to file: `FileSystemReader.read_metadata` unpickles without restrictions",
)
def _read_metadata_safely(original: Original, self: "FileSystemReader", *args: Any, **kwargs: Any) -> "Metadata":
    from torch.distributed.checkpoint.metadata import StorageMeta

    with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
        metadata = load_metadata(stream)
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


@Patch(
    "torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.load_bytes(self, read_item, value)",
    feature="checkpointing",
    changes="Values that are not tensors are first loaded with `weights_only=True`, as a check.",
    reason="torch loads these values with `weights_only=False`, so resuming could run any code in the checkpoint.",
    upstream="to file: `DefaultLoadPlanner.load_bytes` loads with weights_only=False",
)
def _load_bytes_safely(
    original: Original, self: "DefaultLoadPlanner", read_item: "ReadItem", value: io.BytesIO
) -> None:
    try:
        torch.load(value, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{read_item.storage_index.fqn} in the checkpoint is not plain data. Use another checkpoint, or allow its classes "
            f"with torch.serialization.add_safe_globals."
        ) from error
    value.seek(0)
    original(self, read_item, value)


# Checkpoints in object storage.


def register_read_hook(hook: Callable[[Path, Chunks], None]) -> None:
    """Set the function to call before DCP reads a state. It gets the DCP directory and the chunks that this rank will read.

    Every rank calls the function, so the function may use collectives.
    """
    global _before_read
    _before_read = hook


@Patch(
    "torch.distributed.checkpoint.FileSystemReader.read_data(self, plan, planner)",
    feature="checkpointing",
    changes="If the checkpoint is in object storage, the bytes that this node's ranks will read are downloaded first.",
    reason="Which bytes a rank reads is known only after DCP has compared the model's shards with those in the checkpoint.",
    upstream="to file: a hook in `FileSystemReader` that is called with the plan before files are opened",
)
def _download_then_read(
    original: Original, self: "FileSystemReader", plan: "LoadPlan", planner: "LoadPlanner"
) -> "torch.futures.Future[None]":
    if _before_read is not None:
        stored = [self.storage_data[item.storage_index] for item in plan.items]
        _before_read(Path(self.path), {(info.relative_path, info.offset, info.length) for info in stored})
    return original(self, plan, planner)
