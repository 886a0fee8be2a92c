"""Model FLOPs of a training step, from the model's matrix products and the tokens of its batches.

A token costs 2 FLOPs per matmul parameter in the forward pass, 2 in the backward pass for the activations, and 2 more
for the gradient of each trained parameter: 6 FLOPs in full fine-tuning, a little over 4 with LoRA. Attention costs two matrix
products over all pairs of tokens of a sequence, causal or not, and twice that in the backward pass. Embedding look-ups,
norms and the loss do not count. In a mixture of experts, only the experts that a token is routed to count.

Source: PaLM (arXiv:2204.02311), appendix B; its attention term is 12 * layers * heads * head_dim * length.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OTHER_MODALITIES = re.compile(r"(^|\.)(vision|visual|image|audio|multi_modal|mm)_?\w*(\.|$)")
ONE_EXPERT = re.compile(r"\.experts\.\d+\.|\.experts\.(base_layer\.)*lora_[AB]\.")  # one expert, or LoRA of all experts
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class TokenCounts:
    """Token counts that determine the FLOPs of a set of sequences."""

    tokens: int  # sum of the sequence lengths, without padding
    pairs: int  # sum of length * length
    window_pairs: int  # sum of length * min(length, window); equals `pairs` without a window

    @classmethod
    def of(cls, lengths: Iterable[int], window: int | None = None) -> "TokenCounts":
        """Return the counts for sequences of these lengths (in tokens)."""
        lengths = list(lengths)
        windowed = sum(length * min(length, window or length) for length in lengths)
        return cls(sum(lengths), sum(length * length for length in lengths), windowed)


@dataclass(frozen=True)
class ModelFlops:
    """Sizes of a model that determine its FLOPs."""

    matmul_parameters: int  # parameters in the matrix products of one token
    trainable_parameters: int  # how many of the matmul parameters are trained
    head_parameters: int  # matmul parameters of the LM head, which activation checkpointing does not recompute
    attention_width: int  # heads * (query dim + value dim), summed over the layers with full attention
    window_width: int  # the same, summed over the layers with sliding-window attention
    window: int | None  # window length in tokens

    def forward(self, counts: TokenCounts) -> int:
        """Return the FLOPs of a forward pass."""
        return 2 * self.matmul_parameters * counts.tokens + self._attention(counts)

    def training(self, counts: TokenCounts) -> int:
        """Return the model FLOPs of a forward and backward pass, the numerator of MFU."""
        per_token = 4 * self.matmul_parameters + 2 * self.trainable_parameters
        return per_token * counts.tokens + 3 * self._attention(counts)

    def hardware(self, counts: TokenCounts) -> int:
        """Return the FLOPs with activation checkpointing, which repeats the forward pass; the numerator of HFU.

        This is an upper bound: torch stops recomputing a layer once the needed activations exist, and some layers may not be
        checkpointed.
        """
        return self.training(counts) + self.forward(counts) - 2 * self.head_parameters * counts.tokens

    def _attention(self, counts: TokenCounts) -> int:
        return 2 * (self.attention_width * counts.pairs + self.window_width * counts.window_pairs)


def count_flops(model: nn.Module) -> ModelFlops:
    """Count the parameters and attention widths that determine a model's FLOPs.

    Accepts a transformers or PEFT model that is unsharded, on meta, or sharded by FSDP2. For a multimodal model, only the
    language model counts. With LoRA, the backward pass is assumed to go through every layer, although it stops at the
    adapter closest to the input.

    Raises:
        ValueError: the model has no transformers config, is an encoder-decoder, is already wrapped in FSDP1, or has an
            unknown number of experts per token.
    """
    config: PreTrainedConfig | None = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ValueError(f"{type(model).__name__} has no transformers config")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder")
    if any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules()):
        raise ValueError("FSDP1 has flattened the parameters; pass MetricsCallback to the Trainer's constructor")
    text_config = config.get_text_config()
    matmuls = list(_matmuls(model, text_config))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    full, windowed = _attention_layers(text_config)
    width = _attention_width(text_config)
    return ModelFlops(
        matmul_parameters=sum(count for _, count, _ in matmuls),
        trainable_parameters=sum(count for _, count, is_trained in matmuls if is_trained),
        head_parameters=sum(count for module, count, _ in matmuls if module is head),
        attention_width=full * width,
        window_width=windowed * width,
        window=_window(text_config),
    )


def _matmuls(model: nn.Module, config: "PreTrainedConfig") -> Iterator[tuple[nn.Module, int, bool]]:
    """Yield, for each module that multiplies matrices, (module, number of parameters per token, whether they are trained)."""
    for name, module in model.named_modules():
        # PEFT's modules_to_save keeps the original of each replaced module, but the original no longer runs.
        if OTHER_MODALITIES.search(name) or "original_module" in name.split("."):
            continue
        share = 1.0
        if ONE_EXPERT.search(f".{name}."):
            share = _active_experts(config) / _first_of(config, NUM_EXPERTS, "the number of experts")
        # A PEFT layer exposes its base layer's attributes but owns no weight; the base layer is visited separately.
        if hasattr(module, "in_features") and hasattr(module, "out_features") and "weight" in module._parameters:
            # Multiply the feature counts: quantized layers pack several weights into one element of the tensor.
            yield module, round(module.in_features * module.out_features * share), module.weight.requires_grad
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding) or key.endswith("bias"):
                continue
            if parameter.ndim == 3 and not isinstance(module, nn.Conv1d):  # experts in one tensor
                active = parameter.numel() // parameter.shape[0] * _active_experts(config)
                yield module, active, parameter.requires_grad
            elif parameter.ndim >= 2 and key == "weight":  # GPT-2's Conv1D, routers, convolutions
                yield module, round(parameter.numel() * share), parameter.requires_grad


def _active_experts(config: "PreTrainedConfig") -> int:
    return _first_of(config, ACTIVE_EXPERTS, "the number of experts per token")


def _first_of(config: "PreTrainedConfig", names: Sequence[str], meaning: str) -> int:
    for name in names:
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise ValueError(f"{type(config).__name__} does not define {meaning}")


def _attention_width(config: "PreTrainedConfig") -> int:
    heads = config.num_attention_heads
    query = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "qk_nope_head_dim", None):  # multi-head latent attention
        query = config.qk_nope_head_dim + config.qk_rope_head_dim
    return heads * (query + (getattr(config, "v_head_dim", None) or query))


def _attention_layers(config: "PreTrainedConfig") -> tuple[int, int]:
    """Return how many layers have full attention and how many have windowed attention. State-space layers have neither."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not kinds:
        return (0, config.num_hidden_layers) if _window(config) else (config.num_hidden_layers, 0)
    windowed = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    return sum(kind in ("full_attention", "attention") for kind in kinds), windowed


def _window(config: "PreTrainedConfig") -> int | None:
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)


# Used instead of Trainer's `include_num_input_tokens_seen` and TRL's `num_tokens`, which synchronize at every micro-batch. In
# packed rows, which have no mask, Trainer omits all pad tokens, including real end-of-text tokens if both are the same token.
def count_tokens(inputs: Mapping[str, torch.Tensor], window: int | None = None) -> torch.Tensor:
    """Count a batch's tokens without padding, and the pairs of tokens that attend to each other. Does not wait for the device.

    Sequences in packed batches begin at `cu_seq_lens_q`, or else where `position_ids` restart at 0. A packed sequence of one
    token is taken for padding (from `pad_to_multiple_of`) and does not count.

    Args:
        inputs: the forward pass's keyword arguments; `attention_mask` is (B, T).
        window: length of the sliding attention window in tokens, or None.

    Returns:
        (3,) int64 on the batch's device: the fields of `TokenCounts`. If only `position_ids` separate the
        sequences, `window_pairs` may be too low, by at most window * window / 4 per sequence.
    """
    boundaries, mask, positions = (inputs.get(key) for key in ("cu_seq_lens_q", "attention_mask", "position_ids"))
    if isinstance(boundaries, torch.Tensor):
        lengths = boundaries.diff()
        return _from_lengths(lengths * (lengths > 1), window)
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return _from_lengths(mask.sum(dim=-1), window)
    if isinstance(positions, torch.Tensor) and positions.ndim == 2:
        return _from_positions(positions, window)
    batch = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    return _from_lengths(torch.full((batch.shape[0],), batch.shape[1], device=batch.device), window)


def _from_lengths(lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    lengths = lengths.long()
    seen = lengths if window is None else lengths.clamp(max=window)
    return torch.stack([lengths.sum(), (lengths * lengths).sum(), (lengths * seen).sum()])


def _from_positions(positions: torch.Tensor, window: int | None) -> torch.Tensor:
    # A sequence of n tokens has n * n pairs, and n * n = 1 + 3 + 5 + ... + (2 n - 1). Adding 2 * position + 1 for each token
    # therefore counts the pairs without the sequence lengths, which would need a synchronization with the device.
    odd = 2 * positions.long() + 1
    next_positions = torch.nn.functional.pad(positions[:, 1:], (0, 1))
    is_counted = ((positions != 0) | (next_positions != 0)).long()
    seen = odd if window is None else odd.clamp(max=window)
    return torch.stack([is_counted.sum(), (odd * is_counted).sum(), (seen * is_counted).sum()])
