"""Quantizes weights to 4 bits while they load: one rank reads and quantizes each weight, then all ranks get a shard.

No rank holds more than one unquantized weight at a time (two copies of it during a transpose). Every rank gets all scales
(bitsandbytes' quant state), because dequantizing a gathered weight needs them.

Source: bitsandbytes 0.50 `functional.py` (`quantize_4bit`, `QuantState`), `nn/modules.py` (`Linear4bit` takes the quant state
from the module if FSDP has replaced the weight); transformers 5.23 `quantizers/`.
"""

import copy
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError, summarize
from hf_fsdp_recipes.loading.distribute import WeightStream
from hf_fsdp_recipes.loading.read_ranges import as_bytes, byte_ranges, read_elements
from hf_fsdp_recipes.loading.safetensors_index import Prefetcher, SafetensorsIndex, stored_in_memory
from hf_fsdp_recipes.loading.shard_layout import ShardTarget
from hf_fsdp_recipes.loading.verify import is_finite
from hf_fsdp_recipes.loading.weight_mapping import TensorRange
from hf_fsdp_recipes.metrics import progress
from hf_fsdp_recipes.precision import mixed_precision_dtype
from hf_fsdp_recipes.units import format_bytes

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig, PreTrainedModel
    from transformers.quantizers.base import HfQuantizer

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
# A multiple of bitsandbytes' block size, 64. A chunk and its temporaries fit in a core's cache.
CPU_CHUNK_ELEMENTS = 512 * 1024


@dataclass(frozen=True)
class Quant4bitSpec:
    """How one weight is quantized."""

    shape: tuple[int, ...]  # the shape in the checkpoint
    dtype: torch.dtype  # the model's dtype, to which the weight is cast before it is quantized
    is_transposed: bool  # the 4-bit layer stores the transpose of the checkpoint's weight (GPT-2's Conv1D)
    quant_type: str  # nf4 or fp4
    has_nested_scales: bool  # the scales are quantized too (`use_bnb_nested_quant`)
    storage: torch.dtype  # dtype of the packed weight, in which FSDP shards and gathers it

    def quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, "QuantState"]:
        """Return the packed weight, of shape (n, 1) and dtype `storage`, and its quant state."""
        from bitsandbytes.functional import quantize_4bit

        weight = values.view(self.shape)
        weight = weight.T.contiguous() if self.is_transposed else weight
        if weight.device.type == "cpu":
            return self._quantize_in_chunks(weight)
        return quantize_4bit(
            weight.to(self.dtype),
            compress_statistics=self.has_nested_scales,
            quant_type=self.quant_type,
            quant_storage=self.storage,
        )

    def _quantize_in_chunks(self, weight: torch.Tensor) -> tuple[torch.Tensor, "QuantState"]:
        """Quantize on the CPU in chunks, because bitsandbytes' temporaries take ten times the size of their input."""
        from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

        chunks = [
            quantize_4bit(chunk.to(self.dtype), quant_type=self.quant_type, quant_storage=self.storage)
            for chunk in weight.reshape(-1).split(CPU_CHUNK_ELEMENTS)
        ]
        absmax, first_state = torch.cat([state.absmax for _, state in chunks]), chunks[0][1]
        nested: dict[str, Any] = {}
        if self.has_nested_scales:
            nested["offset"] = absmax.mean()
            absmax, nested["state2"] = quantize_blockwise(absmax - nested["offset"], blocksize=256)
        shared = {name: getattr(first_state, name) for name in ("code", "blocksize", "quant_type", "dtype")}
        state = QuantState(absmax, weight.shape, **shared, **nested)
        return torch.cat([packed for packed, _ in chunks]), state


def replace_linears(model: "PreTrainedModel", config: "BitsAndBytesConfig", dtype: torch.dtype) -> "HfQuantizer":
    """Replace a meta model's linear layers with 4-bit layers whose weights are not packed yet; return the quantizer.

    Not a collective. The packed bytes are stored in the mixed-precision dtype, so that FSDP's cast of gathered parameters to
    that dtype does not change them. bitsandbytes stores them as uint8 by default, but Accelerate does not shard integers.

    Raises:
        LoadError: this kind of quantization cannot be sharded, the model has experts that would stay unquantized, or
            bitsandbytes is missing or does not work on this machine.
    """
    from transformers.modeling_utils import local_torch_dtype
    from transformers.quantizers.auto import AutoHfQuantizer

    if not getattr(config, "load_in_4bit", False):
        kind = "8-bit" if getattr(config, "load_in_8bit", False) else type(config).__name__
        raise LoadError(f"{kind} weights cannot be sharded. Use 4-bit bitsandbytes weights (load_in_4bit).")
    check_experts(model, config.llm_int8_skip_modules or ())
    storage = mixed_precision_dtype() or dtype
    if config.bnb_4bit_quant_storage != storage:
        distributed.print_main(f"load: 4-bit weights are stored as {storage}, which FSDP shards without casting")
    config = copy.deepcopy(config)
    config.bnb_4bit_quant_storage = storage
    try:
        quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
        quantizer.validate_environment(device_map=None)
        with local_torch_dtype(dtype):  # the new layers create their biases in torch's default dtype
            quantizer.preprocess_model(model=model, device_map={"": "cpu"}, checkpoint_files=None)
    except (ImportError, RuntimeError) as error:
        raise LoadError(
            f"4-bit weights need bitsandbytes: {summarize(error, 'line')}. Run pip install bitsandbytes."
        ) from error
    return quantizer


def check_experts(model: torch.nn.Module, skipped: Collection[str] = ()) -> None:
    """Raise a LoadError if fused experts would stay unquantized, unless `llm_int8_skip_modules` names them.

    transformers quantizes linear layers only, but the fused experts of a layer are 3-D parameters.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    experts = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and ".experts." in name and should_convert_module(name.rpartition(".")[0], list(skipped))
    }
    if not experts:
        return
    num_bytes, all_bytes = (sum(p.nbytes for p in parameters) for parameters in (experts.values(), model.parameters()))
    name, parameter = next(iter(experts.items()))
    raise LoadError(
        f"bitsandbytes quantizes linear layers only: fused experts, such as {name}, would stay in {parameter.dtype} "
        f"({format_bytes(num_bytes)} of the model's {format_bytes(all_bytes)}). Remove load_in_4bit; or, to quantize only the "
        f'other layers, pass load_model a BitsAndBytesConfig with llm_int8_skip_modules=["experts", "lm_head"].'
    )


def pack_weights(model: "PreTrainedModel", quantizer: "HfQuantizer", dtype: torch.dtype) -> dict[str, Quant4bitSpec]:
    """Give the 4-bit layers' meta weights their packed shape; return each weight's spec by name. Not a collective."""
    from bitsandbytes.nn import Linear4bit, Params4bit
    from transformers.pytorch_utils import Conv1D

    specs = {}
    for name, module in model.named_modules():
        if not isinstance(module, Linear4bit):
            continue
        # Otherwise, in evaluation on a CPU, bitsandbytes would permanently repack a gathered weight, which breaks the weight.
        module.support_avx512bf16_for_cpu = False
        old = module.weight
        is_transposed = issubclass(module.source_cls, Conv1D)
        shape = (module.in_features, module.out_features) if is_transposed else tuple(old.shape)
        spec = Quant4bitSpec(shape, dtype, is_transposed, old.quant_type, old.compress_statistics, old.quant_storage)
        num_items = -(-old.numel() // 2) // spec.storage.itemsize
        module.weight = Params4bit(
            torch.empty((num_items, 1), dtype=spec.storage, device="meta"),
            requires_grad=False,
            compress_statistics=spec.has_nested_scales,
            quant_type=spec.quant_type,
            quant_storage=spec.storage,
            bnb_quantized=True,
        )
        specs[f"{name}.weight"] = spec
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model, config=model.config)
    return specs


def read_and_quantize(
    index: SafetensorsIndex, ranges: Sequence[TensorRange], spec: Quant4bitSpec, device: torch.device
) -> tuple[torch.Tensor, "QuantState"]:
    """Read one full weight and quantize it; raise a LoadError if it contains NaN or infinity. Not a collective."""
    stored_dtype = index.tensors[ranges[0].tensor].dtype
    values = torch.empty(torch.Size(spec.shape).numel(), dtype=stored_dtype)
    read_elements(index, ranges, 0, values)
    values = values.to(device)
    if not is_finite(values):
        raise LoadError(
            f"{ranges[0].tensor} contains NaN or infinity, which cannot be quantized. Load an intact checkpoint."
        )
    return spec.quantize(values)


Packed = tuple[ShardTarget, Quant4bitSpec, "Linear4bit"]
Tensors = dict[str, torch.Tensor]
PACKED = "packed weight"


def fill(
    work: Sequence[Packed],
    index: SafetensorsIndex | None,
    stream: WeightStream,
    do_all_ranks_read: bool,
    device: torch.device,
) -> None:
    """Fill every rank's shards of the packed weights, and every layer's quant state.

    Collective: every rank must call this, with the same work in the same order.

    Args:
        work: for each 4-bit weight, the target that its packed bytes are copied to, its spec and its layer. The target's
            `ranges` say where the checkpoint holds the unquantized weight.
        index: the checkpoint; needed only on the ranks that read.
        stream: sends rank 0's data to all ranks.
        do_all_ranks_read: whether each rank reads and quantizes an equal part of the weights. If False, only rank 0 does so.
        device: this rank's compute device, where it quantizes.
    """
    if not work:
        return
    num_readers = distributed.world_size() if do_all_ranks_read else 1
    own: Iterator[Tensors] = iter(())
    if index is not None and distributed.rank() < num_readers:
        own = _quantize_each(work[distributed.rank() :: num_readers], index, device)
    quantized: Future[Tensors] = Future()

    def describe() -> Shapes:
        return {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in quantized.result().items()}

    sizes = [target.local.nbytes for target, _, _ in work]
    for number, (target, _, layer) in enumerate(progress.each(work, "load 4-bit weights", sizes=sizes)):
        reader = number % num_readers
        if reader == 0:  # all ranks that read quantize their next weight at the same time
            quantized = _next_quantized(own)
        # Every rank gets the shapes of the reader's tensors, or raises the reader's error.
        shapes = distributed.run_on_main(describe, distributed.patient_group(), reader)
        values = quantized.result() if distributed.rank() == reader else {}
        _distribute(_bring_to_main(values, shapes, reader), shapes, target, layer, stream, device)


def _next_quantized(own: Iterator[Tensors]) -> "Future[Tensors]":
    """Quantize this rank's next weight. If that fails, the returned future raises the error when its result is read."""
    quantized: Future[Tensors] = Future()
    try:
        quantized.set_result(next(own))
    except Exception as error:
        quantized.set_exception(error)
    return quantized


def _quantize_each(work: Sequence[Packed], index: SafetensorsIndex, device: torch.device) -> Iterator[Tensors]:
    """Yield this rank's quantized weights with their scales, in host memory, one at a time."""
    prefetcher = Prefetcher(index, (part for target, _, _ in work for part in byte_ranges(index, target.ranges)))
    for target, spec, _ in work:
        packed, state = read_and_quantize(index, target.ranges, spec, device)
        tensors = {PACKED: packed.view(-1), **state.as_dict(packed=True)}
        yield {key: tensor.cpu() for key, tensor in tensors.items()}
        prefetcher.advance(sum(num_bytes for _, _, num_bytes in byte_ranges(index, target.ranges)))


def _bring_to_main(values: Tensors, shapes: Shapes, reader: int) -> Tensors:
    """Send rank `reader`'s tensors to rank 0, which returns them. Collective: every rank must call this."""
    if reader == 0:
        return values
    group = distributed.patient_group()
    if distributed.rank() == reader:
        for tensor in values.values():
            dist.send(as_bytes(tensor), 0, group=group)
    elif distributed.is_main():
        values = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in shapes.items()}
        for tensor in values.values():
            dist.recv(as_bytes(tensor), reader, group=group)
    return values


def _distribute(
    values: Tensors,
    shapes: Shapes,
    target: ShardTarget,
    layer: "Linear4bit",
    stream: WeightStream,
    device: torch.device,
) -> None:
    """Fill a weight's shards and its layer's quant state from rank 0's tensors. Collective: every rank must call this."""
    from bitsandbytes.functional import QuantState

    index = SafetensorsIndex(())
    scales: Tensors = {}
    shards, full = [], []
    for key, (shape, dtype) in shapes.items():
        if distributed.is_main():
            index.add_in_memory(stored_in_memory(key, dtype, shape), values[key])
        ranges = [TensorRange(key, shape, 0, torch.Size(shape).numel())]
        if key == PACKED:
            shards.append(dataclasses.replace(target, ranges=ranges, stored_dtype=dtype))
            continue
        scales[key] = torch.empty(shape, dtype=dtype, device=device)
        full.append(ShardTarget(f"{target.name} {key}", ranges, dtype, dtype, 0, scales[key].view(-1)))
    for targets in (shards, full):
        stream.fill(targets, index)
        stream.verify(targets, index)
    layer.quant_state = QuantState.from_dict(scales, device=device)
