"""Time and extra memory of an export, compared with stock methods in one run.

    python -m benchmarks.export [--parameters 1.1e9] [--ranks 2 8 32] [--print]

Exports a Llama of the given size with bf16 parameters, sharded with FSDP2 over gloo ranks, and
converts its sharded checkpoint in one process. Every method ends with the full model on disk,
fsynced, and all write the same tensors. Prints a table and, without `--print`, rewrites its section
of docs/measured.md.
"""

import argparse
import ctypes
import functools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.running import machine, sharded_llama, write_section
from hf_fsdp_recipes.saving.directory import sync
from tests.ranks.harness import run_ranks
from tests.ranks.memory import PeakMemory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=1.1e9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--print", action="store_true")
    options = parser.parse_args()
    lines: list[str] = []
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="bench-export-") as scratch:
            lines += measure_ranks(options.parameters, num_ranks, Path(scratch), options.repeats)
    lines.append(
        f"`python -m benchmarks.export`, median of {options.repeats}, fsync included; {machine()}"
    )
    print("\n".join(lines))
    if not options.print and options.ranks == [2]:
        write_section("Exporting", lines)


def measure_ranks(num_parameters: float, num_ranks: int, scratch: Path, repeats: int) -> list[str]:
    ranks = run_ranks(measure, num_ranks, num_parameters, scratch, repeats, timeout_seconds=1800)
    (offline,) = run_ranks(measure_offline, 1, scratch, repeats, timeout_seconds=1800)
    num_bytes = sum(
        file.stat().st_size for file in (scratch / "export_model").glob("*.safetensors")
    )
    disk = statistics.median(write_with_dd(scratch / "dd", num_bytes) for _ in range(repeats))
    lines = [
        f"{num_parameters / 1e9:g}B bf16 parameters, {num_bytes / 1e6:,.0f} MB. "
        f"{num_ranks} ranks, then one process.",
        "",
        "| method | seconds | speedup over the first | relative to dd "
        "| extra MB: rank 0 / largest other |",
        "|---|---|---|---|---|",
    ]
    for results in (ranks, [offline]):
        base = max(result[next(iter(result))][0] for result in results)
        for way in results[0]:
            spent = max(result[way][0] for result in results)
            first, *others = (result[way][1] / 1e6 for result in results)
            extra = f"{first:,.0f}" + (f" / {max(others):,.0f}" if others else "")
            lines.append(
                f"| {way} | {spent:.1f} | {base / spent:.1f} | {spent / disk:.2f} | {extra} |"
            )
    return [*lines, f"| `dd` of the same size with fsync | {disk:.1f} | | 1 | |", ""]


def measure(num_parameters: float, scratch: Path, repeats: int) -> dict[str, tuple[float, ...]]:
    """Export with each method in turn; return the medians. Leaves a checkpoint in `scratch`.

    Every rank runs this.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from hf_fsdp_recipes import export_model

    dist.init_process_group("gloo")
    model = sharded_llama(num_parameters)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in model.parameters():
        parameter.detach().to_local().normal_(0, 0.02, generator=generator)
    ways: dict[str, Callable[..., Any]] = {
        "FULL_STATE_DICT on rank 0, then save_file": functools.partial(save_full, model),
        "DCP HuggingFaceStorageWriter with consolidation": functools.partial(save_with_dcp, model),
        "export_model": functools.partial(export_model, model),
    }
    dcp.save(
        {"model": model.state_dict()}, storage_writer=dcp.FileSystemWriter(scratch / "sharded")
    )
    return measure_ways(ways, scratch, repeats)


def measure_offline(scratch: Path, repeats: int) -> dict[str, tuple[float, ...]]:
    """Convert the checkpoint with each method in turn, in one process; return the medians."""
    from accelerate.utils import merge_fsdp_weights

    from hf_fsdp_recipes import export_checkpoint

    sharded = scratch / "sharded"
    ways: dict[str, Callable[..., Any]] = {
        "`accelerate merge-weights`": lambda target: merge_fsdp_weights(str(sharded), str(target)),
        "export_checkpoint": functools.partial(
            export_checkpoint, sharded, base_model=scratch / "export_model"
        ),
    }
    return measure_ways(ways, scratch, repeats)


def measure_ways(
    ways: dict[str, Callable[..., Any]], scratch: Path, repeats: int
) -> dict[str, tuple[float, ...]]:
    """Run the methods in turn, `repeats` times and once before.

    Return median seconds and extra bytes. Every rank runs this.
    """
    from hf_fsdp_recipes import distributed

    runs: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    for number in range(repeats + 1):
        for way, write in ways.items():
            target = scratch / way
            distributed.run_on_main(functools.partial(shutil.rmtree, target, ignore_errors=True))
            distributed.run_on_main(os.sync)
            # Or else a method would reuse the memory that another one has left behind.
            ctypes.CDLL(None).malloc_trim(0)
            with PeakMemory() as memory:
                write(target)
                for file in target.glob("*.safetensors") if distributed.is_main() else ():
                    sync(file)
            if number:
                runs[way].append((memory.seconds, memory.growth_bytes))
    distributed.run_on_main(lambda: check_equal([scratch / way for way in ways]))
    return {
        way: tuple(map(statistics.median, zip(*found, strict=True))) for way, found in runs.items()
    }


def save_full(model: Any, target: Path) -> None:
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    if state:  # rank 0
        target.mkdir()
        save_file(
            {name: tensor.contiguous() for name, tensor in state.items()},
            target / "model.safetensors",
        )


def save_with_dcp(model: Any, target: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(target), save_distributed=True, enable_consolidation=True)
    dcp.save(model.state_dict(), storage_writer=writer)


def check_equal(directories: list[Path]) -> None:
    import torch
    from safetensors.torch import load_file

    first, *others = (
        {k: v for f in d.glob("*.safetensors") for k, v in load_file(f).items()}
        for d in directories
    )
    for directory, found in zip(directories[1:], others, strict=True):
        different = [
            name
            for name in first.keys() | found.keys()
            if not torch.equal(first[name], found[name])
        ]
        if different:
            raise RuntimeError(f"{different[0]} of {directory} differs from {directories[0]}")


def write_with_dd(target: Path, num_bytes: int) -> float:
    os.sync()
    started = time.perf_counter()
    arguments = [
        f"of={target}",
        "bs=1M",
        f"count={num_bytes // 2**20}",
        "conv=fsync",
        "status=none",
    ]
    subprocess.run(["dd", "if=/dev/zero", *arguments], check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
