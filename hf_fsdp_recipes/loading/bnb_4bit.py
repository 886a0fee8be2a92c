"""4-bit weights (QLoRA): rank 0 quantizes. Every rank gets its rows (dim 0) of the packed bytes and a copy of all scales."""

import copy
import logging
import os
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch.overrides import TorchFunctionMode
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.placeholder import nan_like
from hf_fsdp_recipes.upstream.accelerate_internals import is_initialized
from hf_fsdp_recipes.upstream.transformers_internals import AutoHfQuantizer, local_torch_dtype

PIECE_SIZE = 2**16  # elements; a multiple of every block size

logger = logging.getLogger(__name__)


def replace_linears(
    model: PreTrainedModel, config: BitsAndBytesConfig, dtype: torch.dtype
) -> HfQuantizer:
    """Replace the linear layers of a meta model with 4-bit layers, and return transformers' quantizer.

    The packed bytes are stored in the float dtype in which FSDP gathers parameters. FSDP would cast them if they were stored in
    another float dtype. They cannot be integers, because Accelerate does not shard integers.
    """
    if not getattr(config, "load_in_4bit", False):
        raise LoadError(
            "only 4-bit bitsandbytes weights can be sharded. Use BitsAndBytesConfig(load_in_4bit=True)."
        )
    config = copy.deepcopy(config)
    precision = (
        AcceleratorState().mixed_precision
        if is_initialized()
        else os.environ.get("ACCELERATE_MIXED_PRECISION")
    )
    config.bnb_4bit_quant_storage = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        str(precision), dtype
    )
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.validate_environment(device_map=None)
    with local_torch_dtype(dtype):  # the new layers create their biases in torch's default dtype
        quantizer.preprocess_model(model=model, device_map={"": "cpu"}, checkpoint_files=None)
    experts = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    if experts:
        logger.warning(
            "bitsandbytes quantizes linear layers only: %s and other experts stay in %s",
            experts[0],
            dtype,
        )
    return quantizer


def pack_weights(model: PreTrainedModel, quantizer: HfQuantizer, dtype: torch.dtype) -> None:
    """Replace the weights of the 4-bit layers with placeholders of the packed shape."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            old = module.weight
            num_items = -(-old.numel() // 2) // old.quant_storage.itemsize
            packed = torch.empty((num_items, 1), dtype=old.quant_storage, device="meta")
            kept = {
                name: getattr(old, name)
                for name in ("compress_statistics", "quant_type", "quant_storage")
            }
            module.unpacked_dtype, module.quant_options = dtype, kept
            module.weight = Params4bit(
                nan_like(packed), requires_grad=False, bnb_quantized=True, **kept
            )
            # Otherwise bitsandbytes would permanently repack a gathered weight when the model is evaluated on a CPU.
            module.support_avx512bf16_for_cpu = False
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model, config=model.config)


class _InPieces(TorchFunctionMode):
    """Quantizes a weight on a CPU in pieces: bitsandbytes needs several times their memory. The result is the same."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.bitsandbytes.quantize_4bit.default or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        weight, blocksize, _, storage = args
        packed, scales = (
            torch.empty_like(one, device="cpu") for one in func(weight.to("meta"), *args[1:])
        )
        parts = (
            packed.split(PIECE_SIZE // 2 // storage.itemsize),
            scales.split(PIECE_SIZE // blocksize),
        )
        for piece, *outputs in zip(weight.reshape(-1).split(PIECE_SIZE), *parts, strict=True):
            for output, value in zip(outputs, func(piece, *args[1:]), strict=True):
                output.copy_(value)
        return packed, scales


class Layer:
    """Quantizes the weight of one 4-bit layer in a model from `load_model`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._scales: dict[str, Any] = {}  # filled only on rank 0

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the packed weight, and keep its scales for `broadcast_scales`."""
        from bitsandbytes.functional import quantize_4bit

        module = self.module
        weight = weight.T.contiguous() if issubclass(module.source_cls, Conv1D) else weight
        if not torch.stack(torch.aminmax(weight)).isfinite().all():  # without temporary tensors
            raise LoadError(
                "it contains NaN or infinity, which cannot be quantized. Load an intact checkpoint."
            )
        with _InPieces():
            packed, state = quantize_4bit(weight.to(module.unpacked_dtype), **module.quant_options)
        self._scales = {name: value.cpu() for name, value in state.as_dict(packed=True).items()}
        return packed

    def broadcast_scales(self, device: torch.device) -> None:
        """Send the scales from rank 0 to all ranks, and store them in the layer. Collective."""
        from bitsandbytes.functional import QuantState

        scales, self._scales = distributed.from_main(self._scales), {}
        self.module.quant_state = QuantState.from_dict(scales, device=device)


def find_layers(model: torch.nn.Module) -> dict[str, Layer]:
    """Return a model's 4-bit layers as {name of the weight: layer}."""
    return {
        f"{name.removesuffix('.base_layer')}.weight": Layer(module)
        for name, module in model.named_modules()
        if hasattr(module, "unpacked_dtype")
    }


def check_storage(model: torch.nn.Module, policy: Any) -> None:
    """Raise a LoadError if FSDP would cast the packed bytes when it gathers them."""
    gathered = getattr(policy, "param_dtype", None)
    for layer in find_layers(model).values():
        if gathered not in (None, layer.module.weight.dtype):
            raise LoadError(
                f"the 4-bit weights are stored as {layer.module.weight.dtype}, but training computes in {gathered}. Set the "
                f"mixed precision in the Accelerate config, or create the TrainingArguments before calling load_model."
            )
