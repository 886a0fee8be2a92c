"""Compares a recipe with and without each speed or memory feature.

    python -m benchmarks.speed [--parameters 1e7] [--steps 12] [--rounds 1]

Runs recipes/sft.py under FSDP2 on two CPU ranks. Rows have 150 to 450 tokens, so that padding costs time; times are
per token. CPU time is meaningful on a busy machine too; memory is the peak during training. Prints a table for docs/speed.md.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.running import machine
from benchmarks.step import ROOT, SCRIPTS, launch, slower_rank, tax_settings, write_model, write_rows
from benchmarks.timed import WARMUP_STEPS

PADDED = {"packing": False, "max_length": 512, "optim": "adamw_torch", "logging_steps": 1}
EQUAL = PADDED | {"packing": True, "packing_strategy": "wrapped"}  # rows of one length: each block is compiled once
VOCABULARY = 32_768  # large enough for the head to matter


@dataclass(frozen=True)
class Switch:
    """A feature: the settings with and without it. If no setting turns it off, `script_without` does."""

    on: dict[str, Any]
    off: dict[str, Any]
    script_without: str = SCRIPTS["recipe"]
    vocab_size: int = 2048


SWITCHES = {
    "packing: true": Switch(PADDED | {"packing": True}, PADDED),
    "padding_free: true": Switch(PADDED | {"padding_free": True, "max_length": None}, PADDED),
    "gradient_checkpointing: true": Switch(PADDED | {"gradient_checkpointing": True}, PADDED),
    "optim: adamw_torch_fused": Switch(PADDED | {"optim": "adamw_torch_fused"}, PADDED),
    "optim: adamw_8bit": Switch(PADDED | {"optim": "adamw_8bit"}, PADDED),
    "the fused head": Switch(EQUAL, EQUAL, str(ROOT / "benchmarks" / "whole_logits.py"), VOCABULARY),
    "compile_blocks: true": Switch(EQUAL | {"compile_blocks": True}, EQUAL),
    "torch_compile: true": Switch(EQUAL | {"torch_compile": True}, EQUAL),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--switches", nargs="+", choices=SWITCHES, default=list(SWITCHES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-speed-") as directory:
        for vocab_size in {SWITCHES[name].vocab_size for name in options.switches}:
            write_model(options.parameters, Path(directory) / f"model-{vocab_size}", vocab_size)
        write_rows(Path(directory) / "rows", num_rows=16 * options.steps)
        lines = [measure(name, options, Path(directory)) for name in options.switches]
    print("| | CPU seconds per token | wall-clock seconds per token | peak memory |\n|---|---|---|---|")
    print("\n".join(lines))
    print(
        f"\n{options.parameters / 1e6:.0f}M parameters, {options.rounds} run(s) of {options.steps} steps; {machine()}"
    )


def measure(name: str, options: Any, directory: Path) -> str:
    """Alternate runs with and without a feature; return a row of ratios."""
    switch = SWITCHES[name]
    model, rows = directory / f"model-{switch.vocab_size}", directory / "rows"
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for _ in range(options.rounds):
        for is_on in (False, True):
            run = Path(tempfile.mkdtemp(dir=directory))
            settings = tax_settings(options, model, rows, run / "out") | (switch.on if is_on else switch.off)
            (run / "recipe.yaml").write_text(yaml.safe_dump(settings))
            command = [
                str(ROOT / "benchmarks" / "timed.py"),
                str(run),
                SCRIPTS["recipe"] if is_on else switch.script_without,
            ]
            launch(ROOT / "accelerate_configs" / "fsdp2_cpu.yaml", 2, [*command, "--config", str(run / "recipe.yaml")])
            found[is_on].append(a_token(run))
    with_it, without = (
        {key: statistics.median(one[key] for one in found[is_on]) for key in found[is_on][0]} for is_on in (True, False)
    )
    ratios = [f"{with_it[key] / without[key]:.2f}" for key in ("cpu", "wall", "peak_bytes")]
    print(f"{name}: {ratios}", flush=True)
    return f"| `{name}` | {' | '.join(ratios)} |"


def a_token(run: Path) -> dict[str, float]:
    """Return the mean seconds per token after the warm-up, and the peak memory."""
    from hf_fsdp_recipes.metrics.metrics_file import read_metrics

    rank = slower_rank(run)
    steps = [entry for entry in read_metrics(run / "out" / "metrics.jsonl") if "loss" in entry]
    num_tokens = sum(entry["tokens"] for entry in steps if entry["step"] > WARMUP_STEPS)
    return {key: sum(rank[key]) / num_tokens for key in ("cpu", "wall")} | {"peak_bytes": rank["peak_bytes"]}


if __name__ == "__main__":
    main()
