"""The emulated accelerator itself: what it refuses and what it delays, as an accelerator would."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

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


def start_group(first_seconds=5):
    """Start the default group on this rank's device; return the rank."""
    rank = int(os.environ["RANK"])
    os.environ["EMU_FIRST_SECONDS"] = str(first_seconds)
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    return rank


def refusal(call):
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    return str(caught.value)


def collectives():
    rank = start_group()
    values = torch.arange(4.0, device="npu") + rank
    part = torch.empty(2, device="npu")
    dist.reduce_scatter_tensor(part, values, op=dist.ReduceOp.AVG)
    with pytest.raises(RuntimeError, match="Duplicate device"):
        dist.all_reduce(torch.ones(2, device=f"npu:{1 - rank}"))
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.all_reduce(torch.ones(4, 4, device="npu")[:, ::2])
    dist.barrier()
    return part.tolist()


def pass_on(members, num_sent=2, num_received=2):
    """In one batch, send numbers to the next of these ranks and receive from the last one."""
    rank = dist.get_rank()
    place = members.index(rank)
    received = torch.empty(num_received, device="npu")
    sent = torch.full((num_sent,), float(rank), device="npu")
    batch = [
        dist.P2POp(dist.irecv, received, members[place - 1]),
        dist.P2POp(dist.isend, sent, members[(place + 1) % len(members)]),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return received.tolist()


def batch_of_all_ranks_first():
    rank = start_group()
    return pass_on([0, 1, 2]), pass_on([0, 2]) if rank != 1 else []


def batch_of_some_ranks_first(is_third_absent):
    if start_group(first_seconds=1) < 2:
        return refusal(lambda: pass_on([0, 1]))
    return "" if is_third_absent else refusal(lambda: dist.all_reduce(floats(4)))


def threads():
    """A thread may use a group after another, but not before the other's operation has ended."""
    rank = start_group()
    values = torch.ones(2, device="npu")
    first = threading.Thread(target=dist.all_reduce, args=(values,))
    first.start()
    first.join()
    dist.all_reduce(values)
    if rank == 1:
        return values.tolist(), refusal(lambda: dist.recv(values, 0))
    found = []
    work = dist.all_reduce(values, async_op=True)
    second = threading.Thread(
        target=lambda: found.append(refusal(lambda: dist.all_reduce(floats(4))))
    )
    second.start()
    second.join()
    return found, refusal(work.wait)


OPERATIONS = {
    "kind": (lambda: dist.all_reduce(floats(4)), lambda: dist.broadcast(floats(4), 0)),
    "dtype": (lambda: dist.all_reduce(floats(4)), lambda: dist.all_reduce(floats(4).int())),
    "size": (lambda: dist.all_reduce(floats(4)), lambda: dist.all_reduce(floats(5))),
    "root": (lambda: dist.broadcast(floats(4), 0), lambda: dist.broadcast(floats(4), 1)),
    "reduction": (
        lambda: dist.all_reduce(floats(4)),
        lambda: dist.all_reduce(floats(4), op=dist.ReduceOp.AVG),
    ),
}


def floats(number):
    return torch.ones(number, device="npu")


def different_operations(name):
    rank = start_group()
    dist.all_reduce(floats(1))
    return refusal(OPERATIONS[name][rank])


def different_sizes_in_a_batch(rank):
    pass_on([0, 1], num_sent=2 + rank)


def different_sizes(rank):
    if rank:
        dist.recv(floats(4), 0)
    else:
        dist.send(floats(5), 1)


def two_receives_first(rank):
    """Without a batch, each rank would receive before it sends, for ever."""
    work = dist.irecv(floats(4), 1 - rank)
    dist.send(floats(4), 1 - rank)
    work.wait()


def different_transfers(transfer):
    rank = start_group()
    dist.all_reduce(floats(1))
    return refusal(lambda: transfer(rank))


def test_memory_of_host_and_device_do_not_mix(ranks):
    ranks.run(memory_rules, 1)


def test_queued_work_is_late(ranks):
    ranks.run(queue_rules, 1)


def test_host_that_reads_device_memory_crashes(ranks):
    with pytest.raises(pytest.fail.Exception, match=r"rank 0: no report \(exit code -11"):
        ranks.run(read_device_memory_on_the_host, 1)


def test_collectives_have_the_rules_of_nccl(ranks):
    assert ranks.run(collectives, 2) == [[0.5, 1.5], [2.5, 3.5]]


def test_the_first_operation_may_be_a_batch_of_all_ranks(ranks):
    received = [([2.0] * 2, [2.0] * 2), ([0.0] * 2, []), ([1.0] * 2, [0.0] * 2)]
    assert ranks.run(batch_of_all_ranks_first, 3) == received


@pytest.mark.parametrize("is_third_absent", [False, True])
def test_a_batch_of_some_ranks_cannot_be_the_first_operation(ranks, is_third_absent):
    *refusals, of_third = ranks.run(batch_of_some_ranks_first, 3, is_third_absent)
    refusals += [] if is_third_absent else [of_third]
    sentence = "the first operation of a group must be one in which all its ranks take part"
    assert all(sentence in text for text in refusals)
    if is_third_absent:
        assert all(text.endswith("these ranks have not begun: 2") for text in refusals)


def test_two_threads_cannot_use_a_group_at_the_same_time(ranks):
    (in_thread, on_rank0), (values, on_rank1) = ranks.run(threads, 2)
    assert values == [4.0, 4.0]
    sentence = "two threads use one group at the same time"
    assert all(sentence in text for text in [*in_thread, on_rank0, on_rank1])


@pytest.mark.parametrize("name", OPERATIONS)
def test_ranks_must_call_the_same_operations(ranks, name):
    refusals = ranks.run(different_operations, 2, name)
    assert all("the same operations in the same order" in text for text in refusals)


@pytest.mark.parametrize(
    ("transfer", "sentence"),
    [
        (different_sizes, "a receive must fit its send"),
        (different_sizes_in_a_batch, "a receive must fit its send"),
        (two_receives_first, "sends and receives between two ranks must be in the same order"),
    ],
)
def test_sends_and_receives_must_fit(ranks, transfer, sentence):
    assert all(sentence in text for text in ranks.run(different_transfers, 2, transfer))


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
