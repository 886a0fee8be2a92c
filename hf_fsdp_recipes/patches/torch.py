"""torch: a workaround for aborts at exit, and a private part that is used with its own check.

`wait_for_gloo_at_exit` keeps a rank from being aborted when it exits right after a collective. It works around a race:
a gloo worker (`pt_gloo_runloop`) drops its reference to a collective's tensors only after it has woken the thread that
waited for the collective, and for tensors known to Python it needs the GIL to do so. If the interpreter begins to shut
down while the worker waits for the GIL, CPython up to 3.13 ends the worker with `pthread_exit`, which unwinds through a
C++ destructor: "terminate called without an active exception", SIGABRT. A worker that gets there later is safe; torch
no longer asks for the GIL then.

`destroy_process_group` does not help: it only drops references, FSDP2 keeps others, and so no worker is joined.

Source: torch 2.13 `torch/csrc/distributed/c10d/ProcessGroupGloo.cpp`, `runLoop`; `torch/csrc/PyInterpreter.cpp`, `decref`;
https://github.com/pytorch/pytorch/issues/190489. CPython 3.11 `Python/ceval_gil.h`, `take_gil`.
"""

import atexit
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_recipes.errors import PatchError

WORKER_NAME = "pt_gloo_runloop"
PAUSE_SECONDS = 0.02  # longer than the 5 ms after which a thread that waits for the GIL asks for it
TIMEOUT_SECONDS = 5.0  # in case a worker is busy with a collective that other ranks never join
_is_registered = False


def wait_for_gloo_at_exit() -> None:
    """Wait for gloo's workers when this process exits, whether it succeeds or fails. Idempotent; not a collective.

    Call this early: exit handlers run in reverse order, and this one is to run after those that use collectives.
    """
    global _is_registered
    # Python 3.14 suspends such a thread instead of unwinding it.
    if not _is_registered and sys.version_info < (3, 14):
        atexit.register(_wait_for_workers)
        _is_registered = True


def _wait_for_workers() -> None:
    """Release the GIL until no gloo worker of this process has anything left to do."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    num_idle_checks = 0
    # Twice, because a worker that has just been refused the GIL looks idle too.
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


def set_local_tensor(dtensor: Any, local: torch.Tensor) -> Any:
    """Give a DTensor another local tensor of the same shape and dtype, perhaps in host memory, and return it.

    `DTensor.from_local` would move the local tensor to the mesh's device.

    Raises:
        PatchError: this torch keeps a DTensor's local tensor elsewhere.
    """
    if not isinstance(getattr(dtensor, "_local_tensor", None), torch.Tensor):
        raise PatchError(
            f"torch {version('torch')} does not keep a DTensor's local tensor in _local_tensor. Install torch 2.11 to 2.13."
        )
    dtensor._local_tensor = local
    return dtensor
