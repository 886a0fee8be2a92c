"""Selects the attention implementation and verifies that packed documents do not attend to each other.

Packing is verified on a tiny model of the same architecture, because the result depends on the model's own masking code and,
with linear attention, on the installed kernels.

Source: transformers 5.23 `masking_utils.py` (position_ids that restart at 0 produce a block-diagonal mask, in models
that build their masks there), `modeling_flash_attention_utils.py`, `integrations/hub_kernels.py`
(`use_kernel_func_from_hub_with_fallback`); trl 1.16 `DataCollatorForLanguageModeling`.
"""

import contextlib
import logging
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes import distributed, model_class
from hf_fsdp_recipes.environment import is_true
from hf_fsdp_recipes.errors import RecipeError, summarize
from hf_fsdp_recipes.precision import mixed_precision_dtype
from hf_fsdp_recipes.training.tiny_config import tiny_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = {"sdpa": "sdpa", "eager": "eager", "flex": "flex_attention"}
AMPERE, HOPPER = 8, 9  # major compute capabilities
FLEX_DEVICES = ("cuda", "xpu")  # devices for which torch compiles flex attention
EMULATED_FLASH = "varlen_probe"  # must not contain "flash", because transformers treats such names differently
LEAK_TOLERANCE = 1e-4  # maximum change of a logit, relative to the largest logit; measured in float32


def select_implementation(requested: str, is_on_cpu: bool) -> str | None:
    """Return transformers' name for the requested attention, or None for the model's default. Not a collective."""
    flash = None if is_on_cpu else find_flash(downloads=requested == "flash")
    if requested == "flash" and is_on_cpu:
        raise RecipeError("attention: flash needs a GPU, but the ranks run on CPUs. Use attention: auto.")
    if requested == "flash" and flash is None:
        raise RecipeError(
            "attention: flash needs FlashAttention. Run pip install flash-attn, or pip install kernels to download it from the "
            "Hub, or use attention: auto."
        )
    return flash if requested in ("auto", "flash") else IMPLEMENTATIONS[requested]


def find_flash(downloads: bool) -> str | None:
    """Return the newest FlashAttention that is installed, or None.

    If `downloads` is true, FlashAttention 2 also counts if the `kernels` package can download it from the Hub. FlashAttention 3
    is used only if it is installed, because the build that transformers downloads is made for inference and may lack
    the backward pass.
    """
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    generation = _nvidia_generation()
    if generation == HOPPER and is_flash_attn_3_available():
        return "flash_attention_3"
    has_flash_2 = is_flash_attn_2_available(kernels_fallback_ok=downloads and generation >= AMPERE)
    return "flash_attention_2" if has_flash_2 else None


def _nvidia_generation() -> int:
    """Return the major compute capability of this rank's NVIDIA GPU, or 0 if it has none."""
    device = torch.accelerator.current_accelerator()
    is_nvidia = device is not None and device.type == "cuda" and torch.version.hip is None
    return torch.get_device_module(device).get_device_capability()[0] if is_nvidia else 0


def avoid_dense_mask(model: "PreTrainedModel") -> None:
    """Replace SDPA for packed documents with FlashAttention from the Hub or compiled flex attention, if either works here.

    SDPA keeps documents apart with a dense mask, which its fast kernels do not accept. FlashAttention is downloaded only if the
    kernels package is installed; if the download fails, flex attention is used.

    Requires ranks on accelerators. Collective: every rank must call this.
    """
    if _use_flash_from_hub(model):
        return
    device = torch.accelerator.current_accelerator()
    can_compile = device is not None and device.type in FLEX_DEVICES and find_spec("triton") is not None
    is_too_old = 0 < _nvidia_generation() < AMPERE
    config = model.config.get_text_config()
    # Flex attention has no dropout.
    has_dropout = any(getattr(config, name, 0) for name in ("attention_dropout", "attn_pdrop"))
    is_sdpa = model.config._attn_implementation == "sdpa"
    if can_compile and not is_too_old and not has_dropout and is_sdpa and model._supports_flex_attn:
        model.set_attn_implementation("flex_attention")


def _use_flash_from_hub(model: "PreTrainedModel") -> bool:
    """Replace SDPA with FlashAttention from the Hub, and return whether that worked on every rank. Collective."""
    is_sdpa, dtype = model.config._attn_implementation == "sdpa", mixed_precision_dtype() or model.dtype
    # If a model lists other FlashAttention versions, as gpt-oss does, transformers replaces version 2 with inference kernels.
    can_use = model._supports_flash_attn and not getattr(model, "_compatible_flash_implementations", None)
    flash = find_flash(downloads=True) if is_sdpa and can_use and dtype.itemsize == 2 else None

    def replace() -> bool:  # runs on rank 0 first, to download the kernel once
        try:
            if flash is not None:
                model.set_attn_implementation(flash)
        except Exception as error:  # the Hub, the kernels package or the kernel may raise anything
            logger.warning("attention: %s cannot be loaded from the Hub: %s", flash, summarize(error, "line"))
            return False
        return flash is not None

    has_flash = distributed.main_first(replace)
    if all(distributed.gather_objects(has_flash)):
        return True
    if has_flash:
        model.set_attn_implementation("sdpa")
    return False


def check_packing(config: "PretrainedConfig", implementation: str) -> None:
    """Raise a RecipeError if packed documents would affect each other. Any rank may call this; not a collective.

    A tiny model of the same architecture gets two documents in one sequence, as the trainer passes them. FlashAttention is
    emulated, because it needs a GPU. In place of flex attention and other kernels, SDPA is tested: its mask is the same.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

    advice = "packing: false, or packing_strategy: wrapped if documents may affect each other."
    mask = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
    is_flash = "flash" in implementation if mask is None else mask is flash_attention_mask
    tested = EMULATED_FLASH if is_flash else implementation if implementation in ("eager", "sdpa") else "sdpa"
    try:
        leak = measure_leak(config, tested)
    except Exception as error:  # the model's own code may raise anything
        # Whether layers carry a state from token to token, as in linear attention.
        is_stateful = getattr(model_class.choose_class(config)[0], "_is_stateful", False)
        if is_flash and not is_stateful and "packed sequences" not in str(error):
            return  # some architectures cannot be built as a tiny model
        raise RecipeError(
            f"packing cannot be used with {config.model_type} models here, because the test that documents do not affect each "
            f"other failed: {summarize(error)}. Use {advice}"
        ) from error
    if leak > LEAK_TOLERANCE:
        raise RecipeError(
            f"packing leaks between documents in {config.model_type} models with {implementation} attention: the first document "
            f"changes the second one's logits by {leak:.1e} relative to the largest logit. Use "
            f"{'attention: flash, ' * (not is_flash and _is_safe_with_flash(config))}{advice}"
        )


def _is_safe_with_flash(config: "PretrainedConfig") -> bool:
    with contextlib.suppress(Exception):
        return measure_leak(config, EMULATED_FLASH) <= LEAK_TOLERANCE
    return False


def _attend_as_flash(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute SDPA within each document, with the document boundaries that FlashAttention would read from its arguments."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    lengths = [kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")]
    positions, length = kwargs.get("position_ids"), query.shape[-2]
    places = torch.arange(length, device=query.device)
    documents = torch.zeros_like(places)
    if lengths[0] is not None and None not in lengths[1:]:
        documents = torch.bucketize(places, lengths[0][1:].to(places), right=True)
    elif positions is not None:
        documents = (positions.reshape(-1, length)[0] == 0).cumsum(0)
    mask = (documents[:, None] == documents) & (places[:, None] >= places)
    return sdpa_attention_forward(module, query, key, value, mask[None, None], **kwargs)


def measure_leak(config: "PretrainedConfig", implementation: str) -> float:
    """Return how much the first of two packed documents changes the second one's logits, relative to the largest logit."""
    from transformers import AttentionInterface
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    AttentionInterface.register(EMULATED_FLASH, _attend_as_flash)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class.build(tiny_config(config, vocab_size=64), attn_implementation=implementation)
        model.float().eval()
        first, other, second = (torch.randint(3, 64, (8,)).tolist() for _ in range(3))
    device = torch.device("cpu")
    if model._is_stateful and not is_true(os.environ.get("ACCELERATE_USE_CPU", "")):
        # Some layers have kernels for the accelerator only.
        device = torch.accelerator.current_accelerator(check_available=True) or device
    model.to(device)
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    logits = []
    for before in (first, other):
        batch = collate([{"input_ids": before + second, "seq_lengths": [len(before), len(second)]}])
        del batch["labels"]
        batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        with torch.no_grad():
            logits.append(model(**batch, use_cache=False).logits[:, len(before) :])
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
