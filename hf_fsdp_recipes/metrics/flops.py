"""Model FLOPs of training: what the model's own matrix products cost, whatever the hardware repeats.

A token costs 2 FLOPs a matmul parameter forward, 2 backward for the activations, and 2 more for the gradient of
each parameter that is trained: 6 in full training, a little over 4 under LoRA. Attention costs 2 matrix products
over all pairs of tokens of a sequence, causal or not, and twice that backward. Embedding look-ups, norms and the
loss are not counted; a mixture of experts counts the experts that a token meets.

Source: PaLM (arXiv:2204.02311), appendix B, whose attention term of 12 * layers * heads * head_dim * length this is.

Does not measure, and does not know devices (see `peaks`).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

OTHER_MODALITIES = re.compile(r"(^|\.)(vision|visual|image|audio|multi_modal|mm)_?\w*(\.|$)")
EXPERT_OF_A_LIST = re.compile(r"\.experts\.\d+\.")
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Work:
    """What a number of sequences ask of a model.

    Attributes:
        tokens: sum of the sequences' lengths, padding left out.
        pairs: sum of length * length.
        window_pairs: sum of length * min(length, window); the same as `pairs` without a window.
    """

    tokens: int
    pairs: int
    window_pairs: int

    @classmethod
    def of(cls, lengths: Iterable[int], window: int | None = None) -> "Work":
        """Add up the work of sequences of these lengths in tokens."""
        lengths = list(lengths)
        windowed = sum(length * min(length, window or length) for length in lengths)
        return cls(sum(lengths), sum(length * length for length in lengths), windowed)


@dataclass(frozen=True)
class ModelFlops:
    """The parts of a model that cost FLOPs.

    Attributes:
        matmul_parameters: parameters that one token is multiplied with.
        trainable_parameters: those of them that get a gradient.
        head_parameters: those of the language model head, which activation checkpointing does not repeat.
        attention_width: heads * (query dim + value dim), summed over the layers that see the whole sequence.
        window_width: the same over the layers with a sliding window.
        window: that window in tokens, or None.
    """

    matmul_parameters: int
    trainable_parameters: int
    head_parameters: int
    attention_width: int
    window_width: int
    window: int | None

    def forward(self, work: Work) -> int:
        """Return the FLOPs of a forward pass."""
        return 2 * self.matmul_parameters * work.tokens + self._attention(work)

    def training(self, work: Work) -> int:
        """Return the model FLOPs of a forward and a backward pass: the numerator of MFU."""
        per_token = 4 * self.matmul_parameters + 2 * self.trainable_parameters
        return per_token * work.tokens + 3 * self._attention(work)

    def hardware(self, work: Work) -> int:
        """Return the FLOPs of training with activation checkpointing: one more forward pass of all layers.

        At most: torch stops repeating a layer where nothing more is needed, and not all layers need be checkpointed.
        """
        return self.training(work) + self.forward(work) - 2 * self.head_parameters * work.tokens

    def _attention(self, work: Work) -> int:
        return 2 * (self.attention_width * work.pairs + self.window_width * work.window_pairs)


def count_flops(model: nn.Module) -> ModelFlops:
    """Find what costs FLOPs in a transformers or PEFT model, whole, on meta or sharded by FSDP2.

    Of a model of several modalities the language model alone is counted. Under LoRA the backward pass is taken to
    go through every layer; below the first adapter it does not, at most a few products of the first layer.

    Raises:
        ValueError: the model's FLOPs cannot be told: no transformers config, an encoder-decoder, parameters that
            FSDP1 has flattened, or experts without a known number of active ones.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ValueError(f"{type(model).__name__} has no transformers config")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder")
    if any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules()):
        raise ValueError("FSDP1 has flattened the parameters; add the callback when the Trainer is built")
    text_config = config.get_text_config()
    found = list(_matmuls(model, text_config))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    full, windowed = _attention_layers(text_config)
    width = _attention_width(text_config)
    return ModelFlops(
        matmul_parameters=sum(count for _, count, _ in found),
        trainable_parameters=sum(count for _, count, is_trained in found if is_trained),
        head_parameters=sum(count for module, count, _ in found if module is head),
        attention_width=full * width,
        window_width=windowed * width,
        window=_window(text_config),
    )


def _matmuls(model: nn.Module, config: Any) -> Iterator[tuple[nn.Module, int, bool]]:
    """Yield (module, parameters that one token is multiplied with, whether they are trained)."""
    for name, module in model.named_modules():
        # PEFT's modules_to_save keeps the module that it stands in for.
        if OTHER_MODALITIES.search(name) or "original_module" in name.split("."):
            continue
        share = _active_share(config) if EXPERT_OF_A_LIST.search(f".{name}.") else 1.0
        if hasattr(module, "in_features") and hasattr(module, "out_features") and _has_weight(module):
            # Quantised layers keep these numbers where their weight is packed.
            yield module, round(module.in_features * module.out_features * share), module.weight.requires_grad
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding) or key.endswith("bias"):
                continue
            if parameter.ndim == 3 and not isinstance(module, nn.Conv1d):
                yield module, _active_of(parameter, config), parameter.requires_grad
            elif parameter.ndim >= 2 and key == "weight":  # GPT-2's Conv1D, routers, convolutions
                yield module, round(parameter.numel() * share), parameter.requires_grad


def _has_weight(module: nn.Module) -> bool:
    # A PEFT layer shows its base layer's features and weight, and the base layer comes by itself.
    return "weight" in module._parameters


def _active_of(experts: nn.Parameter, config: Any) -> int:
    return experts.numel() // experts.shape[0] * _active_experts(config)


def _active_share(config: Any) -> float:
    total = _first_of(config, NUM_EXPERTS)
    if total is None:
        raise ValueError(f"{type(config).__name__} does not say how many experts there are")
    return _active_experts(config) / total


def _active_experts(config: Any) -> int:
    active = _first_of(config, ACTIVE_EXPERTS)
    if active is None:
        raise ValueError(f"{type(config).__name__} does not say how many experts a token meets")
    return active


def _first_of(config: Any, names: Sequence[str]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def _attention_width(config: Any) -> int:
    heads = config.num_attention_heads
    query = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "qk_nope_head_dim", None):  # multi-head latent attention
        query = config.qk_nope_head_dim + config.qk_rope_head_dim
    return heads * (query + (getattr(config, "v_head_dim", None) or query))


def _attention_layers(config: Any) -> tuple[int, int]:
    """Return how many layers attend to the whole sequence and how many to a window; others (state space) to none."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not kinds:
        return (0, config.num_hidden_layers) if _window(config) else (config.num_hidden_layers, 0)
    windowed = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    return sum(kind in ("full_attention", "attention") for kind in kinds), windowed


def _window(config: Any) -> int | None:
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
