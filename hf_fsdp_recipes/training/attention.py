"""One switch for attention, and the proof that packed documents do not see each other.

`auto` takes the fastest implementation that is installed and says which. Whether packing leaks is found out,
not assumed: a small model of the same architecture is asked. Writes no kernel and patches none.

Source: transformers 5.23 `masking_utils.py` (positions that start anew make a block-diagonal mask, for
models that build their masks there), `modeling_flash_attention_utils.py`.
"""

from typing import Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training.tiny_config import shrink_config

IMPLEMENTATIONS = {"sdpa": "sdpa", "eager": "eager", "flex": "flex_attention"}
LEAK_TOLERANCE = 1e-4  # of the largest logit, float32


def choose(wish: str, is_on_cpu: bool) -> str | None:
    """Return transformers' name of what a wish stands for, or None to let the model take its default. No collective.

    Args:
        wish: auto, flash, sdpa, eager or flex.
        is_on_cpu: whether the ranks compute on CPUs.

    Raises:
        RecipeError: flash is asked for and is not there.
    """
    flash = None if is_on_cpu else find_flash()
    if wish == "flash" and flash is None:
        reason = "the ranks are CPUs" if is_on_cpu else "flash-attn is not installed"
        raise RecipeError(f"attention: flash, and {reason}. Remedy: attention: auto, or pip install flash-attn.")
    if wish in ("auto", "flash") and flash is not None:
        return flash
    return IMPLEMENTATIONS.get(wish)


def find_flash() -> str | None:
    """Return the newest flash attention that is installed and runs on this device, or None."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if not torch.cuda.is_available():
        return None
    if is_flash_attn_3_available() and torch.cuda.get_device_capability()[0] == 9:
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else None


def check_packing(config: Any, implementation: str) -> None:
    """Refuse packing where a document would see the one before it. Any rank; no collective.

    Flash attention takes the documents' lengths and is trusted; the others are tried on a small model.

    Raises:
        RecipeError: the second of two packed documents changes with the first.
    """
    if implementation.startswith("flash") or "flash-attn" in implementation:
        return
    leak = measure_leak(config, implementation)
    if leak > LEAK_TOLERANCE:
        raise RecipeError(
            f"packing with {implementation} attention leaks in {config.model_type} models: the first of two packed "
            f"documents moves the second's logits by {leak:.1e} of the largest. Rule: documents do not see each other. "
            f"Remedy: attention: flash or sdpa, packing: false, or packing_strategy: wrapped if that is wanted."
        )


def measure_leak(config: Any, implementation: str) -> float:
    """Return by how much the first of two packed documents moves the logits of the second, relative to the largest."""
    from transformers import AutoModelForCausalLM

    small = shrink_config(config, vocab_size=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, attn_implementation=implementation).float().eval()
        first, other, second = (torch.randint(3, 64, (1, 8)) for _ in range(3))
    positions = torch.arange(8).repeat(2)[None]
    with torch.no_grad():
        seen = [
            model(input_ids=torch.cat([before, second], dim=1), position_ids=positions, use_cache=False).logits[:, 8:]
            for before in (first, other)
        ]
    return float((seen[0] - seen[1]).abs().max() / seen[0].abs().max())


def announce(implementation: str, training: Any) -> None:
    """Say which attention was taken, and what wrapped packing means. Main rank prints."""
    distributed.print_main(f"attention: {implementation}")
    if training.packing and training.packing_strategy == "wrapped":
        distributed.print_main("packing: wrapped, so documents in one sequence see each other, as in pre-training")
