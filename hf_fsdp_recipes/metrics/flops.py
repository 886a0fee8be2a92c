"""Counts the model FLOPs of training and lists the peak FLOP/s of devices.

MFU is the achieved share of this peak.

A token costs 2 FLOPs per matmul parameter in the forward pass and 2 in the backward pass, for the
activations. A trained parameter costs 2 more, for its gradient. So full fine-tuning costs 6 per
parameter, and LoRA a little over 4. Attention, causal or not, costs two matrix products over all
pairs of tokens of a sequence, and twice as much in the backward pass.
Source: PaLM (arXiv:2204.02311), appendix B.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Dense peaks in TFLOP/s for bfloat16 and float16, from the vendors' data sheets and white papers.
# Figures with structured sparsity are halved, and so is that of an MI250X, which is two devices.
# A key is a regular expression for the full name without vendor and series. MIG slices and laptop
# GPUs match no key, because no MFU is better than a wrong one.
PEAKS = {
    r"gb[23]00": 2500,
    r"b[23]00( sxm6 ac)?": 2250,
    r"g?h200( \d+gb hbm3e| \d+gb| 144g hbm3e)?": 989.4,
    r"h100 (sxm5?|\d+gb hbm3)": 989.4,
    r"h[12]00 nvl": 835.5,
    r"h100 pcie": 756,
    r"a[18]00([- ](sxm4?|pcie|[48]0gb))*": 312,
    r"a10": 125,
    r"a10g": 70,
    r"l40s": 362.05,
    r"l4": 121,
    r"rtx 3090": 71,
    r"rtx 4090": 165.2,
    r"rtx 5090": 209.5,
    r"rtx 6000 ada( generation)?": 364.2,
    r"mi250x": 191.5,
    r"mi3(00|25)x( vf| oam)?": 1307.4,
    r"mi350x( vf)?": 2309.6,
    r"mi355x( vf)?": 2516.6,
    r"gaudi ?2": 432,
    r"gaudi ?3": 1835,
}
VENDOR_AND_SERIES = re.compile(r"\b(nvidia|amd|intel|geforce|instinct)\b|\((r|tm)\)")


class ModelFlops(NamedTuple):
    """Sizes of a model that determine its FLOPs."""

    matmul_parameters: int  # parameters in the matrix products of one token
    trainable_parameters: int  # how many of them are trained
    # heads * (query dim + value dim), summed over the layers with full attention
    attention_width: int
    window_width: int  # the same, summed over the layers with sliding-window attention
    window: int  # length of the window in tokens

    def training(self, tokens: int, pairs: int) -> int:
        """Return the FLOPs of the forward and backward passes.

        The arguments are the results of `count_tokens`.
        """
        pairs_in_windows = min(pairs, self.window * tokens)
        attention = self.attention_width * pairs + self.window_width * pairs_in_windows
        parameters = 4 * self.matmul_parameters + 2 * self.trainable_parameters
        return parameters * tokens + 6 * attention


def find_model_flops(model: PreTrainedModel) -> ModelFlops:
    """Return the sizes of a transformers decoder.

    The model may have a PEFT adapter, be on meta, or be sharded. With LoRA, the backward pass is
    counted for every layer, although it stops at the adapter closest to the input.
    Raises an exception for models of other kinds.
    """
    config = model.config
    if config.is_encoder_decoder or config.get_text_config() is not config:
        raise ValueError(f"{type(config).__name__} is not the config of a decoder for text")
    window = (
        getattr(config, "sliding_window", None)
        or getattr(config, "attention_chunk_size", None)
        or 0
    )
    kind = "sliding_attention" if window else "full_attention"
    layer_types = getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers
    num_windowed = layer_types.count("sliding_attention") + layer_types.count("chunked_attention")
    num_heads = config.num_attention_heads
    query_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    if getattr(config, "qk_nope_head_dim", None):  # multi-head latent attention
        query_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    value_dim = getattr(config, "v_head_dim", None) or query_dim
    width = num_heads * (query_dim + value_dim)
    return ModelFlops(
        *_count_matmuls(model),
        attention_width=layer_types.count("full_attention") * width,
        window_width=num_windowed * width,
        window=window,
    )


def _count_matmuls(model: PreTrainedModel) -> tuple[int, int]:
    """Return how many parameters are multiplied with each token, and how many are trained."""
    num_matmul = 0
    num_trained = 0
    num_experts = max(
        getattr(model.config, name, 0)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    for path, module in model.named_modules():
        # PEFT's modules_to_save keeps the original of each replaced module, but the original no
        # longer runs.
        if isinstance(module, nn.Embedding) or "original_module" in path.split("."):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or name.endswith("bias"):
                continue
            # A quantized layer packs several weights into one element.
            is_linear = name == "weight" and hasattr(module, "in_features")
            size = int(module.in_features * module.out_features) if is_linear else parameter.numel()
            if ".experts." in f".{path}.":  # a token passes through only some of the experts
                size = round(size * model.config.num_experts_per_tok / num_experts)
            num_matmul += size
            if parameter.requires_grad:
                num_trained += size
    return num_matmul, num_trained


def count_tokens(inputs: Mapping) -> Tensor:
    """Count a batch's tokens, excluding padding, without waiting for the device.

    Args:
        inputs: the model's keyword arguments. Packed sequences begin where `position_ids` restart
            at 0. A packed sequence of a single token counts as padding.

    Returns:
        (2,) int64 on the batch's device: the sum of the sequence lengths, and the sum of their
        squares (pairs of tokens).
    """
    mask = inputs.get("attention_mask")
    positions = inputs.get("position_ids")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        if isinstance(positions, Tensor) and positions.ndim == 2:
            following = nn.functional.pad(positions[:, 1:], (0, 1))
            is_token = positions + following > 0
            # The host does not know the lengths n, so it sums n * n as 1 + 3 + ... + (2 n - 1).
            pairs = (2 * positions + 1) * is_token
            return torch.stack([is_token.sum(), pairs.sum()])
        mask = torch.ones_like(inputs["input_ids"])
    lengths = mask.sum(dim=-1)
    return torch.stack([lengths.sum(), lengths.square().sum()])


def find_peak_flops(device_name: str, dtype: str) -> float:
    """Return a device's dense peak in FLOP/s, given its name in torch.

    Raises a ValueError if the peak is not known.
    """
    name = " ".join(VENDOR_AND_SERIES.sub("", device_name.lower()).split())
    if dtype in ("bfloat16", "float16"):
        for pattern, peak in PEAKS.items():
            if re.fullmatch(pattern, name):
                return peak * 1e12
    raise ValueError(f"no {dtype} peak FLOP/s known for {device_name}")
