"""How long a save pauses training, compared with Trainer's own save in one run.

    python -m benchmarks.save [--parameters 1.1e9]

Runs a Llama of the given size with AdamW on two gloo ranks; parameters and optimizer state are in bf16. Prints a table and
rewrites its section of docs/measured.md.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.running import llama_config, machine, run_ranks, write_section

REPEATS = 3
STEP_SECONDS = 4.0  # shorter than forward and backward of such a model on two cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=1.1e9)
    parser.add_argument("--directory", default=None, help="where to write; default: a temporary directory")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-save-", dir=options.directory))
    try:
        results = run_ranks(measure, 2, options.parameters, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report(options.parameters, results)


def measure(num_parameters: float, directory: Path) -> dict:
    """Save the same state with each method in turn; return this rank's seconds and bytes. Every rank runs this."""
    import torch
    import torch.distributed as dist
    from accelerate import PartialState
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes.checkpointing.writer import Snapshot, Writer
    from hf_fsdp_recipes.metrics.memory import HostPeak

    PartialState(cpu=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama_config(num_parameters), dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    optimizer = stepped_adamw(model)
    plugin = fsdp2_plugin()

    from hf_fsdp_recipes.checkpointing.state import capture
    from hf_fsdp_recipes.patches import registry

    registry.apply("checkpointing")
    state_bytes = 3 * sum(p.to_local().numel() * 2 for p in model.parameters())
    writer = Writer(directory / "ours", asynchronous=True)
    signals = time_signals()
    times: dict[str, list[float]] = {"stock": [], "blocked": [], "alone": [], "beside": [], "blocks": []}
    extra = 0
    for repeat in range(REPEATS + 1):  # the first round is not counted: it touches memory for the first time
        dist.barrier()
        started = time.perf_counter()
        stock_save(plugin, model, optimizer, directory / "stock")
        dist.barrier()
        measured = {"stock": time.perf_counter() - started}
        dist.barrier()
        shutil.rmtree(directory / "stock", ignore_errors=True)
        for kind in ("alone", "beside"):
            dist.barrier()
            with HostPeak() as memory:
                started = time.perf_counter()
                writer.save(Snapshot(repeat, capture(model, optimizer, plugin), {}, {}))
                blocked = time.perf_counter() - started
                blocks = compute(STEP_SECONDS) if kind == "beside" else 0  # stands for the next forward and backward
                at_optimizer = time.perf_counter()
                writer.wait_until_staged()
                blocked += time.perf_counter() - at_optimizer
                while kind == "beside" and writer.is_writing:
                    blocks += compute(0.1)
                writer.wait()
                measured[kind] = time.perf_counter() - started
            dist.barrier()
            shutil.rmtree(directory / "ours" / f"checkpoint-{repeat}", ignore_errors=True)
            extra = max(extra, memory.peak_bytes - memory.before_bytes)
        measured |= {"blocked": blocked, "blocks": blocks}
        for key in times if repeat else ():
            times[key].append(measured[key])
    medians = {key: statistics.median(values) for key, values in times.items()}
    return {"state_bytes": state_bytes, "signals": signals, "extra": extra, **medians}


def stepped_adamw(model: Any) -> Any:
    """Return AdamW after one step, so that it has a state to save."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=False, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def time_signals() -> float:
    """Return the seconds that the ranks need to agree on whether one of them got a signal."""
    from hf_fsdp_recipes.checkpointing.preemption import SignalWatch

    watch = SignalWatch()
    watch.start()
    started = time.perf_counter()
    for step in range(1000):
        watch.start_exchange(False)
        watch.finish_exchange(step)
    spent = (time.perf_counter() - started) / 1000
    watch.stop()
    return spent


def fsdp2_plugin() -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True
    )


def stock_save(plugin: Any, model: Any, optimizer: Any, directory: Path) -> None:
    """Do what Trainer does in `_save_optimizer_and_scheduler` under FSDP."""
    from types import SimpleNamespace

    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    accelerator = SimpleNamespace(process_index=int(os.environ["RANK"]), num_processes=2)
    save_fsdp_model(plugin, accelerator, model, str(directory), adapter_only=True)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(directory))


def compute(seconds: float) -> int:
    """Compute for `seconds`, as forward and backward do; return how many blocks of work were done."""
    import torch

    weight, rows = torch.randn(1024, 1024), torch.randn(256, 1024)
    started, blocks = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        for _ in range(20):
            rows = torch.nn.functional.normalize(rows @ weight)
        blocks += 1
    return blocks


def report(num_parameters: float, results: list[dict]) -> None:
    found = {key: max(result[key] for result in results) for key in results[0]}
    of_stock = {key: found[key] / found["stock"] for key in ("blocked", "alone", "beside")}
    lines = [
        f"{num_parameters / 1e9:.1f}B parameters with AdamW, all bf16, 2 gloo ranks, "
        f"{sum(r['state_bytes'] for r in results) / 1e9:.1f} GB of state; median of {REPEATS} after one warm-up.",
        "",
        "| | seconds | relative to Trainer's |",
        "|---|---|---|",
        f"| Trainer's own save: training paused | {found['stock']:.1f} | 1 |",
        f"| ShardedCheckpointCallback: training paused, copying during {STEP_SECONDS:g} s of forward and backward | "
        f"{found['blocked']:.2f} | {of_stock['blocked']:.2f} |",
        f"| ShardedCheckpointCallback: until complete, checked and fsynced, with idle cores | {found['alone']:.1f} | "
        f"{of_stock['alone']:.2f} |",
        f"| the same, with both cores computing | {found['beside']:.1f} | {of_stock['beside']:.2f} |",
        "",
        f"Blocks of work done during the write: {found['blocks']:.0f}. Peak extra host memory per rank: "
        f"{found['extra'] / 1e6:,.0f} MB for {results[0]['state_bytes'] / 1e6:,.0f} MB of state. Exchanging signals "
        f"between the ranks at the end of a step: {found['signals'] * 1e3:.2f} ms.",
        "",
        f"`python -m benchmarks.save --parameters {num_parameters:g}`; {machine()}",
    ]
    print("\n".join(lines))
    write_section("Saving", lines)


if __name__ == "__main__":
    main()
