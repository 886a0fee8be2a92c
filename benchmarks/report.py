"""Overhead of MetricsCallback: steps with and without it, alternating in one run.

    python -m benchmarks.report [--parameters 1e7] [--steps 40]

A stock Trainer on two gloo ranks with FSDP2 logs every step, which is the worst case. Compares the median wall
time and CPU time of both kinds of steps, and measures the time inside the callback; CPU time and time inside the callback
are meaningful on a busy machine too. Prints a table and rewrites its section of docs/measured.md.
"""

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

from benchmarks.running import llama_config, machine, run_ranks, write_section

LENGTH = 64
EVENTS = (
    "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_step_end", "on_log", "_count_batch",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=1e7)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-report-") as directory:
        results = run_ranks(measure, 2, options.parameters, options.steps, directory, timeout_seconds=600)
    report(options, results)


def measure(num_parameters: float, num_steps: int, directory: str) -> dict[str, float]:
    """Train with the callback switched on at every other step; return this rank's medians in seconds. Every rank runs this."""
    os.environ |= {
        "ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }  # fmt: skip
    from hf_fsdp_recipes.patches import cpu_ranks

    cpu_ranks.enable()
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    metrics = alternating()
    gathers = time_gathers()
    kinds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}

    class Stopwatch(TrainerCallback):
        last = now()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                wall, cpu = (after - before for before, after in zip(self.last, now(), strict=True))
                if state.global_step > 4:
                    kinds[metrics.is_on].append((wall, cpu))
                metrics.is_on = not metrics.is_on
                self.last = now()

    arguments = TrainingArguments(
        output_dir=directory, max_steps=num_steps, per_device_train_batch_size=2, logging_steps=1, save_strategy="no",
        use_cpu=True, report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 32000, (4 * num_steps, LENGTH))]
    trainer = Trainer(
        AutoModelForCausalLM.from_config(llama_config(num_parameters)), arguments, train_dataset=rows,
        callbacks=[metrics, Stopwatch()],
    )  # fmt: skip
    trainer.train()
    return {
        "parameters": trainer.model.num_parameters(),
        **{
            f"{clock}_{name}": statistics.median(pair[i] for pair in kinds[is_on])
            for i, clock in enumerate(("wall", "cpu"))
            for name, is_on in (("with", True), ("without", False))
        },
        "gather": statistics.median(gathers[4:]),
        "own": statistics.median(s - g for s, g in zip(metrics.spent_seconds[4:], gathers[4:], strict=True)),
    }


def now() -> tuple[float, float]:
    """Return the wall time and this process's CPU time in seconds."""
    return time.perf_counter(), time.process_time()


def alternating() -> Any:
    """Return a MetricsCallback that can be switched off and times itself in each step."""
    from hf_fsdp_recipes.metrics.metrics_callback import MetricsCallback

    def timed(name: str) -> Any:
        def event(self: Any, *arguments: Any, **keywords: Any) -> None:
            if not self.is_on:
                return
            started = time.perf_counter()
            getattr(MetricsCallback, name)(self, *arguments, **keywords)
            self.in_step += time.perf_counter() - started
            if name == "on_log" and "loss" in keywords["logs"]:
                self.spent_seconds.append(self.in_step)
                self.in_step = 0.0

        return event

    fields = {"is_on": True, "in_step": 0.0, "spent_seconds": [], **{name: timed(name) for name in EVENTS}}
    return type("AlternatingMetrics", (MetricsCallback,), fields)()


def time_gathers() -> list[float]:
    """Record how long each gather of the metrics takes from now on, including the wait for the slower rank."""
    from hf_fsdp_recipes import distributed

    seconds: list[float] = []
    gather = distributed.gather_integers

    def timed(values: Any) -> Any:
        started = time.perf_counter()
        rows = gather(values)
        seconds.append(time.perf_counter() - started)
        return rows

    distributed.gather_integers = timed
    return seconds


def report(options: argparse.Namespace, results: list[dict[str, float]]) -> None:
    found = {key: max(result[key] for result in results) for key in results[0]}

    def row(name: str, clock: str, key: str) -> str:
        base = found[f"{clock}_without"]
        return f"| {name} | {found[key]:.5f} | {found[key] / base:.4f} |"

    lines = [
        f"{found['parameters'] / 1e6:.0f}M parameters, 2 gloo ranks with FSDP2, 2 x {LENGTH} tokens per rank, every step "
        f"logged; medians of {options.steps // 2 - 2} steps of each kind on the slower rank.",
        "",
        "| | seconds | relative to a step without it |",
        "|---|---|---|",
        row("step without MetricsCallback, CPU time", "cpu", "cpu_without"),
        row("step with it, CPU time", "cpu", "cpu_with"),
        row("step without it, wall time", "wall", "wall_without"),
        row("step with it, wall time", "wall", "wall_with"),
        row("inside the callback, wall time", "wall", "own"),
        row("inside its gather, including the wait for the slower rank", "wall", "gather"),
        "",
        f"`python -m benchmarks.report --parameters {options.parameters:g} --steps {options.steps}`; {machine()}",
    ]
    print("\n".join(lines))
    write_section("Reporting", lines)


if __name__ == "__main__":
    main()
