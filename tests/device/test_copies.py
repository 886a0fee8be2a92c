"""Requests to the device during load, training, save and export: which code copies, on which stream, and which waits."""

import contextlib
from collections import Counter
from unittest import mock

import pytest
from safetensors.torch import load_file

from tests.device.emulator.events import TO_DEVICE, TO_HOST, WAITS, total_bytes
from tests.device.ranks import DEVICE

NUM_RANKS = 2
NUM_SAVES = 3


def asked_in(events, package):
    return [event for event in events if any(f".{package}." in frame for frame in event.project)]


def in_training(events):
    """Select the events of forward, backward and optimizer steps."""
    return [event for event in events if any(":training_step:" in frame for frame in event.upstream)]


def test_a_save_copies_the_state_once_and_beside_training(runs):
    run = runs.get("full")
    weights = load_file(run.output / "export" / "model.safetensors")
    num_values = sum(weight.numel() for weight in weights.values())
    state_bytes = 3 * 4 * num_values + 4 * NUM_RANKS * len(weights)  # two moments and a step for each parameter
    saving = asked_in(run.events, "checkpointing")
    copies = [event for event in saving if event.kind in TO_HOST and event.thread.startswith("checkpoint-")]
    assert total_bytes(copies) == NUM_SAVES * state_bytes
    assert {(event.kind, event.is_pinned, event.thread) for event in copies} == {
        ("d2h_async", True, "checkpoint-stager")
    }
    in_main_thread = [event for event in saving if event.thread == "MainThread"]
    assert [event.asked_by for event in in_main_thread if "divergence:check_run" not in str(event.project)] == []
    assert 0 not in {event.stream for event in saving if event.thread.startswith("checkpoint-")}


@pytest.mark.parametrize("name", ["full", "fsdp1"])
def test_no_rank_uses_the_device_of_another(runs, name):
    events = runs.get(name).events
    assert {(event.rank, event.device) for event in events if event.device >= 0} == {(0, 0), (1, 1)}


def test_loading_and_exporting_use_pinned_memory_and_streams_of_their_own(runs):
    run = runs.get("full")
    weights = load_file(run.output / "export" / "model.safetensors")
    num_bytes = sum(weight.nbytes for weight in weights.values())
    uploads = [event for event in asked_in(run.events, "loading") if event.kind == "h2d_async"]
    shards = {
        event.rank: event for event in reversed(uploads)
    }.values()  # each rank's first upload; later uploads are samples to verify
    assert num_bytes <= total_bytes(shards) < num_bytes + 2 * 64 * len(weights)  # each slice is aligned to 64 bytes
    assert {(event.is_pinned, event.stream > 0) for event in uploads} == {(True, True)}
    others = [event for event in asked_in(run.events, "loading") if event.kind in TO_DEVICE and event not in uploads]
    assert total_bytes(others) < 100  # only buffers
    downloads = [event for event in asked_in(run.events, "export") if event.thread.startswith("ThreadPool")]
    downloads = [event for event in downloads if event.kind in TO_HOST]
    assert total_bytes(downloads) == num_bytes
    assert {(event.kind, event.is_pinned, event.stream > 0) for event in downloads} == {("d2h_async", True, True)}


@pytest.mark.parametrize(
    ("name", "num_micro_batches", "waits"),
    [
        ("packing, checkpointing and accumulation", 6, {"item _ignore_causal_mask_sdpa"}),
        ("packed documents", 3, {"item find_packed_sequence_indices", "h2d_sync compute_loss"}),
    ],
)
def test_a_micro_batch_of_packed_rows_waits_only_for_upstream(runs, name, num_micro_batches, waits):
    """The waits are for transformers' mask and, with documents, for the number of tokens that TRL uploads."""
    events = [event for event in in_training(runs.get(name).events) if event.kind in WAITS]
    found = Counter((event.rank, f"{event.kind} {event.caller.split(':')[1]}") for event in events)
    assert found == {(rank, wait): num_micro_batches for rank in range(NUM_RANKS) for wait in waits}


def stage(without: str | None, read_first: bool, changes: bool) -> float:
    """Copy a tensor while training has work queued; return the copied value, which should be 5.

    Args:
        without: name of a CopyStream method to replace with one that does nothing.
        read_first: whether the copy is complete before the optimizer changes the tensor.
        changes: whether the optimizer changes the tensor.
    """
    import torch

    from hf_fsdp_recipes.checkpointing.staging import CopyStream, HostStaging

    values = torch.zeros(1000, device=torch.accelerator.current_accelerator())
    with mock.patch.object(CopyStream, without, lambda self: None) if without else contextlib.nullcontext():
        values.copy_(torch.full((1000,), 5.0).pin_memory(), non_blocking=True)  # queued; the device runs it late
        copies = CopyStream({"values": values})
        copies.wait_for_training()
        with copies.current():
            copied = HostStaging().copy({"values": values})["values"]
            copies.record_copies()
        if read_first:
            copies.synchronize()
        copies.hold_training()
        if changes:
            values.mul_(2)
        copies.synchronize()
        return copied[0].item()


@pytest.mark.parametrize(
    ("without", "read_first", "changes"),
    [("wait_for_training", True, True), ("hold_training", False, True), ("synchronize", False, False)],
)
def test_each_wait_of_a_save_is_needed(ranks, without, read_first, changes):
    assert ranks.run(stage, 1, None, read_first, changes, environment=DEVICE) == [5.0]
    assert ranks.run(stage, 1, without, read_first, changes, environment=DEVICE) != [5.0]
