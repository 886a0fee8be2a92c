"""Compares losses: a float32 run, and bf16 runs that reduce gradients in float32 or in bfloat16.

    python -m benchmarks.precision [--parameters 2e6] [--steps 200]

Runs recipes/sft.py under FSDP2 on two CPU ranks: a full fine-tune of a new model, 4 micro-batches per step. Prints a table
for docs/speed.md.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.running import machine
from benchmarks.step import ROOT, SCRIPTS, launch, tax_settings, write_model, write_rows

VARIANTS = {
    "float32": ("no", {}),
    "bf16, gradients in float32": ("bf16", {"reduce_dtype": "float32"}),
    "bf16, gradients in bfloat16": ("bf16", {"reduce_dtype": "bfloat16"}),
}
NUM_LAST = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=2e6)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-precision-") as directory:
        write_model(options.parameters, Path(directory) / "model", 2048)
        write_rows(Path(directory) / "rows", num_rows=8 * options.steps)
        losses = {name: train(name, options, Path(directory)) for name in VARIANTS}
    exact = losses["float32"]
    print(f"| | loss, last {NUM_LAST} steps | mean difference to float32 | largest |\n|---|---|---|---|")
    for name, found in losses.items():
        differences = [abs(loss - other) for loss, other in zip(found, exact, strict=True)]
        last = statistics.mean(found[-NUM_LAST:])
        print(f"| {name} | {last:.4f} | {statistics.mean(differences):.5f} | {max(differences):.5f} |")
    print(f"\n{options.parameters / 1e6:.1f}M parameters, {options.steps} steps; {machine()}")


def train(name: str, options: Any, directory: Path) -> list[float]:
    """Return the losses of one run."""
    from hf_fsdp_recipes.metrics.metrics_file import read_metrics

    precision, changes = VARIANTS[name]
    run = Path(tempfile.mkdtemp(dir=directory))
    template = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2_cpu.yaml").read_text())
    (run / "template.yaml").write_text(yaml.safe_dump(template | {"mixed_precision": precision}))
    settings = tax_settings(options, directory / "model", directory / "rows", run / "out")
    settings |= {"logging_steps": 1, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 1, **changes}
    (run / "recipe.yaml").write_text(yaml.safe_dump(settings))
    launch(run / "template.yaml", 2, [SCRIPTS["recipe"], "--config", str(run / "recipe.yaml")])
    return [entry["loss"] for entry in read_metrics(run / "out" / "metrics.jsonl") if "loss" in entry]


if __name__ == "__main__":
    main()
