"""The measurements that the ranks of a self-test take.

`accelerate launch` starts this file with a measurement's name, options as JSON, and a result file. A figure's name contains its
unit; a bool is the result of a check.
"""

import functools
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing.layout import PARTS, directory_for
from hf_fsdp_recipes.checkpointing.state import capture, local_tensors
from hf_fsdp_recipes.checkpointing.writer import Snapshot, Writer
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.loading.load_model import load_model
from hf_fsdp_recipes.patches import cpu_ranks, registry
from hf_fsdp_recipes.patches.torch import wait_for_gloo_at_exit
from hf_fsdp_recipes.tools.preflight.bandwidth import synchronize

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import PreTrainedModel

Figure = float | bool | str
Figures = dict[str, Figure]
NUM_REPEATS = 5


def main(measurements: Mapping[str, Callable[..., Figures]]) -> None:
    """Run the measurement named on the command line on every rank; rank 0 writes the worst rank's value of each figure."""
    from accelerate import Accelerator

    name, options, file = sys.argv[1:]
    wait_for_gloo_at_exit()
    cpu_ranks.enable()
    accelerator = Accelerator()
    gathered = distributed.gather_objects(measurements[name](accelerator, **json.loads(options)))
    if distributed.is_main():
        Path(file).write_text(json.dumps({key: _worst(key, [of[key] for of in gathered]) for key in gathered[0]}))
    accelerator.end_training()


def _worst(name: str, values: Sequence[Figure]) -> Figure:
    if isinstance(values[0], str):
        return values[0]
    return min(values) if isinstance(values[0], bool) or "GB/s" in name else max(values)


def measure_copies(accelerator: "Accelerator", num_bytes: int) -> Figures:
    """Time copies between host and device in both directions or, on CPU ranks, within host memory."""
    device = accelerator.device
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        source = torch.ones_like(target)
        return {"within host memory, GB/s": _rate(device, num_bytes, lambda: target.copy_(source))}
    figures: Figures = {}
    for kind in ("pinned", "pageable"):
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned").fill_(1)
        up = functools.partial(target.copy_, host, non_blocking=True)
        down = functools.partial(host.copy_, target, non_blocking=True)
        figures[f"{kind} memory to device, GB/s"] = _rate(device, num_bytes, up)
        figures[f"device to {kind} memory, GB/s"] = _rate(device, num_bytes, down)
    return figures


def _rate(device: torch.device, num_bytes: int, copy: Callable[[], object]) -> float:
    return num_bytes / 1e9 / min(time_work(device, copy) for _ in range(NUM_REPEATS))


def time_work(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds until the work, and everything that it queued on the device, is done."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def load(
    accelerator: "Accelerator", checkpoint: str, source: str, dtype: str, **kwargs: Any
) -> "tuple[PreTrainedModel, AcceleratedOptimizer]":
    """Return a loaded and sharded model and its AdamW optimizer."""
    model = load_model(checkpoint, dtype=dtype, source=source, **kwargs)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return accelerator.prepare(model, optimizer)


def measure_load(
    accelerator: "Accelerator", checkpoint: str, tiny: str, sources: Sequence[str] = ("rank0", "direct")
) -> Figures:
    """Time loading with each `load_source`, and compare the weights. A tiny model is loaded first, so imports are not timed."""
    load(accelerator, tiny, "rank0", "bfloat16")
    gigabytes = sum(file.stat().st_size for file in Path(checkpoint).glob("*.safetensors")) / 1e9
    figures: Figures = {"checkpoint, GB": gigabytes}
    loaded: list[dict[str, torch.Tensor]] = []

    def load_from(source: str) -> None:
        model, _ = load(accelerator, checkpoint, source, "bfloat16")
        loaded.append(dict(local_tensors({name: value.detach() for name, value in model.named_parameters()})))

    for source in sources:
        accelerator.free_memory()
        distributed.barrier()
        seconds = time_work(accelerator.device, functools.partial(load_from, source))
        figures |= {f"{source}, seconds": seconds, f"{source}, GB/s": gigabytes / seconds}
    return figures | {"all sources load the same": all(_are_equal(loaded[0], other) for other in loaded)}


def _are_equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two dicts have the same names and bit-identical tensors."""
    return first.keys() == second.keys() and all(
        first[name].reshape(-1).view(torch.uint8).equal(second[name].reshape(-1).view(torch.uint8)) for name in first
    )


def measure_save(
    accelerator: "Accelerator", checkpoint: str, directory: str, num_tokens: int, num_batches: int
) -> Figures:
    """Save while training continues and changes the state; compare the checkpoint with the state at the time of the save."""
    model, optimizer = load(accelerator, checkpoint, "rank0", "float32")
    state_bytes = 12 * sum(parameter.numel() for parameter in model.parameters())
    if distributed.run_on_main(lambda: shutil.disk_usage(directory).free) < state_bytes:
        raise RecipeError(f"A checkpoint takes {state_bytes / 1e9:.1f} GB, and {directory} has less. Use another disk.")
    device, plugin = accelerator.device, accelerator.state.fsdp_plugin
    registry.apply("checkpointing")
    writer = Writer(directory)
    tokens = torch.randint(model.config.vocab_size, (1, num_tokens)).to(device)
    figures: Figures = {}

    def save(number: int) -> None:
        started = time.perf_counter()
        state = capture(model, optimizer, plugin)
        figures["capture, seconds"] = time.perf_counter() - started
        writer.save(Snapshot(number, state, {}, {}))
        figures["the host was busy with capture and start, seconds"] = time.perf_counter() - started

    def train(number: int | None = None) -> None:
        if number is not None:
            save(number)
        for _ in range(num_batches):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        writer.wait_until_staged()
        optimizer.step()
        optimizer.zero_grad()

    def save_and_wait(number: int) -> None:
        save(number)
        writer.wait_until_staged()

    model.train()
    plain = statistics.median([time_work(device, train) for _ in range(NUM_REPEATS)][2:])
    copies = []
    for number in (1, 2):
        copies.append(time_work(device, functools.partial(save_and_wait, number)))
        writer.wait()
        distributed.run_on_main(functools.partial(shutil.rmtree, directory_for(directory, number)))
    expected = {name: tensor.detach().clone() for name, tensor in local_tensors(capture(model, optimizer, plugin))}
    started = time.perf_counter()
    with_save = time_work(device, functools.partial(train, 3))
    later_step = statistics.median(time_work(device, train) for _ in range(3))
    writer.wait()
    figures |= {
        "state on this rank, GB": sum(tensor.nbytes for tensor in expected.values()) / 1e9,
        "first copy, which allocates host memory, seconds": copies[0],
        "later copy, seconds": copies[1],
        "step, seconds": plain,
        "step with a save, seconds": with_save,
        "training stood still, seconds": max(0.0, with_save - plain),
        "the next steps, seconds": later_step,
        "until the checkpoint was complete, seconds": time.perf_counter() - started,
    }
    restored = restore(capture(model, optimizer, plugin), directory_for(directory, 3))
    return figures | {"the checkpoint is the state at the save, bit for bit": _are_equal(restored, expected)}


def restore(state: Mapping[str, dict[str, Any]], checkpoint: Path) -> dict[str, torch.Tensor]:
    """Load a checkpoint into a state from `capture`; return this rank's tensors in it. Collective: every rank must call this."""
    import torch.distributed.checkpoint as dcp

    for part, folder in PARTS.items():
        reader = dcp.FileSystemReader(checkpoint / folder)
        is_alone = not distributed.is_distributed()
        dcp.load({part: state[part]}, storage_reader=reader, process_group=distributed.host_group(), no_dist=is_alone)
    return dict(local_tensors(state))


MEASUREMENTS: dict[str, Callable[..., Figures]] = {"copies": measure_copies, "load": measure_load, "save": measure_save}

if __name__ == "__main__":
    main(MEASUREMENTS)
