"""How long a save stops training, compared with Trainer's own save.

Also how long it takes until the checkpoint is complete.

    python -m benchmarks.save [--parameters 1.1e9] [--ranks 2 8 32]

Saves a sharded Llama in bf16 with AdamW from gloo ranks of one machine: what Accelerate writes for
Trainer, and the same state through ShardedCheckpointCallback's writer. Both alternate in one run;
both end fsynced. Prints a table and, with two ranks only, rewrites its section of docs/measured.md.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.running import machine, sharded_llama, write_section
from hf_fsdp_recipes.saving.directory import sync
from tests.ranks.harness import run_ranks
from tests.ranks.memory import PeakMemory

REPEATS = 3
STEP_SECONDS = 4.0  # shorter than forward and backward of such a model on two cores
STOCK = "Trainer's own save"
IDLE = "in the background, idle cores"
BUSY = "in the background, busy cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=1.1e9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument(
        "--directory", default=None, help="where to write; default: a temporary directory"
    )
    options = parser.parse_args()
    lines: list[str] = []
    for num_ranks in options.ranks:
        directory = Path(tempfile.mkdtemp(prefix="bench-save-", dir=options.directory))
        try:
            results = run_ranks(
                measure, num_ranks, options.parameters, directory, timeout_seconds=1800
            )
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        lines += report(options.parameters, results)
    lines.append(
        f"`python -m benchmarks.save`, median of {REPEATS} after one that does not count; "
        f"{machine()}"
    )
    print("\n".join(lines))
    if options.ranks == [2]:
        write_section("Saving", lines)


def measure(num_parameters: float, directory: Path) -> dict[str, float]:
    """Save the same state in each way; return this rank's seconds and bytes.

    Every rank runs this.
    """
    import torch.distributed as dist

    from hf_fsdp_recipes import distributed
    from hf_fsdp_recipes.saving.directory import RunDirectory
    from hf_fsdp_recipes.saving.saver import Writer

    trainer = make_trainer(num_parameters)
    run = RunDirectory(directory, "bench")
    distributed.run_on_main(lambda: run.open(0))
    writer = Writer(run, distributed.new_group())
    found: dict[str, list[float]] = {STOCK: [], IDLE: [], BUSY: [], "standstill": []}
    extra = 0
    # The first round does not count: it touches memory for the first time.
    for repeat in range(REPEATS + 1):
        dist.barrier()
        started = time.perf_counter()
        save_as_trainer(trainer, directory / "stock")
        for file in (directory / "stock").rglob(f"__{dist.get_rank()}_*.distcp"):
            sync(file)
        dist.barrier()
        measured = {STOCK: time.perf_counter() - started}
        distributed.run_on_main(lambda: shutil.rmtree(directory / "stock"))
        for kind in (IDLE, BUSY):
            dist.barrier()
            with PeakMemory() as memory:
                standstill, measured[kind] = save_in_background(trainer, run, writer, kind == BUSY)
            extra = max(extra, memory.growth_bytes)
            measured["standstill"] = max(standstill, measured.get("standstill", 0.0))
            distributed.run_on_main(lambda: shutil.rmtree(run.output_dir / "checkpoint-1"))
        for key, values in found.items():
            values += [measured[key]] if repeat else []
    num_bytes = sum(3 * parameter.to_local().nbytes for parameter in trainer.model.parameters())
    return {key: statistics.median(values) for key, values in found.items()} | {
        "bytes": num_bytes,
        "extra": extra,
    }


def make_trainer(num_parameters: float) -> Any:
    """Return a sharded model in bf16 and its AdamW, as the attributes of a Trainer.

    The optimizer has made one step.
    """
    import torch
    import torch.distributed as dist
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    PartialState(cpu=True)
    model = sharded_llama(num_parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    state = SimpleNamespace(fsdp_plugin=plugin)
    ranks = {"process_index": dist.get_rank(), "num_processes": dist.get_world_size()}
    accelerator = SimpleNamespace(state=state, device=torch.device("cpu"), **ranks)
    replaced = {"_get_output_dir": None, "_push_from_checkpoint": None}
    return SimpleNamespace(model=model, optimizer=optimizer, accelerator=accelerator, **replaced)


def save_as_trainer(trainer: Any, directory: Path) -> None:
    """Do what Trainer does for the model and the optimizer under FSDP."""
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    plugin = trainer.accelerator.state.fsdp_plugin
    save_fsdp_model(plugin, trainer.accelerator, trainer.model, str(directory), adapter_only=True)
    save_fsdp_optimizer(
        plugin, trainer.accelerator, trainer.optimizer, trainer.model, str(directory)
    )


def save_in_background(trainer: Any, run: Any, writer: Any, is_busy: bool) -> tuple[float, float]:
    """Save as the callback does.

    Return the seconds in which training stands still, and until the checkpoint is complete.
    """
    from hf_fsdp_recipes.saving.recorder import redirected
    from hf_fsdp_recipes.saving.saver import Save

    started = time.perf_counter()
    written = run.workspace / "checkpoint-1"
    save = Save(written, run.output_dir / "checkpoint-1", {"step": 1}, None, None)
    with redirected(trainer, written.parent) as save.parts:
        save_as_trainer(trainer, written)
    writer.start(save, asynchronous=True)
    ended: list[float] = []
    writer._written.add_done_callback(lambda _: ended.append(time.perf_counter()))
    standstill = time.perf_counter() - started
    compute(STEP_SECONDS if is_busy else 0.0)  # stands for the next forward and backward
    if is_busy:
        while not writer._written.done():
            compute(0.1)
    assert writer.wait() is None
    while not ended:  # callbacks are called after waiting threads are woken
        time.sleep(0.001)
    return standstill, ended[0] - started


def compute(seconds: float) -> None:
    """Compute for `seconds`, as forward and backward do."""
    import torch

    weight = torch.randn(1024, 1024)
    rows = torch.randn(256, 1024)
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        rows = torch.nn.functional.normalize(rows @ weight)


def report(num_parameters: float, results: list[dict[str, float]]) -> list[str]:
    found = {key: max(result[key] for result in results) for key in results[0]}
    state_bytes = sum(result["bytes"] for result in results)
    rows = [
        f"| {kind} | {found[kind]:.2f} | {found[kind] / found[STOCK]:.2f} |"
        for kind in (STOCK, IDLE, BUSY)
    ]
    return [
        f"{num_parameters / 1e9:g}B parameters with AdamW in bf16, {state_bytes / 1e9:.1f} GB, "
        f"{len(results)} ranks.",
        "",
        "| save, until complete and on disk | seconds | relative to Trainer's |",
        "|---|---|---|",
        *rows,
        "",
        f"Training stands still for {found['standstill']:.3f} s in the background, and for "
        f"{found[STOCK]:.2f} s in Trainer's own save. Peak extra host memory of a rank: "
        f"{found['extra'] / 1e6:,.0f} MB for a state of {results[0]['bytes'] / 1e6:,.0f} MB.",
        "",
    ]


if __name__ == "__main__":
    main()
