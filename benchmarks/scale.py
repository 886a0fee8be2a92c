"""How the time to load, save, export and gather objects grows with the number of ranks, on one model and fixed cores.

    python -m benchmarks.scale [--parameters 3e8] [--ranks 2 8 32] [--label now]

Forks gloo ranks on one machine, with a Llama in bf16 and AdamW, sharded with FSDP2. Also counts the
exchanges between ranks in each operation. Prints a table.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from benchmarks.running import machine, make_checkpoint, run_ranks

COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "all_reduce",
    "gather",
    "broadcast",
)
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=3e8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--label", default="now")
    parser.add_argument("--directory", default=None, help="where to write; default: a temporary directory")
    options = parser.parse_args()
    import_once()
    print(
        f"| {options.label} | ranks | seconds | relative to {options.ranks[0]} ranks | exchanges |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory(prefix="bench-scale-", dir=options.directory) as scratch:
        make_checkpoint(Path(scratch) / "model", options.parameters)
        first: dict[str, float] = {}
        for num_ranks in options.ranks:
            found = run_ranks(measure, num_ranks, options.parameters, Path(scratch), start="fork")
            for name in found[0]:
                seconds = max(rank[name][0] for rank in found)
                ratio = seconds / first.setdefault(name, seconds)
                print(f"| {name} | {num_ranks} | {seconds:.3f} | {ratio:.1f} | {found[0][name][1]} |", flush=True)
    print(f"\n`python -m benchmarks.scale`, median of {REPEATS}; {machine()}")


def import_once() -> None:
    """Import what the ranks need before they are forked, so that they share it."""
    import torch
    import transformers  # noqa: F401

    from hf_fsdp_recipes import export_model, load_model  # noqa: F401
    from hf_fsdp_recipes.checkpointing import writer  # noqa: F401

    torch.set_num_threads(1)


def measure(num_parameters: float, scratch: Path) -> dict[str, tuple[float, int]]:
    """Return seconds and number of exchanges of each operation. Every rank runs this."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from benchmarks.save import fsdp2_plugin, stepped_adamw
    from hf_fsdp_recipes import distributed, export_model
    from hf_fsdp_recipes.checkpointing.state import capture
    from hf_fsdp_recipes.checkpointing.writer import Snapshot, Writer
    from hf_fsdp_recipes.loading.load_model import _load_on_meta
    from hf_fsdp_recipes.loading.materialize import fill_sharded
    from hf_fsdp_recipes.patches import registry
    from hf_fsdp_recipes.patches.accelerate import LOADER_ATTRIBUTE

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    registry.apply("checkpointing")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    calls = count_calls(dist)
    results: dict[str, tuple[float, int]] = {}

    def timed(name: str, work: Any, repeats: int = REPEATS) -> None:
        spent, number = [], 0
        for repeat in range(repeats):
            dist.barrier()
            number, started = len(calls), time.perf_counter()
            work(repeat)
            spent.append(time.perf_counter() - started)
            number = len(calls) - number
        results[name] = statistics.median(spent), number

    def load(source: str) -> Any:
        model = _load_on_meta(
            str(scratch / "model"), cast("Any", source), "sample", False, None, {"dtype": torch.bfloat16}
        )
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        fill_sharded(model, getattr(model, LOADER_ATTRIBUTE).source, torch.device("cpu"), False)
        return model

    timed("gather_objects", lambda _: distributed.gather_objects(None), 20)
    for source in ("direct", "rank0"):
        timed(f"load {source}", lambda _, source=source: load(source))
    model = load("direct")
    optimizer = stepped_adamw(model)
    plugin = fsdp2_plugin()
    writer = Writer(scratch / f"run-{dist.get_world_size()}")

    def save(step: int) -> None:
        writer.save(Snapshot(step, capture(model, optimizer, plugin), {}, {}))
        writer.wait()

    timed("save", save)
    for method in ("direct", "gather"):
        timed(f"export {method}", lambda _, method=method: export_model(model, scratch / "export", method=method))
    return results


def count_calls(dist: Any) -> list[str]:
    """Record every exchange between ranks from now on, and return the list."""
    calls: list[str] = []
    for name in COLLECTIVES:
        upstream = getattr(dist, name)

        def counted(*args: Any, upstream: Any = upstream, name: str = name, **kwargs: Any) -> Any:
            calls.append(name)
            return upstream(*args, **kwargs)

        setattr(dist, name, counted)
    return calls


if __name__ == "__main__":
    main()
