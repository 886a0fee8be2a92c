"""4-bit weights (QLoRA), quantized by rank 0.

Every rank gets its rows (dim 0) of the packed bytes and a copy of all scales.
"""

import logging
import os
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.placeholder import IDENTITY, Identity, shared_nan
from hf_fsdp_recipes.upstream.accelerate_internals import PRECISIONS, is_initialized
from hf_fsdp_recipes.upstream.transformers_internals import AutoHfQuantizer, local_torch_dtype
from hf_fsdp_recipes.weights.values import is_finite

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear4bit

logger = logging.getLogger(__name__)


def pack_weights(
    model: PreTrainedModel,
    config: BitsAndBytesConfig,
    dtype: torch.dtype,
    checkpoint: object,
) -> None:
    """Replace the linear layers of a meta model with 4-bit layers.

    Their weights are placeholders of the packed shape. `dtype` is that of the layers' biases.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    quantizer = replace_linears(model, config, dtype)
    for path, module in model.named_modules():
        if isinstance(module, Linear4bit):
            old: Any = module.weight
            setattr(module, IDENTITY, Identity(checkpoint, [f"{path}.weight"]))
            num_bytes = -(-old.numel() // 2)
            shape = (num_bytes // old.quant_storage.itemsize, 1)
            module.weight = Params4bit(
                shared_nan(shape, old.quant_storage),
                requires_grad=False,
                bnb_quantized=True,
                **quantization_options(old),
            )
            # Otherwise bitsandbytes would permanently repack a gathered weight when the model is
            # evaluated on a CPU.
            module.support_avx512bf16_for_cpu = False
    model.hf_quantizer = quantizer  # type: ignore[assignment]  # transformers declares no type
    quantizer.postprocess_model(model, config=model.config)


def quantization_options(weight: Any) -> dict:
    """Return the arguments of bitsandbytes' `quantize_4bit` that a `Params4bit` keeps."""
    return {
        "compress_statistics": weight.compress_statistics,
        "quant_type": weight.quant_type,
        "quant_storage": weight.quant_storage,
    }


def replace_linears(
    model: PreTrainedModel,
    config: BitsAndBytesConfig,
    dtype: torch.dtype,
) -> HfQuantizer:
    """Replace the linear layers of a meta model, and return transformers' quantizer.

    The packed bytes are stored in the float dtype in which FSDP gathers parameters. FSDP would cast
    them if they were stored in another float dtype. They cannot be integers, because Accelerate
    does not shard integers.
    """
    if not getattr(config, "load_in_4bit", False):
        raise LoadError(
            "only 4-bit bitsandbytes weights can be sharded. "
            "Use BitsAndBytesConfig(load_in_4bit=True)."
        )
    precision = os.getenv("ACCELERATE_MIXED_PRECISION")
    if is_initialized():
        precision = AcceleratorState().mixed_precision
    config = deepcopy(config)
    config.bnb_4bit_quant_storage = PRECISIONS.get(str(precision), dtype)
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.validate_environment()
    with local_torch_dtype(dtype):  # the new layers create their biases in torch's default dtype
        quantizer.preprocess_model(model, device_map={"": "cpu"})
    experts = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    if experts:
        logger.warning(
            "bitsandbytes quantizes linear layers only: %s and other experts stay in %s",
            experts[0],
            dtype,
        )
    return quantizer


@dataclass
class Layer:
    """Quantizes the weight of one 4-bit layer in a model from `load_model`."""

    modules: list["Linear4bit"]  # several if the layer has been copied
    dtype: torch.dtype  # of the weight before it is quantized
    options: dict  # arguments of bitsandbytes' `quantize_4bit`
    _scales: Any = None  # on rank 0, from `quantize` to `broadcast_scales`: {name: tensor}

    def quantize(self, weight: Tensor) -> Tensor:
        """Return the packed weight, and keep its scales for `broadcast_scales`."""
        from bitsandbytes.functional import quantize_4bit

        # transformers sets `source_cls`.
        if issubclass(self.modules[0].source_cls, Conv1D):  # type: ignore[arg-type]
            weight = weight.T.contiguous()
        if not is_finite(weight):
            raise LoadError(
                "it contains NaN or infinity, which cannot be quantized. Load an intact checkpoint."
            )
        packed, state = quantize_4bit(weight.to(self.dtype), **self.options)
        self._scales = {name: value.cpu() for name, value in state.as_dict(packed=True).items()}
        return packed

    def broadcast_scales(self, device: torch.device) -> None:
        """Send the scales from rank 0 to all ranks, and store them in the layers. Collective."""
        from bitsandbytes.functional import QuantState

        scales = distributed.from_main(self._scales)
        self._scales = None
        for module in self.modules:
            module.quant_state = QuantState.from_dict(dict(scales), device=device)


Layers = dict[str, Layer]  # {name of the weight: layer}


def find_layers(model: PreTrainedModel, dtype: torch.dtype) -> Layers:
    """Return the 4-bit layers whose weights are not loaded, by their names in the loaded model.

    `dtype` is that of the weights before they are quantized.
    """
    if not hasattr(model, "hf_quantizer"):
        return {}  # bitsandbytes may not be installed
    from bitsandbytes.nn import Linear4bit

    layers: Layers = {}
    for module in model.modules():
        if isinstance(module, Linear4bit) and hasattr(module, IDENTITY):
            identity = getattr(module, IDENTITY)
            if getattr(module.weight, IDENTITY, identity).names != identity.names:
                raise LoadError(
                    f"{identity.names[0]} was replaced by another 4-bit weight. Replace the layers "
                    "instead of the weights."
                )
            setattr(module.weight, IDENTITY, identity)  # bitsandbytes' copies of a weight lose it
            options = quantization_options(module.weight)
            layers.setdefault(identity.names[0], Layer([], dtype, options)).modules.append(module)
    return layers


def check_storage(layers: Layers, policy: object) -> None:
    """Raise a LoadError if FSDP's mixed precision policy would cast the packed bytes."""
    gathered = getattr(policy, "param_dtype", None)
    for layer in layers.values():
        stored = layer.modules[0].weight.dtype
        if gathered not in (None, stored):
            raise LoadError(
                f"the 4-bit weights are stored as {stored}, but training computes in {gathered}. "
                f"Set the mixed precision in the Accelerate config, or create the "
                f"TrainingArguments before calling load_model."
            )
