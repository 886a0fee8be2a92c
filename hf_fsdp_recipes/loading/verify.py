"""Verifies a freshly loaded model: nothing is on meta, ties are intact, values are finite, buffers are equal on all ranks."""

import zlib
from collections.abc import Iterable

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.read_ranges import as_bytes


def check_model(model: torch.nn.Module) -> None:
    """Raise a LoadError on every rank if a loaded model has meta tensors, broken ties or buffers that differ between ranks.

    Collective: every rank must call this.
    """
    with distributed.sync_errors():
        left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
        if left:
            raise LoadError(
                f"{len(left)} parameters or buffers have no values after loading: {left[:3]}. Please report this with the model's "
                f"id."
            )
        _check_ties(model)
    check_buffers(model)


def _check_ties(model: torch.nn.Module) -> None:
    """Check that weights tied by the config are the same tensor."""
    for module in model.modules():
        tied: dict[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
        for target, origin in tied.items():
            try:
                pair = [module.get_parameter(name) for name in (target, origin)]
            except AttributeError:
                continue  # PEFT has wrapped one of the two and handles the tie
            if pair[0] is not pair[1]:
                raise LoadError(
                    f"{target} and {origin} are tied by the config but are two tensors after loading. Please report this with "
                    f"the model's id."
                )


def check_finite(
    parameters: Iterable[tuple[str, torch.Tensor]], name_or_path: str, sums: Iterable[torch.Tensor | None] = ()
) -> None:
    """Check that no loaded parameter contains NaN or infinity, with one device synchronization.

    `parameters` has the name and this rank's shard of each parameter; `sums`, the sums of the first shards if they are already
    known. Collective: every rank must call this.
    """
    own = find_non_finite(parameters, sums)
    found = list(dict.fromkeys(name for names in distributed.gather_objects(own) for name in names))
    if found:
        raise LoadError(
            f"{len(found)} parameters of {name_or_path} contain NaN or infinity: {', '.join(found[:3])}. Load an intact "
            f"checkpoint. If its values are finite, load it with dtype float32."
        )


def find_non_finite(tensors: Iterable[tuple[str, torch.Tensor]], sums: Iterable[torch.Tensor | None] = ()) -> list[str]:
    """Return the names of the tensors that contain NaN or infinity, with one synchronization per device if there are none.

    `sums` has the sums of the first tensors if they are already known.
    """
    by_device: dict[torch.device, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
    known = iter(sums)
    for name, values in tensors:
        total = next(known, None)
        if values.is_floating_point() and values.numel() and values.itemsize > 1:  # torch cannot add float8 values
            total = values.detach().sum() if total is None else total
            by_device.setdefault(values.device, []).append((name, values.detach(), total))
    suspects = [
        (name, values)
        for summed in by_device.values()
        for (name, values, _), is_finite_sum in zip(
            summed, torch.stack([total.isfinite() for *_, total in summed]).tolist(), strict=True
        )
        if not is_finite_sum
    ]
    # Finite values can have an infinite sum, so check the suspects again. `aminmax` propagates NaN and infinity and is
    # 30 times faster than `isfinite`.
    return [name for name, values in suspects if not torch.stack(torch.aminmax(values)).isfinite().all()]


def is_finite(values: torch.Tensor) -> bool:
    """Return whether a tensor contains neither NaN nor infinity, with one synchronization. Float8 values are not checked."""
    return not find_non_finite([("", values)])


def check_buffers(model: torch.nn.Module) -> None:
    """Raise a LoadError on every rank if a buffer differs between ranks. Collective: every rank must call this."""
    own = {
        name: zlib.crc32(as_bytes(buffer.detach().cpu().contiguous()).numpy()) for name, buffer in model.named_buffers()
    }
    of_rank_0 = distributed.broadcast_object(own)
    with distributed.sync_errors():
        different = [name for name in own if of_rank_0.get(name) != own[name]]
        if different:
            raise LoadError(
                f"buffer {different[0]!r} differs between rank 0 and rank {distributed.rank()}. Install the same packages on "
                f"every node; if they are the same, please report this with the model's id."
            )
