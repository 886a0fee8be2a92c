"""Measures other loaders for `gpu_day.py`: from_pretrained, and bitsandbytes' own quantization."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.load import quantization
from hf_fsdp_recipes.tools.selftest.ranks import Figures, load, main, time_work

if TYPE_CHECKING:
    from accelerate import Accelerator


def load_with_transformers(accelerator: "Accelerator", checkpoint: str, tiny: str) -> Figures:
    """Load with from_pretrained onto the device. A tiny checkpoint is loaded first, so that imports are not timed."""
    _from_pretrained(accelerator, tiny)
    gigabytes = sum(file.stat().st_size for file in Path(checkpoint).glob("*.safetensors")) / 1e9
    seconds = time_work(accelerator.device, lambda: _from_pretrained(accelerator, checkpoint))
    return {"from_pretrained, seconds": seconds, "from_pretrained, GB/s": gigabytes / seconds}


def _from_pretrained(accelerator: "Accelerator", checkpoint: str, **kwargs: Any) -> Any:
    from transformers import AutoModelForCausalLM

    place = {"": accelerator.device}
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, device_map=place, **kwargs)


def compare_4bit(accelerator: "Accelerator", checkpoint: str, tiny: str) -> Figures:
    """Load with 4-bit weights and compare packed bytes and scales with those that bitsandbytes makes on the device."""
    from bitsandbytes.nn import Linear4bit

    load(accelerator, tiny, "rank0", "bfloat16", **quantization())
    accelerator.free_memory()
    models: dict[str, Any] = {}

    def load_ours() -> None:
        models["ours"], _ = load(accelerator, checkpoint, "rank0", "bfloat16", **quantization())

    def load_theirs() -> None:
        models["theirs"] = _from_pretrained(accelerator, checkpoint, **quantization())

    figures: Figures = {
        "load_model, seconds": time_work(accelerator.device, load_ours),
        "from_pretrained, seconds": time_work(accelerator.device, load_theirs),
    }
    ours, theirs = (
        {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}
        for model in models.values()
    )
    different = [name for name in ours if not _are_equal(ours[name], theirs[name])]
    if different:
        figures["the first that differs"] = different[0]
    return figures | {
        "4-bit weights": len(ours),
        "packed weights and scales are those of bitsandbytes": ours.keys() == theirs.keys() and not different,
    }


def _are_equal(ours: Any, theirs: Any) -> bool:
    """Compare two layers bit for bit: packed weights, scales, and the scales of the scales."""
    packed = [
        layer.weight.to_local() if hasattr(layer.weight, "to_local") else layer.weight for layer in (ours, theirs)
    ]
    first, second = (values.detach().reshape(-1).view(torch.uint8) for values in packed)
    states = [ours.quant_state, theirs.weight.quant_state]
    return first.equal(second) and all(
        torch.equal(a, b.to(a.device))
        for a, b in (
            [state.absmax for state in states],
            [state.state2.absmax for state in states],
            [state.offset for state in states],
        )
    )


if __name__ == "__main__":
    main({"stock load": load_with_transformers, "4-bit": compare_4bit})
