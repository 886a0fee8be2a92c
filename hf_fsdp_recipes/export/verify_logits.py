"""The last proof of an export: it says what the model in training says.

Runs one prompt through the sharded model on all ranks, loads the export on rank 0 with plain transformers,
and compares logits. Holds the whole model on rank 0 for that, so it is for models that fit there.
"""

import copy
import os
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export.load_export import load_export

PROMPT = "The quick brown fox"
# Differences in the order of sums; a wrong or missing row moves logits by far more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 2e-2}


def check_logits(model: torch.nn.Module, export: Path, tokenizer: Any, prompt: str = PROMPT) -> float:
    """Compare the logits of a model in training with those of its export.

    Collective: every rank must call this (the sharded forward needs all of them).

    Args:
        model: the model as it was exported, in any sharding.
        export: a model directory, or an adapter whose base model can be loaded.
        tokenizer: the model's.
        prompt: what both are asked.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        ExportError: the same on every rank: the export does not load, or says something else.
    """
    device = (
        next(buffer.device for buffer in model.buffers()) if any(True for _ in model.buffers()) else torch.device("cpu")
    )
    inputs = {"input_ids": tokenizer(prompt, return_tensors="pt")["input_ids"].to(device)}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        expected = model(**inputs).logits.float().cpu()
    model.train(was_training)
    config = getattr(_transformers_config(model), "quantization_config", None)
    return distributed.run_on_main(lambda: _compare(expected, export, inputs["input_ids"].cpu(), config))


def _transformers_config(model: torch.nn.Module) -> Any:
    return next((module.config for module in model.modules() if hasattr(module, "config")), None)


def _compute_dtype(default: torch.dtype) -> torch.dtype:
    """Return what the model in training computes in: float32 masters are cast for mixed precision."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, default)


def _quantized_alike(config: Any) -> dict[str, Any]:
    """Return from_pretrained's arguments that quantise an adapter's base as training did, so that both say the same."""
    if config is None:
        return {}
    config = copy.deepcopy(config)
    config.bnb_4bit_quant_storage = torch.uint8  # the same values; the other storages are for sharding
    return {"quantization_config": config}


def _compare(expected: torch.Tensor, export: Path, input_ids: torch.Tensor, quantization: Any) -> float:
    try:
        loaded = load_export(export, **_quantized_alike(quantization))
    except (OSError, ValueError) as error:
        raise ExportError(f"{export} does not load: {str(error).splitlines()[0]}") from error
    for module in loaded.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # bitsandbytes' CPU kernel rounds to bfloat16; training did not
    with torch.no_grad():
        actual = loaded(input_ids=input_ids).logits.float()
    difference = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    tolerance = max(TOLERANCE.get(dtype, 0.15) for dtype in (loaded.dtype, _compute_dtype(loaded.dtype)))
    if not difference <= tolerance:
        raise ExportError(
            f"{export} says something else than the model in training: logits differ by {difference:.2g} of the largest. "
            f"Rule: at most {tolerance:g} in {loaded.dtype}. The checkpoints are intact; export one with hf-fsdp export."
        )
    return difference
