"""A rank that exits right after a collective keeps its own exit status."""

import signal
import subprocess
import sys

import pytest

# Two ranks' groups in one process. The main thread holds the GIL from the end of the collective to the end of the
# interpreter. Gloo's workers need the GIL to release the tensors, so they are still waiting for it at shutdown.
SCRIPT = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_fsdp_recipes.distributed import exit_with_message
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.patches.torch import wait_for_gloo_at_exit

{install}
store = dist.HashStore()
with ThreadPoolExecutor(2) as pool:
    groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)), range(2)))
tensors = [torch.ones(8_000_000) for _ in groups]
values = [tensor.numpy() for tensor in tensors]  # reading one of these does not release the GIL, unlike a tensor's
time.sleep(0.2)
sys.setswitchinterval(1000.0)
with exit_with_message():
    for group, tensor in zip(groups, tensors):
        group.allreduce([tensor])
    while not all(value[0] == value[-1] == 2 for value in values):
        pass
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
    {ending}
"""
ENDINGS = {"success": ("", 0), "error": ("raise ExportError('disk full')", 1)}


def exit_status(install: str, ending: str) -> int:
    script = SCRIPT.format(install=install, ending=ending)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120).returncode


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads thread states from /proc")
@pytest.mark.parametrize(("ending", "expected"), ENDINGS.values(), ids=ENDINGS)
def test_rank_keeps_its_exit_status_when_gloo_workers_wait_for_the_gil(ending, expected):
    assert exit_status("wait_for_gloo_at_exit()", ending) == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="CPython no longer ends such threads by unwinding them")
def test_torch_still_aborts_without_the_workaround():
    """If this test fails, torch has fixed the race: remove wait_for_gloo_at_exit."""
    assert any(exit_status("", "") == -signal.SIGABRT for _ in range(3))
