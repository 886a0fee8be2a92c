"""Weights are split into buckets, and the reading rank's work does not depend on the number of ranks."""

import dataclasses

import pytest
import torch

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.loading import distribute
from hf_fsdp_recipes.loading.distribute import WeightStream
from hf_fsdp_recipes.loading.safetensors_index import SafetensorsIndex, stored_in_memory
from hf_fsdp_recipes.loading.shard_layout import ShardTarget, row_range
from hf_fsdp_recipes.loading.shared_memory import NodeMemory
from hf_fsdp_recipes.loading.weight_mapping import TensorRange

SHAPES = {
    "a": ((500, 3), torch.bfloat16),
    "b": ((77,), torch.float32),
    "c": ((1001,), torch.uint8),
    "d": ((), torch.float64),
}


def make_targets(num_ranks=1, rank=0):
    targets = []
    for name, (shape, dtype) in SHAPES.items():
        first, count = row_range(shape, num_ranks, rank)
        ranges = [TensorRange(name, shape, 0, torch.Size(shape).numel())]
        targets.append(ShardTarget(name, ranges, dtype, dtype, first, torch.zeros(count, dtype=dtype)))
    return targets


def make_index():
    index = SafetensorsIndex(())
    for number, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        values = (torch.arange(torch.Size(shape).numel()) % 100 + number + 1).to(dtype)
        index.add_in_memory(stored_in_memory(name, dtype, shape), values)
    return index


@pytest.mark.parametrize("bucket_bytes", [64, 1024, 1 << 20])
def test_buckets_hold_every_element_once_in_order_and_aligned(bucket_bytes, monkeypatch):
    monkeypatch.setattr(distribute, "BUCKET_BYTES", bucket_bytes)
    targets = make_targets()
    seen = {target.name: 0 for target in targets}
    for bucket in distribute._buckets([(target, 0, target.num_elements) for target in targets]):
        end = 0
        for piece in bucket:
            assert piece.offset % distribute.ALIGNMENT == 0
            assert piece.offset >= end
            end = piece.offset + piece.num_bytes
            assert piece.first == seen[piece.target.name]
            seen[piece.target.name] += piece.count
        assert end <= bucket_bytes
    assert seen == {target.name: target.num_elements for target in targets}


@pytest.mark.parametrize("verifies_all", [True, False])
def test_a_changed_element_is_found(monkeypatch, verifies_all):
    monkeypatch.setattr(distribute, "BUCKET_BYTES", 1024)
    monkeypatch.setattr(distribute, "SAMPLE_ELEMENTS", 16)
    targets, index = make_targets(), make_index()
    stream = WeightStream(index, verifies_all)
    stream.fill(targets)
    stream.verify(targets)
    stream.check()
    first = 40 if verifies_all else next(distribute._spans(targets[0], False))[1]
    targets[0].local[first] = -1
    stream.verify(targets)
    with pytest.raises(distribute.LoadError, match="a: rank 0 received different bytes"):
        stream.check()


class Done:
    def wait(self):
        """Return immediately, like a completed request."""


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 8), (64, 8)])
def test_rank_0_sends_the_model_once_whatever_the_number_of_ranks(monkeypatch, num_nodes, ranks_per_node):
    """Runs rank 0's loop with stubs in place of the other ranks."""
    monkeypatch.setattr(distribute, "BUCKET_BYTES", 1024)
    memory = torch.empty(distribute.NUM_SLOTS * 1024, dtype=torch.uint8)
    first_ranks = range(0, num_nodes * ranks_per_node, ranks_per_node)
    node = NodeMemory(memory, list(range(ranks_per_node)), list(first_ranks))
    monkeypatch.setattr(distribute, "share_memory", lambda num_bytes: node)
    sent = []

    def transfer(self, operation, values, peer):
        if operation is torch.distributed.isend:
            sent.append((peer, values.numel()))
        return Done()

    monkeypatch.setattr(WeightStream, "_transfer", transfer)
    targets = make_targets(num_nodes * ranks_per_node)
    stream = WeightStream(make_index(), False)
    stream.fill(targets)
    to_next_node = [num_bytes for peer, num_bytes in sent if peer == ranks_per_node]
    signals = [(peer, num_bytes) for peer, num_bytes in sent if peer != ranks_per_node]
    model_bytes = sum(target.num_elements * target.dtype.itemsize for target in targets)
    assert model_bytes <= sum(to_next_node) < model_bytes + 64 * len(SHAPES) + 64 * len(to_next_node)
    assert {peer for peer, _ in signals} == set(range(1, ranks_per_node))
    assert len(signals) == (ranks_per_node - 1) * len(to_next_node)
    assert targets[0].local[0] == 1


def test_a_failed_read_is_raised_by_check_and_not_before(monkeypatch, tmp_path):
    """The exchange with other ranks completes first."""
    monkeypatch.setattr(distribute, "BUCKET_BYTES", 1024)
    targets, index = make_targets(), make_index()
    lost = dataclasses.replace(index.tensors["a"], name="lost", file=tmp_path / "lost.safetensors")
    index.tensors["lost"] = lost
    targets.append(dataclasses.replace(targets[0], ranges=[TensorRange("lost", lost.shape, 0, 1500)]))
    stream = WeightStream(index, False)
    stream.fill(targets)
    with pytest.raises(RecipeError, match=r"lost\.safetensors: No such file"):
        stream.check()
