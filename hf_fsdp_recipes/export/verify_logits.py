"""Checks that an export computes the same logits as the model in training.

Runs one prompt through the sharded model on all ranks and through the export on rank 0. Rank 0 uses plain transformers on the
CPU, because the model in training needs the accelerator's memory. The full model must fit in the host memory of rank 0.
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export.load_export import load_export
from hf_fsdp_recipes.export.model_assets import find_custom_class
from hf_fsdp_recipes.precision import mixed_precision_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.quantization_config import QuantizationConfigMixin

PROMPT = "The quick brown fox"
# Maximum difference relative to the largest logit. A different summation order stays below it; a wrong or missing row does not.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 2e-2}


def check_logits(model: torch.nn.Module, export: Path, tokenizer: "PreTrainedTokenizerBase") -> float:
    """Compare a model in training, sharded or not, with its export; return the largest difference relative to the largest logit.

    Collective: every rank must call this, because the sharded forward needs every rank. All ranks raise an ExportError if the
    export cannot be loaded or its logits differ.
    """
    device = next((buffer.device for buffer in model.buffers()), torch.device("cpu"))
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a multimodal processor contains the tokenizer
    inputs = {"input_ids": tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(device)}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        expected = model(**inputs).logits.float().cpu()
    model.train(was_training)
    config = next((module.config for module in model.modules() if hasattr(module, "config")), None)
    quantization = getattr(config, "quantization_config", None)
    kwargs = _quantization_kwargs(quantization) | {"trust_remote_code": find_custom_class(model) is not None}
    return distributed.run_on_main(
        lambda: _compare(expected, export, inputs["input_ids"].cpu(), kwargs), distributed.patient_group()
    )


def _quantization_kwargs(config: "QuantizationConfigMixin | None") -> dict[str, Any]:
    """Return the from_pretrained arguments that quantize an adapter's base model as training did, but on the CPU."""
    if config is None:
        return {}
    config = copy.deepcopy(config)
    config.bnb_4bit_quant_storage = torch.uint8  # stores the same values; other storage dtypes are for sharding
    return {"quantization_config": config, "device_map": {"": "cpu"}}


def _compare(expected: torch.Tensor, export: Path, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> float:
    loaded = load_export(export, **kwargs)
    for module in loaded.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # this kernel rounds to bfloat16, unlike training
    with torch.no_grad():
        actual = loaded(input_ids=input_ids).logits.float()
    difference = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    tolerance = max(TOLERANCE.get(dtype, 0.15) for dtype in (loaded.dtype, mixed_precision_dtype() or loaded.dtype))
    if not difference <= tolerance:
        raise ExportError(
            f"the logits of {export} differ from the trained model's by {difference:.2g} relative to the largest logit; the "
            f"tolerance is {tolerance:g}. The export is kept and the checkpoints are intact: compare the export with one that "
            f"hf-fsdp export writes from the last checkpoint, or set verify_export: off."
        )
    return difference
