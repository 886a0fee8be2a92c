"""Time and host memory of loading, per rank, compared with stock loaders in one run.

    python -m benchmarks.load [--parameters 1.1e9] [--only "bf16 parameters"]

Loads a random Llama of the given size from bf16 safetensors files of at most 500 MB on two gloo
ranks of one machine. Every loader ends with sharded parameters whose pages have all been touched.
Memory is the peak anonymous memory above the level at the start. The files are in the page cache,
except in rows marked "from disk". Prints a table and, without `--only`, rewrites its section of
docs/measured.md.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, cast

from benchmarks.running import machine, make_checkpoint, sharded_llama, write_section
from tests.ranks.harness import run_ranks
from tests.ranks.memory import PeakMemory

FP32 = "fp32 masters"
BF16 = "bf16 parameters"
NF4 = "4-bit, nested scales"
COLD = "bf16 parameters, from disk"
WAYS = {
    "transformers + Accelerate, efficient loading on": ("stock", (FP32, BF16, COLD, NF4)),
    "torch DCP HuggingFaceStorageReader": ("dcp", (BF16, COLD)),
    "load_model, rank0": ("rank0", (FP32, BF16, COLD, NF4)),
    "load_model, direct": ("direct", (FP32, BF16, COLD, NF4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=1.1e9)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only", choices=(FP32, BF16, COLD, NF4), action="append", help="only prints the table"
    )
    options = parser.parse_args()
    measured = options.only or (FP32, BF16, COLD, NF4)
    with tempfile.TemporaryDirectory(prefix="bench-load-") as scratch:
        lines = measure_loaders(options.parameters, Path(scratch), options.repeats, measured)
    lines.append(f"`python -m benchmarks.load`, median of {options.repeats}; {machine()}")
    print("\n".join(lines))
    if not options.only:
        write_section("Loading", lines)


def measure_loaders(
    num_parameters: float, checkpoint: Path, repeats: int, measured: tuple[str, ...]
) -> list[str]:
    (num_bytes,) = run_ranks(make_checkpoint, 1, checkpoint, num_parameters, timeout_seconds=600)
    num_files = len(list(checkpoint.glob("*.safetensors")))
    lines = [
        f"{num_parameters / 1e9:g}B parameters, {num_bytes / 1e6:,.0f} MB in {num_files} files, "
        "2 ranks.",
        "",
        "| loader | parameters | seconds | relative to the first | shard, MB "
        "| peak above start, MB: rank 0 / rank 1 | peak - shard |",
        "|---|---|---|---|---|---|---|",
    ]
    for precision in measured:
        kinds = {way: kind for way, (kind, precisions) in WAYS.items() if precision in precisions}
        runs: dict[str, list[list[dict]]] = {way: [] for way in kinds}
        # The extra first round does not count: after other work, a virtual machine first has to get
        # memory from its host.
        for number in range(1 + repeats):
            for (
                way,
                kind,
            ) in kinds.items():  # loaders alternate, so that a slow minute affects all of them
                if precision == COLD:
                    forget(checkpoint)
                found = run_ranks(
                    load, 2, kind, precision, str(checkpoint), num_parameters, timeout_seconds=600
                )
                if number:
                    runs[way].append(found)
        base = seconds(runs[next(iter(runs))])
        lines += [row(way, precision, found, base) for way, found in runs.items()]
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
    return (
        f"| {way} | {precision} | {spent:.2f} | {spent / base:.2f} | {shard:,.0f} "
        f"| {peaks[0]:,.0f} / {peaks[1]:,.0f} | {max(peaks) - shard:+,.0f} |"
    )


def load(kind: str, precision: str, checkpoint: str, num_parameters: float) -> dict:
    """Load with one loader. Every rank runs this.

    Return seconds, peak bytes above the initial level, and the shard's bytes.
    """
    os.environ.update(
        ACCELERATE_USE_CPU="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP"
    )
    os.environ.update(
        FSDP_CPU_RAM_EFFICIENT_LOADING=str(kind == "stock"), ACCELERATE_USE_FSDP=str(kind != "dcp")
    )
    import peft  # noqa: F401 - imported before the measurement: takes a second with bitsandbytes
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, conversion_mapping

    from hf_fsdp_recipes.loading.load_model import load_model
    from hf_fsdp_recipes.upstream import patches

    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if precision == NF4:
        import bitsandbytes.nn  # noqa: F401 - as above

        kinds = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        dtypes = {
            "bnb_4bit_compute_dtype": torch.bfloat16,
            "bnb_4bit_quant_storage": torch.bfloat16,
        }
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **kinds, **dtypes)
    conversion_mapping._checkpoint_conversion_mapping_cache = None  # the fork server has built it
    accelerator = None
    if kind == "dcp":
        dist.init_process_group("gloo")
    else:
        from accelerate import Accelerator

        patches.enable_cpu_ranks()
        accelerator = Accelerator(mixed_precision="bf16" if precision == FP32 else "no", cpu=True)
    dist.barrier()
    with PeakMemory() as memory:
        if kind == "dcp":
            model = load_with_dcp(checkpoint, num_parameters)
        elif kind == "stock":
            model = prepare(
                accelerator, AutoModelForCausalLM.from_pretrained(checkpoint, **options)
            )
        else:
            model = prepare(
                accelerator, load_model(checkpoint, source=cast("Any", kind), **options)
            )
        shards = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        for shard in shards:
            touched = shard.detach().reshape(-1)[::512]
            # Training writes too, and a write makes mapped pages private.
            touched.copy_(touched.clone())
        dist.barrier()
    shard_bytes = sum(shard.numel() * shard.dtype.itemsize for shard in shards)
    return {"seconds": memory.seconds, "peak": memory.growth_bytes, "shard": shard_bytes}


def prepare(accelerator: Any, model: Any) -> Any:
    import torch

    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def load_with_dcp(checkpoint: str, num_parameters: float) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    model = sharded_llama(num_parameters)
    state = model.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(checkpoint))
    model.load_state_dict(state, assign=True)
    return model


if __name__ == "__main__":
    main()
