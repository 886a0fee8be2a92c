"""Writes what is going out into a directory that appears only when it is complete: the export's mechanics.

An `ShardExport` is a run of one parameter's elements that this rank can produce, chunk by chunk, from wherever
it has them: a shard in memory, a checkpoint's files, a base model with an adapter added. Knows no wrappers.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export import verify_files
from hf_fsdp_recipes.export.tensor_files import FilePlan, FileWriter, create_files, plan_files
from hf_fsdp_recipes.loading import names
from hf_fsdp_recipes.loading.weight_mapping import TensorRange, rows_of_parts
from hf_fsdp_recipes.metrics import progress

CHUNK_BYTES = 8 * 1024 * 1024  # what a rank holds beside its shard while it writes
EXPORT_TITLE = "export weights"
Method = Literal["auto", "direct", "gather"]


@dataclass(frozen=True)
class ShardExport:
    """One parameter on its way into the files.

    Attributes:
        name: in the model's own state dict.
        shape: the whole parameter's.
        held_dtype: what `chunk` returns.
        first, count: the elements that this rank brings, in the parameter's row-major order.
        parts: the tensors that the parameter becomes, as runs of its elements.
        dtype: what is written.
        chunk: returns `count` values from `start` on, counted from `first`; 1-D, in their final value.
    """

    name: str
    shape: tuple[int, ...]
    held_dtype: torch.dtype
    first: int
    count: int
    parts: list[TensorRange]
    dtype: torch.dtype
    chunk: Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class ExportPlan:
    """All of an export: what goes out, into files of which name, and what stands beside them.

    Attributes:
        outgoing: this rank's runs; the same parameters in the same order on every rank.
        model: the transformers model, perhaps on meta, whose conversions name the tensors.
        pattern: file name with `{suffix}`.
        write_companions: writes configs and tokenizer into a directory, given the plan; rank 0 calls it.
        is_adapter_only: whether the files hold an adapter instead of a model.
    """

    outgoing: list[ShardExport]
    model: Any
    pattern: str
    write_companions: Callable[[Path, FilePlan], None]
    is_adapter_only: bool = False


def write_export(
    final: Path,
    describe: Callable[[], ExportPlan],
    max_shard_size: int | str,
    method: Method,
    prepare: Callable[[], None],
) -> Path:
    """Write an export under a temporary name, check it, and give it its own.

    Collective: every rank must call this.

    Args:
        final: the directory to appear.
        describe: returns this rank's contents; may fail on some ranks, holds no collective.
        max_shard_size: bytes or "5GB".
        method: direct, gather, or auto to try whether all ranks see one storage.
        prepare: called on every rank between planning and writing; may hold collectives.

    Raises:
        ExportError: the same on every rank; nothing is left under the final name.
    """
    temporary = final.with_name(f".{final.name}.incomplete")
    with distributed.sync_errors():
        if distributed.is_main():
            _make_room(final, temporary)
    try:
        method = _choose_method(temporary) if method == "auto" else method
        contents: Any = None
        plan: Any = None
        with distributed.sync_errors():
            contents = describe()
            plan = plan_files(_in_saved_order(contents), max_shard_size, contents.pattern)
            if distributed.is_main():
                create_files(plan, temporary)
        prepare()
        with ThreadPoolExecutor(max_workers=1) as beside:  # waits for nothing that the weights wait for
            companions = beside.submit(_write_companions, contents, plan, temporary) if distributed.is_main() else None
            non_finite = _write(contents.outgoing, plan, temporary, method)
            with distributed.sync_errors():
                if companions is not None:
                    companions.result()
                    if contents.is_adapter_only:
                        verify_files.check_adapter_rows(temporary, plan)
                    _sync_all(temporary)
        verify_files.warn_non_finite(non_finite)
        with distributed.sync_errors():
            if distributed.is_main():
                _put_in_place(temporary, final)
    except BaseException:
        if distributed.is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a floating-point dtype by name or as it is.

    Raises:
        ExportError: it is none.
    """
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ExportError(f"dtype {dtype!r} is no floating-point dtype. Rule: bfloat16, float16, float32 or None.")
        return found
    return dtype


def parts_of(model: Any, name: str, shape: tuple[int, ...]) -> list[TensorRange]:
    """Cut a parameter into the tensors that `save_pretrained` writes.

    Raises:
        ExportError: that cannot be done slice by slice.
    """
    try:
        return rows_of_parts(model, names.in_base_model(name), shape)
    except ValueError as error:
        raise ExportError(
            f"{name}: transformers writes it in a way that cannot be done slice by slice ({error}). Remedy: gather it with "
            f"accelerator.get_state_dict and call save_pretrained."
        ) from error


def whole_part(stored_name: str, shape: tuple[int, ...]) -> TensorRange:
    """Return a parameter as one tensor of its own shape."""
    return TensorRange(stored_name, shape, 0, torch.Size(shape).numel())


def _make_room(final: Path, temporary: Path) -> None:
    """Clear the way for a new directory, without touching anything that is not an export. Main rank only."""
    try:
        if final.exists() and not verify_files.looks_like_export(final):
            raise ExportError(
                f"{final} exists and is no export. Rule: only an earlier export is replaced. Remedy: choose another name."
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise ExportError(
            f"{temporary} cannot be created: {error.strerror}. Remedy: check path and permissions."
        ) from error


def _choose_method(directory: Path) -> Literal["direct", "gather"]:
    """Try whether a file of rank 0's is seen by all ranks. Collective: every rank must call this."""
    probe = directory / ".probe"
    token = distributed.broadcast_object(os.urandom(16).hex() if distributed.is_main() else None)
    with distributed.sync_errors():
        if distributed.is_main():
            probe.write_text(token)
    try:
        is_seen = probe.read_text() == token
    except OSError:
        is_seen = False
    everybody = all(distributed.gather_objects(is_seen))
    if distributed.is_main():
        probe.unlink()
    return "direct" if everybody else "gather"


def _in_saved_order(contents: ExportPlan) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """List what is written in the order of `save_pretrained`, which decides which file a tensor falls into."""
    from transformers.core_model_loading import revert_weight_conversion

    entries = {part.tensor: (part.tensor, part.shape, item.dtype) for item in contents.outgoing for part in item.parts}
    if contents.is_adapter_only:
        return list(entries.values())
    meta = {names.in_base_model(item.name): torch.empty(item.shape, device="meta") for item in contents.outgoing}
    order = [name for name in revert_weight_conversion(contents.model, meta) if name in entries]
    return [entries.pop(name) for name in order] + list(entries.values())


def _write(outgoing: list[ShardExport], plan: FilePlan, directory: Path, method: str) -> dict[str, int]:
    """Write all slices; return how many values of which tensors were not finite. Collective."""
    non_finite: dict[str, int] = {}
    writer = FileWriter(plan, directory)
    if method == "direct" or distributed.world_size() == 1:
        with distributed.sync_errors():
            try:
                _write_own(outgoing, writer, non_finite)
            except OSError as error:
                raise ExportError(
                    f"{directory.parent}: writing failed: {error.strerror}. Checkpoints are intact."
                ) from error
    else:
        _write_through_main(outgoing, writer, directory, non_finite)
    return non_finite


def _write_own(outgoing: list[ShardExport], writer: FileWriter, non_finite: dict[str, int]) -> None:
    """Write what this rank brings, and show how far it is: the others have as much. No collective."""
    with progress.bar(sum(item.count * item.dtype.itemsize for item in outgoing), EXPORT_TITLE) as shown:
        for name, first, values in _one_ahead(run for item in outgoing for run in _runs(item, non_finite)):
            writer.write(name, first, values)
            shown.update(values.nbytes)
    writer.close()


def _one_ahead(runs: Iterator[Any]) -> Iterator[Any]:
    """Yield runs while a thread gets the next one ready: it computes or reads where the disk is waited for."""

    def produce() -> Any:
        with torch.no_grad():  # which is a thread's own setting
            return next(runs, None)

    with ThreadPoolExecutor(max_workers=1) as producer:
        upcoming = producer.submit(produce)
        while (run := upcoming.result()) is not None:
            upcoming = producer.submit(produce)
            yield run


def _runs(item: ShardExport, non_finite: dict[str, int]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield (stored tensor, first element there, values to write), a chunk at a time."""
    step = max(1, CHUNK_BYTES // max(item.dtype.itemsize, item.held_dtype.itemsize))
    begin, end = item.first, item.first + item.count
    for part in item.parts:
        start, stop = max(begin, part.start), min(end, part.start + part.num_elements)
        for at in range(start, stop, step):
            count = min(step, stop - at)
            values = item.chunk(at - begin, count).to(item.dtype).cpu().contiguous()
            if not _is_finite(values):
                non_finite[part.tensor] = non_finite.get(part.tensor, 0) + int((~torch.isfinite(values)).sum())
            yield part.tensor, at - part.start, values


def _is_finite(values: torch.Tensor) -> bool:
    """Tell whether no value is NaN or infinite; both come through the extremes, which are 30 times as fast to find."""
    if not values.is_floating_point() or not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def _write_through_main(
    outgoing: list[ShardExport], writer: FileWriter, directory: Path, non_finite: dict[str, int]
) -> None:
    """Let rank 0 write what the others send, one chunk at a time. Collective."""
    error: Exception | None = None
    shown = progress.bar(sum(torch.Size(item.shape).numel() * item.dtype.itemsize for item in outgoing), EXPORT_TITLE)
    for item in outgoing:
        runs = _runs(item, non_finite)
        for sender in range(distributed.world_size()):
            while True:
                run = next(runs, None) if distributed.rank() == sender else None
                run = _to_main(run, sender)
                if run is None:
                    break
                if distributed.is_main() and error is None:
                    try:
                        writer.write(*run)
                        shown.update(run[2].nbytes)
                    except OSError as caught:
                        error = caught
    shown.close()
    with distributed.sync_errors():
        try:
            if error is not None:
                raise error
            writer.close()
        except OSError as caught:
            raise ExportError(
                f"{directory.parent}: writing failed: {caught.strerror}. Checkpoints are intact."
            ) from caught


def _to_main(run: tuple[str, int, torch.Tensor] | None, sender: int) -> tuple[str, int, torch.Tensor] | None:
    """Move one run from `sender` to rank 0; every rank learns whether there was one."""
    box: list[Any] = [None if run is None else (run[0], run[1], tuple(run[2].shape), run[2].dtype)]
    dist.broadcast_object_list(box, src=sender)
    if box[0] is None:
        return None
    name, first, shape, dtype = box[0]
    device = _wire_device()
    if sender == 0:
        return run if run is not None else (name, first, torch.empty(0))
    if distributed.rank() == sender and run is not None:
        dist.send(run[2].view(torch.uint8).to(device), dst=0)
    elif distributed.is_main():
        buffer = torch.empty(shape[0] * dtype.itemsize, dtype=torch.uint8, device=device)
        dist.recv(buffer, src=sender)
        return name, first, buffer.cpu().view(dtype)
    return name, first, torch.empty(0)


def _wire_device() -> torch.device:
    backend = dist.get_backend()
    return torch.device("cpu") if "gloo" in backend else torch.device(torch.accelerator.current_accelerator() or "cpu")


def _write_companions(contents: ExportPlan, plan: FilePlan, directory: Path) -> None:
    """Write what stands beside the weights, and check names and shapes against it. Main rank only."""
    index = plan.index()
    if index is not None:
        (directory / f"{contents.pattern.format(suffix='')}.index.json").write_text(index)
    contents.write_companions(directory, plan)
    verify_files.check_headers(directory, plan, contents.is_adapter_only)


def _sync_all(directory: Path) -> None:
    for file in directory.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename the finished directory; an earlier export goes only when the new one has its name. Main rank only."""
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    shutil.rmtree(replaced, ignore_errors=True)
