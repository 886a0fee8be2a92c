"""Time and extra memory of an export, compared with stock methods in one run.

    python -m benchmarks.export [--parameters 1.1e9] [--parameters 0.3e9]

Exports a Llama of the given size with bf16 parameters, sharded with FSDP2 over two gloo ranks. Every method ends with
the full model on disk, fsynced. Prints a table and rewrites its section of docs/measured.md.
"""

import argparse
import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.running import llama_config, machine, run_ranks, write_section

REPEATS = 3
WAYS = {
    "FULL_STATE_DICT on rank 0, then save_file": "full",
    "DCP HuggingFaceStorageWriter with consolidation": "dcp",
    "transformers' distributed save, then consolidate": "native",
    "export_model, direct": "direct",
    "export_model, direct, as on 2 nodes": "nodes",
    "export_model, gather": "gather",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, action="append")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    lines: list[str] = []
    for size in options.parameters or [0.3e9, 1.1e9]:
        with tempfile.TemporaryDirectory(prefix="bench-export-") as scratch:
            lines += measure_size(size, Path(scratch), options.repeats)
    lines.append(f"`python -m benchmarks.export`, median of {options.repeats}, fsync included; {machine()}")
    print("\n".join(lines))
    write_section("Exporting", lines)


def measure_size(num_parameters: float, scratch: Path, repeats: int) -> list[str]:
    results = run_ranks(measure, 2, num_parameters, scratch, repeats)
    num_bytes = results[0]["bytes"]
    disk = statistics.median(write_with_dd(scratch / "dd", num_bytes) for _ in range(repeats))
    base = max(result["full"][0] for result in results)
    lines = [
        f"{num_parameters / 1e9:g}B bf16 parameters, {num_bytes / 1e6:,.0f} MB, 2 ranks.",
        "",
        "| method | seconds | speedup over FULL_STATE_DICT | relative to dd | extra MB: rank 0 / rank 1 |",
        "|---|---|---|---|---|",
    ]
    for way, kind in WAYS.items():
        spent = max(result[kind][0] for result in results)
        extra = " / ".join(f"{result[kind][1] / 1e6:,.0f}" for result in results)
        lines.append(f"| {way} | {spent:.1f} | {base / spent:.1f} | {spent / disk:.2f} | {extra} |")
    lines.append(f"| `dd` of the same size with fsync | {disk:.1f} | | 1 | |")
    return [*lines, "", *measure_offline(scratch, results[0]["config"], repeats), ""]


def measure(num_parameters: float, scratch: Path, repeats: int) -> dict:
    """Export with each method in turn; return the seconds and extra bytes of each. Every rank runs this."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes import distributed
    from hf_fsdp_recipes.export import from_model
    from hf_fsdp_recipes.metrics.memory import HostPeak

    dist.init_process_group("gloo")
    config = llama_config(num_parameters)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in model.parameters():
        parameter.detach().to_local().normal_(0, 0.02, generator=generator)
    times: dict[str, list[float]] = {kind: [] for kind in WAYS.values()}
    extra: dict[str, list[int]] = {kind: [] for kind in WAYS.values()}
    for _ in range(repeats):
        for kind in times:
            target = scratch / kind
            if dist.get_rank() == 0:
                shutil.rmtree(target, ignore_errors=True)
                os.sync()
            dist.barrier()
            with HostPeak() as memory:
                if kind == "full":
                    save_full(model, target)
                elif kind == "dcp":
                    save_with_dcp(model, target)
                elif kind == "native":
                    save_then_consolidate(model, target)
                else:
                    node = f"node {dist.get_rank()}" if kind == "nodes" else "node"
                    distributed.node_id = functools.partial(str, node)
                    from_model.export_model(model, target, method="gather" if kind == "gather" else "direct")
                dist.barrier()
            times[kind].append(memory.seconds)
            extra[kind].append(memory.peak_bytes - memory.before_bytes)
    check_equal(scratch, [kind for kind in times if kind != "dcp"]) if dist.get_rank() == 0 else None
    if dist.get_rank() == 0:
        for kind in times:
            shutil.rmtree(scratch / kind)
        config.save_pretrained(scratch / "model")
    dcp.save({"model": model.state_dict()}, storage_writer=dcp.FileSystemWriter(scratch / "sharded"))
    num_bytes = sum(parameter.numel() * 2 for parameter in model.parameters())
    found = {kind: (statistics.median(times[kind]), statistics.median(extra[kind])) for kind in times}
    return {**found, "bytes": num_bytes, "config": str(scratch / "model")}


def save_full(model: Any, target: Path) -> None:
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        target.mkdir()
        file = target / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
        sync(file)


def save_with_dcp(model: Any, target: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(target), save_distributed=True, enable_consolidation=True)
    dcp.save(model.state_dict(), storage_writer=writer)
    if dist.get_rank() == 0:
        for file in target.glob("*.safetensors"):
            sync(file)


def save_then_consolidate(model: Any, target: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from transformers.distributed.checkpoint import consolidate_distributed_checkpoint

    shards = target / "shards"
    dcp.save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(str(shards), save_distributed=True))
    dist.barrier()
    if dist.get_rank() == 0:
        consolidate_distributed_checkpoint(shards, target)
        for file in target.glob("*.safetensors"):
            sync(file)


def check_equal(scratch: Path, kinds: list[str]) -> None:
    """Raise an error unless all methods wrote the same tensors, byte for byte."""
    import torch
    from safetensors import safe_open

    stores = {
        kind: [safe_open(file, "pt") for file in sorted((scratch / kind).glob("*.safetensors"))] for kind in kinds
    }
    names = {kind: {name: store for store in found for name in store.keys()} for kind, found in stores.items()}  # noqa: SIM118
    first, *others = kinds
    for kind in others:
        if set(names[kind]) != set(names[first]):
            raise RuntimeError(f"{kind} has different tensors from {first}")
        for name, store in names[kind].items():
            if not torch.equal(store.get_tensor(name), names[first][name].get_tensor(name)):
                raise RuntimeError(f"{name} differs between {first} and {kind}")


def sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def write_with_dd(target: Path, num_bytes: int) -> float:
    os.sync()
    started = time.perf_counter()
    count = num_bytes // 2**20
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={count}", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    spent = time.perf_counter() - started
    target.unlink()
    return spent


def measure_offline(scratch: Path, config: str, repeats: int) -> list[str]:
    """Compare `accelerate merge-weights` with `export_checkpoint` on one sharded checkpoint."""
    merge = "from accelerate.utils import merge_fsdp_weights; merge_fsdp_weights(sys.argv[1], sys.argv[2])"
    ours = "from hf_fsdp_recipes import export_checkpoint; export_checkpoint(sys.argv[1], sys.argv[2], base_model=sys.argv[3])"
    imports = {
        "merge": "import accelerate.utils",
        "ours": "import hf_fsdp_recipes.export.from_checkpoint, hf_fsdp_recipes.export.from_model",
    }
    results: dict[str, list[tuple[float, float]]] = {"merge": [], "ours": []}
    for _ in range(repeats):
        for kind, code in (("merge", merge), ("ours", ours)):
            target = scratch / f"offline-{kind}"
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            program = (
                f"import sys, os; {imports[kind]}; import transformers.models.llama.modeling_llama, accelerate\n"
                "from hf_fsdp_recipes.metrics.memory import HostPeak\n"
                f"with HostPeak() as memory:\n    {code}\n"
                "    import pathlib\n"
                "    for file in pathlib.Path(sys.argv[2]).iterdir(): os.fsync(os.open(file, os.O_RDONLY))\n"
                "print(memory.seconds, memory.peak_bytes - memory.before_bytes)"
            )
            arguments = [sys.executable, "-c", program, str(scratch / "sharded"), str(target), config]
            output = subprocess.run(
                arguments, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1]
            )
            spent, extra = map(float, output.stdout.split()[-2:])
            results[kind].append((spent, extra))
    check_equal(scratch, ["offline-merge", "offline-ours"])
    medians = {
        kind: [statistics.median(values) for values in zip(*found, strict=True)] for kind, found in results.items()
    }
    base = medians["merge"][0]
    lines = ["| offline, one process | seconds | speedup | extra MB |", "|---|---|---|---|"]
    for way, kind in (("accelerate merge-weights", "merge"), ("export_checkpoint", "ours")):
        spent, extra = medians[kind]
        lines.append(f"| {way} | {spent:.1f} | {base / spent:.1f} | {extra / 1e6:,.0f} |")
    return lines


if __name__ == "__main__":
    main()
