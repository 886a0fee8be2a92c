"""The emulated accelerator itself: what it refuses and what it delays, as an accelerator would."""

import threading

import pytest
import torch

from tests.device.emulator.build import BuildError, build
from tests.device.emulator.events import TO_HOST, read_events, total_bytes


def test_missing_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="there is no no-such-compiler"):
        build(tmp_path)


def memory_rules():
    values = torch.arange(20.0, device="npu")
    with pytest.raises(RuntimeError, match="same device"):
        values + torch.ones(20)
    assert torch.empty(3, device="npu").isnan().all()
    x = torch.randn(4, 5)
    torch.testing.assert_close((x.to("npu") @ x.to("npu").T).cpu(), x @ x.T)


def queue_rules():
    """A queued copy to pinned memory runs late, and sees later changes of the default stream."""
    side, values = torch.npu.Stream(), torch.arange(1000.0, device="npu")
    host = torch.empty(1000, pin_memory=True)
    assert host.is_pinned()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        host.copy_(values, non_blocking=True)
    assert host.isnan().all()
    values.mul_(2)  # does not wait for the copy
    copied = torch.npu.Event()
    copied.record(side)
    copied.synchronize()
    assert host[3] == 6
    devices = []
    torch.npu.set_device(1)
    thread = threading.Thread(target=lambda: devices.append(torch.npu.current_device()))
    thread.start()
    thread.join()
    assert devices == [0]  # a thread starts on device 0, whatever device its parent thread uses


def read_device_memory_on_the_host():
    import ctypes

    ctypes.string_at(torch.ones(8, device="npu").data_ptr(), 4)


def collectives():
    import os

    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    values = torch.arange(4.0, device="npu") + rank
    part = torch.empty(2, device="npu")
    dist.reduce_scatter_tensor(part, values, op=dist.ReduceOp.AVG)
    with pytest.raises(RuntimeError, match="Duplicate device"):
        dist.all_reduce(torch.ones(2, device=f"npu:{1 - rank}"))
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.all_reduce(torch.ones(4, 4, device="npu")[:, ::2])
    dist.barrier()
    return part.tolist()


def test_memory_of_host_and_device_do_not_mix(ranks):
    ranks.run(memory_rules, 1)


def test_queued_work_is_late(ranks):
    ranks.run(queue_rules, 1)


def test_host_that_reads_device_memory_crashes(ranks):
    with pytest.raises(pytest.fail.Exception, match=r"rank 0: no report \(exit code -11"):
        ranks.run(read_device_memory_on_the_host, 1)


def test_collectives_have_the_rules_of_nccl(ranks):
    assert ranks.run(collectives, 2) == [[0.5, 1.5], [2.5, 3.5]]


def copies():
    from torch_npu import watch

    watch.mark("first")
    values = torch.ones(256, device="npu").cpu()
    watch.mark("second")
    torch.empty(256, pin_memory=True).copy_(values.to("npu"), non_blocking=True)


def test_events_name_the_copy_and_who_asked(ranks, tmp_path):
    ranks.run(copies, 1, watch=tmp_path)
    to_host = [event for event in read_events(tmp_path, rank=0) if event.kind in TO_HOST]
    assert [(event.kind, event.is_pinned, event.phase) for event in to_host] == [
        ("d2h_sync", False, "first"),
        ("d2h_async", True, "second"),
    ]
    assert total_bytes(to_host) == 2 * 1024
    assert {event.thread for event in to_host} == {"MainThread"}
    assert all("test_emulator:copies" in event.caller for event in to_host)
