"""Writes what `hf-fsdp plan` predicts for the steps that train.

Usage: python -m benchmarks.gpu_day.predictions FILE
"""

import json
import subprocess
import sys
from pathlib import Path

from transformers import AutoConfig

from benchmarks.gpu_day.day import FULL, LARGE, LLAMA_8B, LORA, QLORA, SHAPES, Day

CASES = {
    "lora": ("8b", LORA),
    "lora_wrapped": ("8b", LORA | {"packing_strategy": "wrapped"}),
    "lora_recompute": ("8b", LORA | {"gradient_checkpointing": True}),
    "lora_large": ("8b", LARGE),
    "qlora": ("8b", QLORA),
    "full": ("1b", FULL),
}
OPTIONS = ["--accelerate_config", "full_shard", "--num_processes", "1"]


def main() -> None:
    file = Path(sys.argv[1])
    day = Day(file.parent, file.parent / "plan", False)
    for name in ("8b", "1b"):
        config = AutoConfig.from_pretrained(LLAMA_8B)
        for key, value in SHAPES[name].items():
            setattr(config, key, value)
        config.save_pretrained(day.model(name))
    found = {}
    for name, (model, settings) in CASES.items():
        arguments = day.arguments(model, name, settings | {"dataset_name": "rows"}, is_planned=True)
        command = [sys.executable, "-m", "hf_fsdp_recipes.cli", "plan", *OPTIONS, *arguments]
        text = subprocess.run([*command, "--json"], capture_output=True, text=True).stdout
        answer = json.loads(text)
        assumed = sum(size for kind, size in answer["peak_gigabytes"].items() if "assumed" in kind)
        found[name] = {"total": answer["gigabytes"], "tensors": answer["gigabytes"] - assumed}
        print(name, found[name], flush=True)
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
