"""Proves after loading that the model is whole: nothing on meta, ties tied, buffers equal, bytes as read.

Cheap and always on. Reads the shards; changes nothing.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.missing import warn_main
from hf_fsdp_recipes.loading.shard_layout import SAMPLE_ELEMENTS, Checksums, ShardTarget, as_bytes


def check(
    model: torch.nn.Module,
    destinations: Sequence[ShardTarget],
    expected: Checksums,
    position: int,
    covers_direct: bool = False,
) -> None:
    """Check a freshly loaded model. Collective: every rank must call this.

    Args:
        model: the model, sharded or not.
        destinations: what was filled, with this rank's slices.
        expected: rank 0's checksums of what it read.
        position: this rank's place in the cut.
        covers_direct: every rank read for itself, so there is nothing to compare with rank 0's reading.

    Raises:
        LoadError: the same on every rank; names the first parameter or buffer that is not as it should be.
    """
    if not covers_direct:
        expected.values = distributed.broadcast_object(expected.values)
    with distributed.sync_errors():
        left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
        if left:
            raise LoadError(f"{len(left)} tensors are still on meta after loading: {left[:3]}")
        check_ties(model)
        if not covers_direct:
            _check_bytes(destinations, expected, position)
    check_buffers(model, destinations)


def check_ties(model: torch.nn.Module) -> None:
    """Check that what the config ties is one tensor. Any rank, no collective."""
    for module in model.modules():
        for target, origin in (getattr(module, "all_tied_weights_keys", None) or {}).items():
            try:
                pair = [module.get_parameter(name) for name in (target, origin)]
            except AttributeError:
                continue  # PEFT wrapped one of the two; it keeps its own account of ties
            if pair[0] is not pair[1]:
                raise LoadError(f"{target} and {origin} are tied by the config and are two tensors after loading")


def check_buffers(model: torch.nn.Module, destinations: Sequence[ShardTarget] = ()) -> None:
    """Check that all buffers are the same on all ranks, and warn of NaN in what arrived anywhere.

    Collective: every rank must call this. One exchange for both, however many ranks there are.
    """
    mine = {name: _crc(buffer) for name, buffer in model.named_buffers()}
    gathered = distributed.gather_objects((mine, _with_nan(destinations)))
    with distributed.sync_errors():
        for rank, (theirs, _) in enumerate(gathered):
            different = [name for name in mine if theirs.get(name) != mine[name]]
            if different:
                raise LoadError(f"buffer {different[0]!r} differs between rank {distributed.rank()} and rank {rank}")
    found = sorted({name for _, names in gathered for name in names})
    if found:
        warn_main(f"{len(found)} parameters hold NaN in the checkpoint itself: {found[:3]}")


def _check_bytes(destinations: Sequence[ShardTarget], expected: Checksums, position: int) -> None:
    arrived = Checksums(expected.covers_all)
    for destination in destinations:
        if (destination.name, position) not in expected.values:
            continue
        slice_ = destination.local if expected.covers_all else destination.local[:SAMPLE_ELEMENTS]
        step = 4 * 1024 * 1024
        for start in range(0, slice_.numel(), step):
            arrived.add(destination.name, position, start, slice_[start : start + step].cpu())
        key = (destination.name, position)
        if arrived.values[key] != expected.values[key]:
            raise LoadError(
                f"{destination.name}: what arrived on rank {distributed.rank()} is not what rank 0 read (CRC-32 "
                f"{arrived.values[key]:08x}, not {expected.values[key]:08x}). Remedy: check the network and memory."
            )


def _with_nan(destinations: Sequence[ShardTarget]) -> list[str]:
    return [d.name for d in destinations if not d.is_packed and torch.isnan(d.local[:SAMPLE_ELEMENTS]).any()]


def _crc(tensor: Any) -> int:
    return zlib.crc32(as_bytes(tensor.detach().cpu().contiguous()).numpy())
