"""Gives the shards of a model that was built on meta their values, and proves that the right ones arrived.

Called from the seams, once, when Accelerate has cut the model. FSDP2 gets its local shards filled in place;
FSDP1 gets one unit after the other, because it flattens a unit's parameters before it cuts them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading import bnb_4bit, dora, names, resize, verify
from hf_fsdp_recipes.loading.distribute import broadcast_whole, scatter
from hf_fsdp_recipes.loading.shard_layout import LOAD_TITLE, Checksums, ShardGroup, ShardTarget, read_direct
from hf_fsdp_recipes.metrics import progress


def fill_sharded(model: torch.nn.Module, source: Any, device: torch.device, is_offloaded: bool) -> None:
    """Fill every meta DTensor of an FSDP2 model with this rank's slice of the checkpoint.

    Collective: every rank must call this, after `fully_shard` and before the first forward.

    Args:
        model: an FSDP2 model; DTensors sharded on dimension 0 over one mesh, plain tensors replicated.
        source: the CheckpointSource that load_model left on it.
        device: where this rank computes.
        is_offloaded: whether shards live on the CPU (CPUOffloadPolicy).

    Raises:
        LoadError: the same on every rank, before any byte moves (a parameter without a source, a mesh or
            placement that is not supported) or after (a checksum that differs).
    """
    home = torch.device("cpu") if is_offloaded else device
    sharded: list[ShardTarget] = []
    whole: list[ShardTarget] = []
    packed: list[Any] = []
    group: ShardGroup | None = None
    with distributed.sync_errors():
        resize.apply_resize(model, source)
        check_sources(model, source)
        find_layer = bnb_4bit.layer_finder(model)
        for name, parameter, owners in _unique_parameters(model):
            if not parameter.is_meta:
                continue
            replacement = torch.nn.Parameter(
                torch.empty_like(parameter, device=home), requires_grad=parameter.requires_grad
            )
            for module, leaf in owners:
                module._parameters[leaf] = replacement
            if dora.is_magnitude(name):
                continue
            if hasattr(parameter, "device_mesh"):
                group = group or _shard_group(parameter.device_mesh, parameter.placements)
                destination = _sharded_destination(name, replacement, source, len(group.ranks), group.position)
                if destination.is_packed:
                    base_name = names.in_base_model(name)
                    packed.append((destination, source.quantized[base_name], find_layer(base_name)))
                else:
                    sharded.append(destination)
            else:
                whole.append(whole_destination(name, replacement, source))
    checksums = Checksums(covers_all=source.verify == "full")
    sharded.sort(key=lambda destination: _place_in_files(destination, source))
    packed.sort(key=lambda item: _place_in_files(item[0], source))
    if group is not None and source.source == "direct":
        with distributed.sync_errors():
            read_direct(sharded, source.checkpoint, group.position)
    elif group is not None:
        scatter(sharded, source.checkpoint, group, checksums)
    if group is not None and packed:
        bnb_4bit.scatter(packed, source.checkpoint, group, checksums, device, source.source == "direct")
        bnb_4bit.check_states([layer for _, _, layer in packed])
    for destination in whole:
        broadcast_whole(destination, source.checkpoint, device)
    fill_buffers(model, source, device)
    dora.fill(model)
    position = group.position if group else 0
    arrived = [*sharded, *whole, *(destination for destination, _, _ in packed)]
    verify.check(model, arrived, checksums, position, covers_direct=source.source == "direct")
    if source.checkpoint is not None:
        source.checkpoint.close()


def fill_buffers(model: torch.nn.Module, source: Any, device: torch.device) -> None:
    """Give every rank the buffers that the checkpoint holds. Collective: every rank must call this."""
    for name, buffer in model.named_buffers():
        if names.in_base_model(name) in source.pieces:
            staging = torch.empty_like(buffer, device=buffer.device)
            destination = whole_destination(name, staging, source)
            broadcast_whole(destination, source.checkpoint, device)
            buffer.copy_(staging)


def unit_filler(model: torch.nn.Module, source: Any, device: torch.device) -> Callable[[torch.nn.Module], Any]:
    """Return FSDP1's `param_init_fn`: it makes one module's own meta parameters real, with rank 0's values.

    Collective: FSDP1 calls it module by module, in the same order on every rank. Buffers are left alone:
    `to_empty`, the usual way, would also empty real ones (rotary frequencies), and nothing would tell.
    """
    with distributed.sync_errors():
        resize.apply_resize(model, source)
        dora.check_absent(model)
        check_sources(model, source)
    full_names = {id(module): name for name, module in model.named_modules()}
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    shared: dict[int, torch.nn.Parameter] = {}
    sizes = {id(parameter): parameter.nbytes for parameter in model.parameters() if parameter.is_meta}
    shown = progress.bar(sum(sizes.values()), LOAD_TITLE)

    def fill(module: torch.nn.Module) -> torch.nn.Module:
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            real = shared.get(id(parameter))
            if real is None:
                name = f"{full_names[id(module)]}.{leaf}".lstrip(".")
                real = _whole_parameter(name, module, parameter, source, device)
                shown.update(sizes[id(parameter)])
                if shown.n == shown.total:
                    shown.close()  # nobody says when FSDP1 has asked for the last one
                if uses[id(parameter)] > 1:
                    shared[id(parameter)] = real
            module._parameters[leaf] = real
        return module

    return fill


def _whole_parameter(
    name: str, module: torch.nn.Module, parameter: torch.nn.Parameter, source: Any, device: torch.device
) -> torch.nn.Parameter:
    """Return a meta parameter's real twin with rank 0's values. Collective: every rank must call this."""
    base_name = names.in_base_model(name)
    if base_name in source.quantized:
        return bnb_4bit.unit_weight(source, base_name, module, device)
    real = torch.nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    broadcast_whole(whole_destination(name, real, source), source.checkpoint, device)
    return real


def check_sources(model: torch.nn.Module, source: Any) -> None:
    """Refuse a model with a meta parameter that nothing fills. Any rank, no collective.

    Raises:
        LoadError: names the parameters, and adapters whose init needs the base weights (PiSSA, ...).
    """
    lost = []
    for name, parameter in model.named_parameters():
        is_filled = names.in_base_model(name) in source.pieces and (
            not names.is_adapter(name) or ".modules_to_save." in name
        )
        if parameter.is_meta and not is_filled and not dora.is_magnitude(name):
            lost.append(name)
    if lost:
        raise LoadError(
            f"{len(lost)} parameters are on meta and the checkpoint has nothing for them: {lost[:3]}. Rule: adapters "
            f"whose initial value is computed from the base weights (PiSSA, OLoRA, LoftQ) and modules that were "
            f"added on meta cannot be filled. Remedy: initialise them with real weights, or load with from_pretrained."
        )


def whole_destination(name: str, tensor: torch.Tensor, source: Any) -> ShardTarget:
    """Describe a tensor that every rank holds whole."""
    pieces = source.pieces[names.in_base_model(name)]
    wire_dtype = source.stored[pieces[0].tensor].dtype
    local = tensor.detach().view(-1)
    return ShardTarget(name, pieces, wire_dtype, tensor.dtype, [(0, tensor.numel())], local)


def _sharded_destination(name: str, parameter: Any, source: Any, num_members: int, position: int) -> ShardTarget:
    base_name = names.in_base_model(name)
    pieces = source.pieces[base_name]
    is_packed = base_name in source.quantized
    wire_dtype = parameter.dtype if is_packed else source.stored[pieces[0].tensor].dtype
    local = parameter.detach().to_local().view(-1)
    runs = list(_row_runs(tuple(parameter.shape), num_members))
    if runs[position][1] != local.numel():
        raise LoadError(
            f"{name}: this rank holds {local.numel()} elements and dimension 0 gives it {runs[position][1]}"
        )
    return ShardTarget(name, pieces, wire_dtype, parameter.dtype, runs, local, is_packed)


def _row_runs(shape: tuple[int, ...], num_members: int) -> Iterator[tuple[int, int]]:
    """Yield (first element, number of elements) of each member's rows, as `torch.chunk` deals them out."""
    num_rows = shape[0] if shape else 1
    row = 1
    for size in shape[1:]:
        row *= size
    per_member = -(-num_rows // num_members)
    for member in range(num_members):
        first = min(member * per_member, num_rows)
        yield first * row, (min(first + per_member, num_rows) - first) * row


def _shard_group(mesh: Any, placements: Any) -> ShardGroup:
    from torch.distributed.tensor import Shard

    cut = [dim for dim, placement in enumerate(placements) if placement.is_shard()]
    copied = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
    if len(cut) != 1 or placements[cut[0]] != Shard(0) or len(copied) > 1 or len(cut) + len(copied) != mesh.ndim:
        raise LoadError(
            f"parameters are placed as {tuple(placements)}. Rule: cut once, on dimension 0, and copied at most once "
            f"(full or hybrid sharding). Remedy: leave tensor, context and expert parallelism out of the template."
        )
    coordinate = mesh.get_coordinate()
    first_copy = mesh.mesh.select(copied[0], 0) if copied else mesh.mesh
    return ShardGroup(
        ranks=first_copy.flatten().tolist(),
        position=coordinate[cut[0]],
        holds_first_copy=not copied or coordinate[copied[0]] == 0,
        copies=mesh.get_group(copied[0]) if copied and mesh.size(copied[0]) > 1 else None,
        group=mesh.get_group(cut[0]) if not copied or coordinate[copied[0]] == 0 else None,
    )


def _unique_parameters(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Parameter, list[tuple[torch.nn.Module, str]]]]:
    found: dict[int, tuple[str, torch.nn.Parameter, list[tuple[torch.nn.Module, str]]]] = {}
    for module_name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{module_name}.{leaf}".lstrip(".")
                found.setdefault(id(parameter), (name, parameter, []))[2].append((module, leaf))
    yield from found.values()


def _place_in_files(destination: ShardTarget, source: Any) -> tuple[str, int]:
    stored = source.stored[destination.pieces[0].tensor]
    return str(stored.file), stored.start


def broadcast_real(model: torch.nn.Module, device: torch.device) -> None:
    """Make the parameters that are real before sharding (adapters) rank 0's. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for parameter in model.parameters():
        if not parameter.is_meta:
            values = parameter.detach().to(device)
            dist.broadcast(values, src=0)
            parameter.data.copy_(values)
