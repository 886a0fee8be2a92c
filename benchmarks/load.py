"""Time and host memory of loading, per rank, compared with stock loaders in one run.

    python -m benchmarks.load [--parameters 1.1e9] [--parameters 0.3e9] [--only "bf16 parameters"]

Loads a random Llama of the given size from bf16 safetensors files of at most 500 MB on two gloo ranks of one machine. Every
loader ends with sharded parameters whose pages have all been touched. Memory is the peak anonymous memory above the level at
the start. The files are in the page cache, except in rows marked "from disk". The seconds in brackets are those of reading into
the shards alone, with their allocation and checks, but without building and sharding the model. Prints a table and, without
`--only`, rewrites its section of docs/measured.md.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks.running import machine, make_checkpoint, run_ranks, write_section

REPEATS = 3
QUICK = 3  # loads that take less than a second get this many times more repeats
FP32, BF16, NF4 = "fp32 masters", "bf16 parameters", "4-bit, nested scales"
COLD = "bf16 parameters, from disk"
STOCK = "transformers + Accelerate, efficient loading on"
WAYS = {
    STOCK: ("stock", (FP32, BF16, COLD, NF4)),
    "torch DCP HuggingFaceStorageReader": ("dcp", (BF16, COLD)),
    "transformers DistributedConfig(fsdp_size=2)": ("native", (BF16, COLD)),
    "load_model, rank0": ("rank0", (FP32, BF16, COLD, NF4)),
    "load_model, direct": ("direct", (FP32, BF16, COLD, NF4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, action="append")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument(
        "--only", choices=(FP32, BF16, COLD, NF4), action="append", help="measure only this; prints the table"
    )
    parser.add_argument("--directory", default=None, help="where checkpoints are kept; default: a temporary directory")
    options = parser.parse_args()
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-load-") as scratch:
        for size in options.parameters or [0.3e9, 1.1e9]:
            lines += measure_size(size, Path(options.directory or scratch), options.repeats, options.only)
    rounds = f"median of {options.repeats} (of {QUICK * options.repeats} for bf16 parameters from memory)"
    lines.append(f"`python -m benchmarks.load`, {rounds}; {machine()}")
    print("\n".join(lines))
    if not options.only:
        write_section("Loading", lines)


def measure_size(num_parameters: float, directory: Path, repeats: int, only: Sequence[str] | None = None) -> list[str]:
    checkpoint = directory / f"llama-{num_parameters:g}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (num_bytes,) = run_ranks(make_checkpoint, 1, checkpoint, num_parameters)
    num_files = len(list(checkpoint.glob("*.safetensors")))
    lines = [
        f"{num_parameters / 1e9:g}B parameters, {num_bytes / 1e6:,.0f} MB in {num_files} files, 2 ranks.",
        "",
        "| loader | parameters | seconds | relative to the peer | shard, MB | peak above start, MB: rank 0 / rank 1 | "
        "peak - shard |",
        "|---|---|---|---|---|---|---|",
    ]
    results: dict[tuple[str, str], list[list[dict]]] = {}
    measured_precisions = [each for each in (FP32, BF16, COLD, NF4) if not only or each in only]
    for precision in measured_precisions:
        # The extra first round does not count: after other work, a virtual machine first has to get memory from its host.
        for number in range(1 + repeats * (QUICK if precision == BF16 else 1)):
            for way, (kind, precisions) in WAYS.items():  # loaders alternate, so that a slow minute affects all of them
                if precision not in precisions or (number == 0 and precision != BF16):
                    continue
                if precision == COLD:
                    forget(checkpoint)
                found = run_ranks(load, 2, kind, precision, str(checkpoint))
                print(number, way, precision, [round(rank["seconds"], 2) for rank in found], flush=True)
                if number:
                    results.setdefault((way, precision), []).append(found)
    for precision in measured_precisions:
        reference = "torch DCP HuggingFaceStorageReader" if precision in (BF16, COLD) else STOCK
        base = seconds(results[(reference, precision)])
        for (way, measured), runs in results.items():
            if measured == precision:
                lines.append(row(way, precision, runs, base))
    return [*lines, ""]


def forget(checkpoint: Path) -> None:
    """Have the kernel drop a checkpoint's files from the page cache."""
    for file in checkpoint.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(runs: list[list[dict]]) -> float:
    return statistics.median(max(rank["seconds"] for rank in run) for run in runs)


def row(way: str, precision: str, runs: list[list[dict]], base: float) -> str:
    peaks = [statistics.median(run[rank]["peak"] for run in runs) / 1e6 for rank in (0, 1)]
    shard = max(rank["shard"] for rank in runs[0]) / 1e6
    spent = seconds(runs)
    reading = [max(rank["reading_seconds"] for rank in run) for run in runs if "reading_seconds" in run[0]]
    read = f" ({statistics.median(reading):.2f})" if reading else ""
    return (
        f"| {way} | {precision} | {spent:.2f}{read} | {spent / base:.2f} | {shard:,.0f} | {peaks[0]:,.0f} / {peaks[1]:,.0f} | "
        f"{max(peaks) - shard:+,.0f} |"
    )


def quantization() -> dict:
    """Return from_pretrained's argument for 4-bit weights."""
    import torch
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    return {"quantization_config": config}


def load(kind: str, precision: str, checkpoint: str) -> dict:
    """Load with one loader; return seconds, peak bytes above the initial level, and the shard's bytes. Every rank runs this.

    If the loader has a separate phase for it, also return the seconds for reading into the shards.
    """
    os.environ.update(ACCELERATE_USE_CPU="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(kind == "stock")
    os.environ["ACCELERATE_USE_FSDP"] = str(kind in ("stock", "rank0", "direct"))
    import peft  # noqa: F401 - imported before the measurement: takes a second with bitsandbytes
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from benchmarks.running import HostPeak
    from hf_fsdp_recipes import patches
    from hf_fsdp_recipes.loading import load_model  # imported before the measurement

    patches.enable_cpu_ranks()
    accelerator = None
    if kind in ("stock", "rank0", "direct"):
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16" if precision == FP32 else "no", cpu=True)
    else:
        dist.init_process_group("gloo")
    quantized = quantization() if precision == NF4 else {}
    if quantized:
        import bitsandbytes.nn  # noqa: F401 - as above
    dist.barrier()
    reading: dict[str, float] = {}
    with HostPeak() as memory:
        if kind == "stock":
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, **quantized)
            model = prepare(accelerator, model)
        elif kind in ("rank0", "direct"):
            model = load_model.load_model(checkpoint, dtype="bfloat16", source=cast("Any", kind), **quantized)
            model = prepare(accelerator, model)
        elif kind == "dcp":
            model, reading["reading_seconds"] = load_with_dcp(checkpoint)
        else:
            from transformers.distributed import DistributedConfig

            distributed = DistributedConfig(fsdp_size=2)
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=torch.bfloat16, distributed_config=distributed
            )
        shards = [
            parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in model.parameters()
        ]
        for shard in shards:
            touched = shard.detach().reshape(-1)[::512]
            touched.copy_(touched.clone())  # training writes too, and a write makes mapped pages private
        dist.barrier()
    shard_bytes = sum(shard.numel() * shard.dtype.itemsize for shard in shards)
    return {"seconds": memory.seconds, "peak": memory.peak_bytes - memory.before_bytes, "shard": shard_bytes, **reading}


def prepare(accelerator: Any, model: Any) -> Any:
    import torch

    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def load_with_dcp(checkpoint: str) -> tuple[Any, float]:
    """Return the model, and the seconds for allocating and reading its shards."""
    import time

    import torch
    import torch.distributed.checkpoint as dcp
    from accelerate import init_empty_weights
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint), dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    started = time.perf_counter()
    model.to_empty(device="cpu")
    state = model.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(checkpoint))
    model.load_state_dict(state, assign=True)
    return model, time.perf_counter() - started


if __name__ == "__main__":
    main()
