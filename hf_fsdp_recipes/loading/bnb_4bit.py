"""4-bit weights on arrival: one rank reads a weight, quantises it and sends every rank its slice of the packed bytes.

No rank ever holds more than one unquantised weight (twice where it has to be transposed). A weight's scales
(bitsandbytes' quant state: four bytes for
64 weights, one with nested quantisation) go to every rank whole, as in the stock path: whoever gathers the
weight needs all of them. Knows bitsandbytes' 4-bit formats only; everything else is refused by name.

Source: bitsandbytes 0.50 `functional.py` (`quantize_4bit`, `QuantState`), `nn/modules.py` (`Linear4bit` takes the
quant state from the module where FSDP has replaced its parameter); transformers 5.23 `quantizers/`.
"""

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.safetensors_index import ReadAhead, SafetensorsIndex
from hf_fsdp_recipes.loading.shard_layout import (
    SAMPLE_ELEMENTS,
    Checksums,
    ShardGroup,
    ShardTarget,
    as_bytes,
    read_run,
    whole_in_files,
)
from hf_fsdp_recipes.loading.weight_mapping import TensorRange
from hf_fsdp_recipes.metrics import progress

PART_ELEMENTS = 512 * 1024  # a multiple of a block of 64; what fits into a core's cache with its temporaries
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Quant4bitSpec:
    """How one weight becomes 4-bit.

    Attributes:
        shape: of the weight as the checkpoint's pieces give it.
        dtype: what it is cast to first, the model's dtype.
        is_transposed: whether the layer wants its transpose (GPT-2's Conv1D).
        quant_type: nf4 or fp4.
        has_nested_scales: whether the scales are quantised too (`use_bnb_nested_quant`).
        storage: dtype that the packed bytes are held in; FSDP shards and gathers in it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_transposed: bool
    quant_type: str
    has_nested_scales: bool
    storage: torch.dtype

    def quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the packed weight, (n, 1) in `storage`, and its quant state."""
        from bitsandbytes.functional import quantize_4bit

        weight = values.view(self.shape)
        weight = weight.T.contiguous() if self.is_transposed else weight
        if weight.device.type == "cpu":
            return self._quantize_in_parts(weight)
        return quantize_4bit(
            weight.to(self.dtype),
            compress_statistics=self.has_nested_scales,
            quant_type=self.quant_type,
            quant_storage=self.storage,
        )

    def _quantize_in_parts(self, weight: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Quantise part by part: the same bytes, without bitsandbytes' CPU temporaries of ten times the weight."""
        from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

        parts = [
            quantize_4bit(part.to(self.dtype), quant_type=self.quant_type, quant_storage=self.storage)
            for part in weight.reshape(-1).split(PART_ELEMENTS)
        ]
        absmax, of_parts = torch.cat([state.absmax for _, state in parts]), parts[0][1]
        nested: dict[str, Any] = {}
        if self.has_nested_scales:
            nested["offset"] = absmax.mean()
            absmax, nested["state2"] = quantize_blockwise(absmax - nested["offset"], blocksize=256)
        shared = {name: getattr(of_parts, name) for name in ("code", "blocksize", "quant_type", "dtype")}
        state = QuantState(absmax, weight.shape, **shared, **nested)
        return torch.cat([packed for packed, _ in parts]), state


def prepare_config(config: Any, dtype: torch.dtype) -> Any:
    """Return the quantisation config with a storage dtype that FSDP can shard. No collective.

    FSDP casts what it gathers to the mixed-precision dtype, so packed bytes survive only in that dtype; and
    Accelerate leaves integer storage, bitsandbytes' default, out of sharding.

    Raises:
        LoadError: a kind of quantisation that cannot be sharded.
    """
    import copy

    if not getattr(config, "load_in_4bit", False):
        kind = "8-bit" if getattr(config, "load_in_8bit", False) else type(config).__name__
        raise LoadError(f"{kind} weights cannot be sharded. Rule: 4-bit bitsandbytes. Remedy: load_in_4bit.")
    wanted = PRECISIONS.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), dtype)
    if config.bnb_4bit_quant_storage != wanted:
        distributed.print_main(f"load: 4-bit weights are stored as {wanted}, which FSDP shards and does not cast")
    config = copy.deepcopy(config)
    config.bnb_4bit_quant_storage = wanted
    return config


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def replace_linears(model: Any, config: Any, dtype: torch.dtype) -> Any:
    """Replace a meta model's linear layers by 4-bit ones, still of full shape. Returns the quantizer. No collective.

    Raises:
        LoadError: bitsandbytes is missing or does not work here.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
        quantizer.validate_environment(device_map=None)
        with _default_dtype(dtype):  # the new layers' biases are made in it
            quantizer.preprocess_model(model=model, device_map={"": "cpu"}, checkpoint_files=None)
    except (ImportError, RuntimeError) as error:
        raise LoadError(
            f"4-bit weights need bitsandbytes: {str(error).splitlines()[0]} Remedy: pip install bitsandbytes."
        ) from error
    return quantizer


def pack(model: Any, quantizer: Any, dtype: torch.dtype) -> dict[str, Quant4bitSpec]:
    """Give the 4-bit layers' meta weights the shape of the packed bytes; return how each is made. No collective."""
    from bitsandbytes.nn import Linear4bit, Params4bit
    from transformers.pytorch_utils import Conv1D

    recipes = {}
    for name, module in model.named_modules():
        if not isinstance(module, Linear4bit):
            continue
        # In evaluation on CPUs bitsandbytes repacks a layer's weight for good, which a gathered one does not survive.
        module.support_avx512bf16_for_cpu = False
        old = module.weight
        is_transposed = issubclass(module.source_cls, Conv1D)
        shape = (module.in_features, module.out_features) if is_transposed else tuple(old.shape)
        recipe = Quant4bitSpec(shape, dtype, is_transposed, old.quant_type, old.compress_statistics, old.quant_storage)
        num_items = -(-old.numel() // 2) // recipe.storage.itemsize
        module.weight = Params4bit(
            torch.empty((num_items, 1), dtype=recipe.storage, device="meta"),
            requires_grad=False,
            compress_statistics=recipe.has_nested_scales,
            quant_type=recipe.quant_type,
            quant_storage=recipe.storage,
            bnb_quantized=True,
        )
        recipes[f"{name}.weight"] = recipe
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model, config=model.config)
    return recipes


def quantize(
    checkpoint: SafetensorsIndex, pieces: Sequence[TensorRange], recipe: Quant4bitSpec, device: torch.device
) -> Any:
    """Read one weight whole and quantise it. On the rank that reads."""
    wire_dtype = checkpoint.tensors[pieces[0].tensor].dtype
    values = torch.empty(torch.Size(recipe.shape).numel(), dtype=wire_dtype)
    read_run(checkpoint, pieces, wire_dtype.itemsize, 0, as_bytes(values))
    return recipe.quantize(values.to(device))


def scatter(
    work: Sequence[tuple[ShardTarget, Quant4bitSpec, torch.nn.Module]],
    checkpoint: SafetensorsIndex | None,
    group: ShardGroup,
    checksums: Checksums,
    device: torch.device,
    takes_turns: bool,
) -> None:
    """Fill every rank's slices of the packed weights and every layer's quant state.

    Collective: every rank must call this, with the same work in the same order.

    Args:
        work: packed destination, how it is made, and the layer, for each 4-bit weight.
        checkpoint: on global rank 0, or on every rank with `takes_turns`.
        group: how the packed weights are cut and copied.
        checksums: of what rank 0 sent, for every member; filled where one rank reads.
        device: where to quantise.
        takes_turns: each rank of the first copy reads and quantises one weight of each round.
    """
    owners = group.ranks if takes_turns else group.ranks[:1]
    sizes = [sum(count for _, count in item.runs) * item.dtype.itemsize for item, _, _ in work]
    mine: Iterator[Any] = iter(())
    made: Any = None
    if checkpoint is not None and distributed.rank() in owners:
        mine = _quantize_each(work[list(owners).index(distributed.rank()) :: len(owners)], checkpoint, device)
    for number, (destination, _, layer) in enumerate(progress.each(work, "load 4-bit weights", sizes=sizes)):
        turn = number % len(owners)
        if turn == 0:
            with distributed.sync_errors():
                made = next(mine, None)  # all owners are at it at the same time
        packed = state = None
        if distributed.rank() == owners[turn]:
            packed, state = made
            if not takes_turns:
                _add_checksums(checksums, destination, packed)
        _send_slices(destination, packed, group, turn)
        layer.quant_state = broadcast_state(state, owners[turn], device)


def _quantize_each(
    own: Sequence[tuple[ShardTarget, Quant4bitSpec, torch.nn.Module]],
    checkpoint: SafetensorsIndex,
    device: torch.device,
) -> Iterator[Any]:
    """Quantise this rank's weights, each when it is asked for."""
    wanted = (run for destination, _, _ in own for run in whole_in_files(checkpoint, destination.pieces))
    ahead = ReadAhead(checkpoint, wanted)
    for destination, recipe, _ in own:
        yield quantize(checkpoint, destination.pieces, recipe, device)
        ahead.advance(sum(num_bytes for _, _, num_bytes in whole_in_files(checkpoint, destination.pieces)))


def _send_slices(destination: ShardTarget, packed: torch.Tensor | None, group: ShardGroup, owner: int) -> None:
    local = destination.local
    if group.holds_first_copy:
        slices = None
        if packed is not None:
            longest = max(count for _, count in destination.runs)
            slices = [_padded(packed.view(-1)[first : first + count], longest) for first, count in destination.runs]
        received = torch.empty(max(count for _, count in destination.runs), dtype=local.dtype, device=local.device)
        _scatter_bytes(received, slices, group.ranks[owner], group.group)
        local.copy_(received[: local.numel()])
    if group.copies is not None and local.numel():
        dist.broadcast(as_bytes(local), group_src=0, group=group.copies)


def _scatter_bytes(received: torch.Tensor, slices: Any, source: int, group: Any) -> None:
    if not dist.is_initialized():
        received.copy_(slices[0])
        return
    outgoing = None if slices is None else [as_bytes(slice_.to(received.device)) for slice_ in slices]
    dist.scatter(as_bytes(received), outgoing, src=source, group=group)


def _padded(run: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(run, (0, length - run.numel())) if run.numel() < length else run.contiguous()


def _add_checksums(checksums: Checksums, destination: ShardTarget, packed: torch.Tensor) -> None:
    for position, (first, count) in enumerate(destination.runs):
        checksums.add(destination.name, position, 0, packed.view(-1)[first : first + count].cpu())


def broadcast_state(state: Any, source: int, device: torch.device) -> Any:
    """Return one rank's quant state on every rank. Collective: every rank must call this."""
    from bitsandbytes.functional import QuantState

    if not dist.is_initialized():
        return state
    tensors: dict[str, Any] = {} if state is None else state.as_dict(packed=True)
    box: list[Any] = [{key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}]
    dist.broadcast_object_list(box, src=source)
    received = {}
    for key, (shape, dtype) in box[0].items():
        tensor = tensors[key].to(device) if key in tensors else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, src=source)
        received[key] = tensor
    return state if state is not None else QuantState.from_dict(received, device=device)


def unit_weight(source: Any, name: str, layer: torch.nn.Module, device: torch.device) -> torch.nn.Parameter:
    """Return one packed weight whole, for FSDP1, which flattens it into its unit. Collective."""
    recipe, pieces = source.quantized[name], source.pieces[name]
    packed, state = torch.empty_like(layer.weight, device=device).data, None
    if source.checkpoint is not None and distributed.is_main():
        packed, state = quantize(source.checkpoint, pieces, recipe, device)
    if dist.is_initialized():
        dist.broadcast(as_bytes(packed), src=0)
    layer.quant_state = broadcast_state(state, 0, device)
    return torch.nn.Parameter(packed.view(-1, 1), requires_grad=False)


def check_states(layers: Sequence[torch.nn.Module]) -> None:
    """Check that the scales are the same on all ranks (a sample of each). Collective: every rank must call this.

    Raises:
        LoadError: the same on every rank; says which rank differs.
    """
    crc = 0
    for layer in layers:
        crc = zlib.crc32(as_bytes(layer.quant_state.absmax[:SAMPLE_ELEMENTS].cpu().contiguous()).numpy(), crc)
    found = distributed.gather_objects(crc)
    different = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
    if different:
        raise LoadError(
            f"the scales of 4-bit weights on ranks {different} are not rank 0's. Remedy: check the network."
        )


def layer_finder(model: torch.nn.Module) -> Callable[[str], torch.nn.Module]:
    """Return a function from a base-model parameter name to the module that holds it, whatever wraps it."""
    from hf_fsdp_recipes.loading import names

    owners = {
        names.in_base_model(f"{module_name}.weight".lstrip(".")): module
        for module_name, module in model.named_modules()
        if "weight" in module._parameters
    }
    return owners.__getitem__
