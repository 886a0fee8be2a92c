"""Verifies a freshly loaded model: nothing on meta, weights tied and finite, equal buffers, matching checksums.

Checksums cover a sample of each shard unless `verify="full"`.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.read_ranges import as_bytes
from hf_fsdp_recipes.loading.shard_layout import ShardTarget

SAMPLE_ELEMENTS = 1024  # of each shard


@dataclass
class Checksums:
    """Running CRC-32 by (parameter, shard rank), over elements in the parameter's own dtype."""

    covers_all: bool
    values: dict[tuple[str, int], int] = field(default_factory=dict)

    def num_covered(self, count: int) -> int:
        """Return how many of a shard's `count` elements the checksum covers."""
        return count if self.covers_all else min(count, SAMPLE_ELEMENTS)

    def add(self, name: str, shard_rank: int, start: int, elements: torch.Tensor) -> None:
        """Add elements (1-D, in the parameter's dtype, CPU) that lie `start` elements into the shard."""
        if not self.covers_all:
            elements = elements[: max(0, SAMPLE_ELEMENTS - start)]
        if elements.numel():
            key = (name, shard_rank)
            self.values[key] = zlib.crc32(as_bytes(elements.contiguous()).numpy(), self.values.get(key, 0))


def check_model(
    model: torch.nn.Module, targets: Sequence[ShardTarget], expected: Checksums | None, shard_rank: int
) -> None:
    """Raise a LoadError on every rank if a check of a freshly loaded model fails. Collective: every rank must call this.

    Args:
        model: the model, sharded or not.
        targets: the targets that were filled.
        expected: rank 0's checksums of what it read; None if every rank read its own shards.
        shard_rank: index of this rank's shard.
    """
    if expected is not None:
        expected.values = distributed.broadcast_object(expected.values)
    with distributed.sync_errors():
        left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
        if left:
            raise LoadError(f"{len(left)} tensors are still on meta after loading: {left[:3]}")
        _check_ties(model)
        if expected is not None:
            _check_bytes(targets, expected, shard_rank)
    check_buffers(model)


def _check_ties(model: torch.nn.Module) -> None:
    """Check that weights tied by the config are the same tensor."""
    for module in model.modules():
        tied: dict[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
        for target, origin in tied.items():
            try:
                pair = [module.get_parameter(name) for name in (target, origin)]
            except AttributeError:
                continue  # PEFT has wrapped one of them and handles the tie
            if pair[0] is not pair[1]:
                raise LoadError(f"{target} and {origin} are tied by the config but are two tensors after loading")


def check_finite(parameters: Iterable[tuple[str, torch.Tensor]], name_or_path: str) -> None:
    """Check that no loaded parameter contains NaN or infinity, with one device synchronization.

    `parameters` are names and this rank's part of each. Collective: every rank must call this.

    Raises:
        LoadError: on every rank, with the number of such parameters and the first three.
    """
    own = find_non_finite(parameters)
    found = list(dict.fromkeys(name for names in distributed.gather_objects(own) for name in names))
    if found:
        raise LoadError(
            f"{len(found)} parameters of {name_or_path} contain NaN or infinity: {', '.join(found[:3])}. Load an intact "
            f"checkpoint; if its values are finite, load it with dtype float32."
        )


def find_non_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the tensors that contain NaN or infinity, with one synchronization per device."""
    flags: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, values in tensors:
        flags.setdefault(values.device, {})[name] = is_finite(values)
    return [
        name
        for found in flags.values()
        for name, flag in zip(found, torch.stack(list(found.values())).tolist(), strict=True)
        if not flag
    ]


def is_finite(values: torch.Tensor) -> torch.Tensor:
    """Return whether all values are finite, as a tensor, without a device synchronization.

    `aminmax` propagates NaN and infinity and is 30 times faster than `isfinite`. float8, which it lacks, is not checked.
    """
    if not values.is_floating_point() or not values.numel() or values.itemsize == 1:
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.stack(torch.aminmax(values.detach())).isfinite().all()


def check_buffers(model: torch.nn.Module) -> None:
    """Raise a LoadError on every rank if a buffer differs between ranks. Collective: every rank must call this."""
    own = {
        name: zlib.crc32(as_bytes(buffer.detach().cpu().contiguous()).numpy()) for name, buffer in model.named_buffers()
    }
    gathered = distributed.gather_objects(own)
    with distributed.sync_errors():
        for rank, theirs in enumerate(gathered):
            different = [name for name in own if theirs.get(name) != own[name]]
            if different:
                raise LoadError(f"buffer {different[0]!r} differs between ranks {distributed.rank()} and {rank}")


def _check_bytes(targets: Sequence[ShardTarget], expected: Checksums, shard_rank: int) -> None:
    actual = Checksums(expected.covers_all)
    step = 4 * 1024 * 1024
    for target in targets:
        key = (target.name, shard_rank)
        if key not in expected.values:
            continue
        covered = target.local[: expected.num_covered(target.local.numel())]
        for start in range(0, covered.numel(), step):
            actual.add(target.name, shard_rank, start, covered[start : start + step].cpu())
        if actual.values[key] != expected.values[key]:
            raise LoadError(
                f"{target.name}: rank {distributed.rank()} received different bytes than rank 0 read (CRC-32 "
                f"{actual.values[key]:08x}, expected {expected.values[key]:08x}). Check the network and the memory."
            )
