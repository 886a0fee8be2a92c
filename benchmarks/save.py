"""Saving: how long training stands still, against Trainer's own save, in one run.

    python benchmarks/save.py [--parameters 1.1e9]

Two gloo ranks, a Llama of the given size with AdamW, parameters and optimizer state in bf16. Prints a table and
rewrites its section of docs/measured.md.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.running import llama_config, machine, run_ranks, write_section

REPEATS = 3


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
    """Save the same state both ways, alternately; return this rank's seconds and bytes. Every rank runs this."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes.measure.probes import HostPeak
    from hf_fsdp_recipes.save.sharded import Snapshot, Writer

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama_config(num_parameters), dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=False, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    plugin = fsdp2_plugin()

    from hf_fsdp_recipes.save import seams
    from hf_fsdp_recipes.save.sharded import capture

    seams.install()
    state_bytes = 3 * sum(p.to_local().numel() * 2 for p in model.parameters())
    writer = Writer(directory / "ours", asynchronous=True)
    signals = time_signals()
    times: dict[str, list[float]] = {"stock": [], "blocked": [], "complete": [], "steps": [], "extra": []}
    for repeat in range(REPEATS + 1):  # the first round touches memory for the first time and is not counted
        dist.barrier()
        started = time.perf_counter()
        stock_save(plugin, model, optimizer, directory / f"stock-{repeat}")
        dist.barrier()
        stock = time.perf_counter() - started
        shutil.rmtree(directory / f"stock-{repeat}", ignore_errors=True)
        dist.barrier()
        with HostPeak() as memory:
            started = time.perf_counter()
            state = capture(model, optimizer, plugin)
            writer.save(Snapshot(repeat, state, {}, {}))
            blocked = time.perf_counter() - started
            num_steps = busy_steps(writer)
            writer.wait()
            complete = time.perf_counter() - started
        shutil.rmtree(directory / "ours" / f"checkpoint-{repeat}", ignore_errors=True) if rank == 0 else None
        dist.barrier()
        if repeat:
            for key, value in zip(
                times, (stock, blocked, complete, num_steps, memory.peak_bytes - memory.before_bytes), strict=True
            ):
                times[key].append(value)
    return {
        "state_bytes": state_bytes,
        "signals": signals,
        **{key: statistics.median(values) for key, values in times.items()},
    }


def time_signals() -> float:
    """Return the seconds that the ranks need to ask each other whether one was signalled."""
    from hf_fsdp_recipes.save.preemption import SignalWatch

    watch = SignalWatch()
    watch.start()
    started = time.perf_counter()
    for step in range(1000):
        watch.is_agreed(step)
    spent = (time.perf_counter() - started) / 1000
    watch.stop()
    return spent


def fsdp2_plugin():
    from accelerate.utils import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True
    )


def stock_save(plugin, model, optimizer, directory: Path) -> None:
    """What Trainer does in `_save_optimizer_and_scheduler` under FSDP."""
    from types import SimpleNamespace

    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    accelerator = SimpleNamespace(process_index=int(os.environ["RANK"]), num_processes=2)
    save_fsdp_model(plugin, accelerator, model, str(directory), adapter_only=True)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(directory))


def busy_steps(writer) -> int:
    """Compute like a training step while the write goes on; return how many such steps fitted."""
    import torch

    weight, rows = torch.randn(1024, 1024), torch.randn(256, 1024)
    steps = 0
    while writer.is_writing:
        for _ in range(20):
            rows = torch.nn.functional.normalize(rows @ weight)
        steps += 1
    return steps


def report(num_parameters: float, results: list[dict]) -> None:
    first = results[0]
    blocked, complete = (first[key] / first["stock"] for key in ("blocked", "complete"))
    lines = [
        f"{num_parameters / 1e9:.1f}B parameters with AdamW, all bf16, 2 gloo ranks, "
        f"{sum(r['state_bytes'] for r in results) / 1e9:.1f} GB of state; median of {REPEATS} after one warm-up.",
        "",
        "| | seconds | of Trainer's |",
        "|---|---|---|",
        f"| Trainer's own save, blocking | {first['stock']:.1f} | 1 |",
        f"| ShardedCheckpointCallback: training stands still | {first['blocked']:.2f} | {blocked:.2f} |",
        f"| ShardedCheckpointCallback: complete, checked, fsynced | {first['complete']:.1f} | {complete:.2f} |",
        "",
        f"Compute steps done while the write went on: {first['steps']:.0f}. Extra host memory a rank, peak: "
        f"{max(r['extra'] for r in results) / 1e6:,.0f} MB for {first['state_bytes'] / 1e6:,.0f} MB of state.",
        "",
        f"Asking all ranks for signals at a step's end: {first['signals'] * 1e3:.2f} ms.",
        "",
        f"`python benchmarks/save.py --parameters {num_parameters:g}`; {machine()}",
    ]
    print("\n".join(lines))
    print(json.dumps(results))
    write_section("Saving", lines)


if __name__ == "__main__":
    main()
