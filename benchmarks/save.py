"""What a user feels of a save: how long training waits, and how it goes on while files are written.

    python -m benchmarks.save [--parameters 1.1e9] [--ranks 2 8 32]

Saves a sharded Llama in bf16 with AdamW from gloo ranks of one machine: as Accelerate does for
Trainer, and as ShardedCheckpointCallback does, with idle and with busy cores. Copies the same state
to memory. All of these alternate in one run; all saves end fsynced. Prints a table.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.running import machine, sharded_llama
from hf_fsdp_recipes.saving.directory import sync
from tests.ranks.harness import run_ranks
from tests.ranks.memory import PeakMemory

REPEATS = 3
TRAINING_SECONDS = 2.0  # of ticks without a save
STOCK = "Trainer's own save"
COPY = "a plain copy of the state in memory"


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


def measure(num_parameters: float, directory: Path) -> dict[str, float]:
    """Save the same state in each way; return this rank's seconds and bytes.

    Every rank runs this.
    """
    trainer = make_trainer(num_parameters)
    saver = BackgroundSaver(trainer, directory / "run")
    # The first round does not count: it touches memory for the first time.
    with PeakMemory() as memory:
        saver.save(idle)
    rounds: list[dict[str, float]] = []
    for repeat in range(REPEATS + 1):
        found = {STOCK: time_stock(trainer, directory / "stock"), COPY: saver.copy_plainly()}
        for work in (idle, busy):
            found |= saver.save(work)
        rounds += [found] if repeat else []
    medians = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    num_bytes = sum(3 * parameter.to_local().nbytes for parameter in trainer.model.parameters())
    return medians | {"bytes": num_bytes, "extra": memory.growth_bytes}


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
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        accelerator=SimpleNamespace(state=state, device=torch.device("cpu"), **ranks),
        is_fsdp_enabled=True,
        _get_output_dir=None,
        _push_from_checkpoint=None,
    )


def save_as_trainer(trainer: Any, directory: Path) -> None:
    """Do what Trainer does for the model and the optimizer under FSDP."""
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    plugin = trainer.accelerator.state.fsdp_plugin
    save_fsdp_model(plugin, trainer.accelerator, trainer.model, str(directory), adapter_only=True)
    save_fsdp_optimizer(
        plugin, trainer.accelerator, trainer.optimizer, trainer.model, str(directory)
    )


def time_stock(trainer: Any, directory: Path) -> float:
    """Return the seconds of Trainer's own save, until all files are on disk. Collective."""
    import torch.distributed as dist

    from hf_fsdp_recipes import distributed

    dist.barrier()
    started = time.perf_counter()
    save_as_trainer(trainer, directory)
    for file in directory.rglob(f"__{dist.get_rank()}_*.distcp"):
        sync(file)
    dist.barrier()
    seconds = time.perf_counter() - started
    distributed.run_on_main(lambda: shutil.rmtree(directory))
    return seconds


class BackgroundSaver:
    """Saves as ShardedCheckpointCallback does. Every rank creates one.

    Args:
        trainer: what `make_trainer` returns.
        directory: the output directory, which does not exist.
    """

    def __init__(self, trainer: Any, directory: Path) -> None:
        from hf_fsdp_recipes import distributed
        from hf_fsdp_recipes.saving.directory import OutputDirectory
        from hf_fsdp_recipes.saving.saver import Saver

        self._trainer = trainer
        self._directory = OutputDirectory(directory)
        distributed.run_on_main(lambda: self._directory.open("bench", None, 0))
        self._saver = Saver(self._directory)

    def save(self, work: Callable[[], Callable[[], None]]) -> dict[str, float]:
        """Save once while this thread works, and return the seconds by name. Collective."""
        import torch.distributed as dist

        from hf_fsdp_recipes import distributed

        tick = work()
        ends = time.perf_counter() + TRAINING_SECONDS
        ticks_before = tick_until(lambda: time.perf_counter() > ends, tick)
        dist.barrier()
        started = time.perf_counter()
        save = self._start()
        waited = time.perf_counter() - started
        completed: list[float] = []
        save.ended.add_done_callback(lambda _: completed.append(time.perf_counter()))
        ticks = tick_until(lambda: bool(completed), tick)
        save.ended.result()
        distributed.run_on_main(lambda: shutil.rmtree(self._directory.path / save.written.name))
        return {
            f"{work.__name__}: waits": waited,
            f"{work.__name__}: gap": max(ticks),
            f"{work.__name__}: gap without a save": max(ticks_before),
            f"{work.__name__}: step": statistics.mean(ticks) / statistics.mean(ticks_before),
            f"{work.__name__}: complete": completed[0] - started,
        }

    def _start(self) -> Any:
        """Do what the callback does while training waits. Return the save."""
        from hf_fsdp_recipes import distributed
        from hf_fsdp_recipes.saving.recorder import redirected
        from hf_fsdp_recipes.saving.saver import Save

        written = self._directory.workspace / "checkpoint-1"
        save = Save(1, written, {"step": 1}, None, (None, None, None))
        distributed.run_on_main(lambda: self._directory.begin(1))
        with redirected(self._trainer, written.parent) as save.state:
            save_as_trainer(self._trainer, written)
        self._saver.start(save, asynchronous=True)
        distributed.run_on_main(lambda: self._directory.hide(written))
        self._saver.complete(save)
        return save

    def copy_plainly(self) -> float:
        """Copy the state to the memory of the last save; return the seconds. Collective."""
        import torch.distributed as dist

        from hf_fsdp_recipes.saving.host_copy import find_tensors
        from hf_fsdp_recipes.saving.recorder import redirected
        from hf_fsdp_recipes.weights.rows import local_part

        with redirected(self._trainer, self._directory.workspace) as state:
            save_as_trainer(self._trainer, self._directory.workspace)
        originals = map(local_part, find_tensors(state))
        copies = map(local_part, self._saver._host_copy._copies)
        pairs = list(zip(originals, copies, strict=True))
        dist.barrier()
        started = time.perf_counter()
        for original, memory in pairs:
            memory.copy_(original)
        return time.perf_counter() - started


def tick_until(is_done: Callable[[], bool], tick: Callable[[], None]) -> list[float]:
    """Call `tick` until it is done; return the seconds from each call to the next."""
    seconds: list[float] = []
    mark = time.perf_counter()
    while not is_done():
        tick()
        now = time.perf_counter()
        seconds.append(now - mark)
        mark = now
    return seconds


def idle() -> Callable[[], None]:
    """Return a part of a step on an accelerator: Python queues kernels and waits for them."""

    def tick() -> None:
        sum(range(30_000))
        time.sleep(0.001)

    return tick


def busy() -> Callable[[], None]:
    """Return a part of a step on the cores: it computes as forward and backward do."""
    import torch

    weight = torch.randn(1024, 1024)
    rows = torch.randn(256, 1024)

    def tick() -> None:
        torch.nn.functional.normalize(rows @ weight)

    return tick


def report(num_parameters: float, results: list[dict[str, float]]) -> list[str]:
    found = {key: max(result[key] for result in results) for key in results[0]}
    state_bytes = sum(result["bytes"] for result in results)
    rows = [
        f"| in the background, {work} cores "
        f"| {found[f'{work}: waits']:.2f} ({found[f'{work}: waits'] / found[COPY]:.2f}) "
        f"| {found[f'{work}: gap']:.3f} ({found[f'{work}: gap without a save']:.3f}) "
        f"| {found[f'{work}: step']:.2f} "
        f"| {found[f'{work}: complete']:.2f} ({found[f'{work}: complete'] / found[STOCK]:.2f}) |"
        for work in ("idle", "busy")
    ]
    return [
        f"{num_parameters / 1e9:g}B parameters with AdamW in bf16, {state_bytes / 1e9:.1f} GB, "
        f"{len(results)} ranks.",
        "",
        "| | training waits, s (in plain copies) | largest gap then, s (without a save) "
        "| time of a step then, relative | complete, s (relative to Trainer's) |",
        "|---|---|---|---|---|",
        f"| {COPY} | {found[COPY]:.2f} | | | |",
        f"| {STOCK} | {found[STOCK]:.2f} ({found[STOCK] / found[COPY]:.2f}) | | "
        f"| {found[STOCK]:.2f} (1) |",
        *rows,
        "",
        f"Peak extra host memory of a rank: {found['extra'] / 1e6:,.0f} MB for a state of "
        f"{results[0]['bytes'] / 1e6:,.0f} MB.",
        "",
    ]


if __name__ == "__main__":
    main()
