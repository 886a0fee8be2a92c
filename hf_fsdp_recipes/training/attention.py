"""Selects the attention implementation and verifies that packed documents do not attend to each other.

Packing is verified on a tiny model of the same architecture, because it depends on the model's own masking code.

Source: transformers 5.23 `masking_utils.py` (position_ids that restart at 0 produce a block-diagonal mask, in models
that build their masks there), `modeling_flash_attention_utils.py`.
"""

from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training.tiny_config import tiny_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IMPLEMENTATIONS = {"sdpa": "sdpa", "eager": "eager", "flex": "flex_attention"}
LEAK_TOLERANCE = 1e-4  # relative to the largest logit, in float32


def select_implementation(requested: str, is_on_cpu: bool) -> str | None:
    """Return transformers' name for the requested attention, or None for the model's default. Not a collective."""
    flash = None if is_on_cpu else find_flash()
    if requested == "flash" and flash is None:
        if is_on_cpu:
            raise RecipeError("attention: flash needs a GPU, but the ranks run on CPUs. Use attention: auto.")
        raise RecipeError("attention: flash needs flash-attn. Run pip install flash-attn, or use attention: auto.")
    if requested in ("auto", "flash") and flash is not None:
        return flash
    return IMPLEMENTATIONS.get(requested)


def find_flash() -> str | None:
    """Return the newest FlashAttention that is installed and runs on this device, or None."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if is_flash_attn_3_available() and torch.get_device_module().get_device_capability()[0] == 9:  # Hopper
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else None


def check_packing(config: "PretrainedConfig", implementation: str) -> None:
    """Check that packed documents do not attend to each other. Any rank may call this.

    FlashAttention takes the documents' lengths and is not tested; others are tested on a tiny model.
    """
    if implementation.startswith("flash") or "flash-attn" in implementation:
        return
    leak = measure_leak(config, implementation)
    if leak > LEAK_TOLERANCE:
        raise RecipeError(
            f"packing leaks between documents in {config.model_type} models with {implementation} attention: the first "
            f"document changes the second one's logits by {leak:.1e} of the largest. Use attention: flash or "
            f"packing: false; packing_strategy: wrapped accepts the leak."
        )


def measure_leak(config: "PretrainedConfig", implementation: str) -> float:
    """Return how much the first of two packed documents changes the second one's logits, relative to the largest."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(config, vocab_size=64), attn_implementation=implementation)
        model.float().eval()
        first, other, second = (torch.randint(3, 64, (1, 8)) for _ in range(3))
    positions = torch.arange(8).repeat(2)[None]
    with torch.no_grad():
        logits = [
            model(input_ids=torch.cat([before, second], dim=1), position_ids=positions, use_cache=False).logits[:, 8:]
            for before in (first, other)
        ]
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
