"""FULL_STATE_DICT as Hugging Face safetensors, written in place by every rank.

A rank's slice of a row-major tensor is one contiguous run of the safetensors file, so every rank writes its
own: no gather, no second copy, disk speed. Where the ranks do not see one storage, slices go to rank 0 a few
megabytes at a time. The directory appears under its final name only when it is complete and checked.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from hf_fsdp_recipes import ranks
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.load import names
from hf_fsdp_recipes.load.conversions import Piece, rows_of_parts
from hf_fsdp_recipes.save import adapters, export_check
from hf_fsdp_recipes.save.slices import Slice, local_slices
from hf_fsdp_recipes.save.tensor_files import FilePlan, FileWriter, create_files, plan_files

CHUNK_BYTES = 8 * 1024 * 1024  # what a rank holds beside its shard while it writes
MODEL_PATTERN = "model{suffix}.safetensors"
Chunk = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class Outgoing:
    """One parameter on its way into the files.

    Attributes:
        piece: this rank's slice.
        parts: the tensors it becomes, as runs of its elements.
        dtype: what is written.
        chunk: returns `count` of this rank's values from `start` on (of the slice), in their final value.
    """

    piece: Slice
    parts: list[Piece]
    dtype: torch.dtype
    chunk: Chunk


def export_model(
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    method: Literal["auto", "direct", "gather"] = "auto",
    tokenizer: Any = None,
    merge_adapter: bool = False,
) -> Path:
    """Write a model, sharded or not, as a directory that `from_pretrained` and vLLM load.

    Collective: every rank must call this, with the same arguments. The model is not changed.

    Args:
        model: FSDP2, FSDP1 or plain; with PEFT adapters only the adapter is written, unless `merge_adapter`.
        output_dir: appears when the export is complete; an earlier export there is replaced then.
        dtype: floating-point dtype to cast to while writing; None keeps the parameters' own.
        max_shard_size: bytes or "5GB", as in `save_pretrained`.
        method: `direct`, every rank writes its slices into shared files; `gather`, rank 0 writes what the
            others send it; `auto` tries whether all ranks see the same storage.
        tokenizer: saved beside the weights, with its chat template.
        merge_adapter: write the base model with the LoRA weights added in.

    Returns:
        `output_dir`.

    Raises:
        ExportError: the same on every rank: no room, no permission, something else in the way, a conversion
            that cannot be written by slices, or a failed check. Nothing is left under the final name.
    """
    final = Path(output_dir)
    temporary = final.with_name(f".{final.name}.incomplete")
    dtype = _as_dtype(dtype)
    is_adapter_only = adapters.has_adapter(model) and not merge_adapter
    with ranks.agreed():
        if ranks.is_main():
            _make_room(final, temporary)
    try:
        method = _choose_method(temporary) if method == "auto" else method
        transformers_model = _transformers_model(model)
        merger = adapters.Merger(model) if merge_adapter else None
        outgoing: list[Outgoing] = []
        plan: FilePlan | None = None
        with ranks.agreed():
            outgoing = _plan_outgoing(model, transformers_model, dtype, is_adapter_only, merger)
            pattern = adapters.ADAPTER_PATTERN if is_adapter_only else MODEL_PATTERN
            plan = plan_files(_in_saved_order(transformers_model, outgoing), max_shard_size, pattern)
            if ranks.is_main():
                create_files(plan, temporary)
        assert plan is not None
        if merger is not None:
            merger.gather()
        non_finite = _write(outgoing, plan, temporary, method)
        with ranks.agreed():
            if ranks.is_main():
                _write_companions(model, transformers_model, temporary, plan, dtype, tokenizer, is_adapter_only)
                export_check.check_directory(temporary, plan, is_adapter_only)
        export_check.warn_non_finite(non_finite)
        with ranks.agreed():
            if ranks.is_main():
                _put_in_place(temporary, final)
    except BaseException:
        if ranks.is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ExportError(f"dtype {dtype!r} is no floating-point dtype. Rule: bfloat16, float16, float32 or None.")
        return found
    return dtype


def _make_room(final: Path, temporary: Path) -> None:
    """Clear the way for a new directory, without touching anything that is not an export. Main rank only."""
    try:
        if final.exists() and not export_check.looks_like_export(final):
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
    token = ranks.broadcast_object(os.urandom(16).hex() if ranks.is_main() else None)
    with ranks.agreed():
        if ranks.is_main():
            probe.write_text(token)
    try:
        is_seen = probe.read_text() == token
    except OSError:
        is_seen = False
    everybody = all(ranks.gather_objects(is_seen))
    if ranks.is_main():
        probe.unlink()
    return "direct" if everybody else "gather"


def _transformers_model(model: torch.nn.Module) -> Any:
    """Find the PreTrainedModel inside FSDP1, torch.compile and PEFT wrappers."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ExportError(
        f"{type(model).__name__} holds no transformers model. Rule: export_model writes PreTrainedModels."
    )


def _plan_outgoing(
    model: torch.nn.Module,
    transformers_model: Any,
    dtype: torch.dtype | None,
    is_adapter_only: bool,
    merger: "adapters.Merger | None",
) -> list[Outgoing]:
    slices = local_slices(model)
    if is_adapter_only:
        stored_names = adapters.stored_names(model, slices)
        return [_outgoing(slices[name], [_whole(slices[name], stored)], dtype) for name, stored in stored_names.items()]
    outgoing = []
    for piece in slices.values():
        if adapters.is_left_out(piece.name):
            continue
        try:
            parts = rows_of_parts(transformers_model, names.in_base_model(piece.name), piece.shape)
        except ValueError as error:
            raise ExportError(
                f"{piece.name}: transformers writes it in a way that cannot be done slice by slice ({error}). Remedy: "
                f"gather it with accelerator.get_state_dict and call save_pretrained."
            ) from error
        outgoing.append(_outgoing(piece, parts, dtype, merger))
    return outgoing


def _whole(piece: Slice, stored: str) -> Piece:
    num_elements = 1
    for size in piece.shape:
        num_elements *= size
    return Piece(stored, piece.shape, 0, num_elements)


def _outgoing(
    piece: Slice, parts: list[Piece], dtype: torch.dtype | None, merger: "adapters.Merger | None" = None
) -> Outgoing:
    target = dtype if dtype is not None and piece.dtype.is_floating_point else piece.dtype

    def chunk(start: int, count: int) -> torch.Tensor:
        values = piece.values[start : start + count]
        return merger.merged(piece, start, values) if merger is not None else values

    return Outgoing(piece, parts, target, chunk)


def _in_saved_order(
    transformers_model: Any, outgoing: list[Outgoing]
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """List what is written in the order of `save_pretrained`, which decides which file a tensor falls into."""
    from transformers.core_model_loading import revert_weight_conversion

    entries = {part.tensor: (part.tensor, part.shape, item.dtype) for item in outgoing for part in item.parts}
    meta = {names.in_base_model(item.piece.name): torch.empty(item.piece.shape, device="meta") for item in outgoing}
    order = [name for name in revert_weight_conversion(transformers_model, meta) if name in entries]
    return [entries.pop(name) for name in order] + list(entries.values())


def _write(outgoing: list[Outgoing], plan: FilePlan, directory: Path, method: str) -> dict[str, int]:
    """Write all slices; return how many values of which tensors were not finite. Collective."""
    non_finite: dict[str, int] = {}
    writer = FileWriter(plan, directory)
    if method == "direct" or ranks.world_size() == 1:
        with ranks.agreed():
            try:
                for item in outgoing:
                    for name, first, values in _runs(item, non_finite):
                        writer.write(name, first, values)
                writer.close()
            except OSError as error:
                raise ExportError(
                    f"{directory.parent}: writing failed: {error.strerror}. Checkpoints are intact."
                ) from error
    else:
        _write_through_main(outgoing, writer, directory, non_finite)
    return non_finite


def _runs(item: Outgoing, non_finite: dict[str, int]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield (stored tensor, first element there, values to write), a chunk at a time."""
    step = max(1, CHUNK_BYTES // max(item.dtype.itemsize, item.piece.dtype.itemsize))
    begin, end = item.piece.first, item.piece.first + item.piece.values.numel()
    for part in item.parts:
        start, stop = max(begin, part.start), min(end, part.start + part.num_elements)
        for at in range(start, stop, step):
            count = min(step, stop - at)
            values = item.chunk(at - begin, count).to(item.dtype).cpu().contiguous()
            if values.is_floating_point() and not torch.isfinite(values).all():
                non_finite[part.tensor] = non_finite.get(part.tensor, 0) + int((~torch.isfinite(values)).sum())
            yield part.tensor, at - part.start, values


def _write_through_main(
    outgoing: list[Outgoing], writer: FileWriter, directory: Path, non_finite: dict[str, int]
) -> None:
    """Let rank 0 write what the others send, one chunk at a time. Collective."""
    error: Exception | None = None
    for item in outgoing:
        runs = _runs(item, non_finite)
        for sender in range(ranks.world_size()):
            while True:
                run = next(runs, None) if ranks.rank() == sender else None
                run = _to_main(run, sender)
                if run is None:
                    break
                if ranks.is_main() and error is None:
                    try:
                        writer.write(*run)
                    except OSError as caught:
                        error = caught
    with ranks.agreed():
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
    if ranks.rank() == sender and run is not None:
        dist.send(run[2].view(torch.uint8).to(device), dst=0)
    elif ranks.is_main():
        buffer = torch.empty(shape[0] * dtype.itemsize, dtype=torch.uint8, device=device)
        dist.recv(buffer, src=sender)
        return name, first, buffer.cpu().view(dtype)
    return name, first, torch.empty(0)


def _wire_device() -> torch.device:
    backend = dist.get_backend()
    return torch.device("cpu") if "gloo" in backend else torch.device(torch.accelerator.current_accelerator() or "cpu")


def _write_companions(
    model: torch.nn.Module,
    transformers_model: Any,
    directory: Path,
    plan: FilePlan,
    dtype: torch.dtype | None,
    tokenizer: Any,
    is_adapter_only: bool,
) -> None:
    """Write what stands beside the weights: index, configs, tokenizer, chat template. Main rank only."""
    index = plan.index()
    if index is not None:
        stem = "adapter_model" if is_adapter_only else "model"
        (directory / f"{stem}.safetensors.index.json").write_text(index)
    if is_adapter_only:
        adapters.save_config(model, directory)
    else:
        _save_config(transformers_model, directory, plan)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    for file in directory.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _save_config(transformers_model: Any, directory: Path, plan: FilePlan) -> None:
    import copy

    config = copy.deepcopy(transformers_model.config)
    written: Mapping[torch.dtype, int] = _bytes_by_dtype(plan)
    config.dtype = max(written, key=lambda dtype: written[dtype])
    config.architectures = [type(transformers_model).__name__.removeprefix("FSDP")]
    config.use_cache = True  # training turns it off; inference wants it
    config.save_pretrained(directory)
    if transformers_model.can_generate():
        transformers_model.generation_config.save_pretrained(directory)


def _bytes_by_dtype(plan: FilePlan) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    for tensor in plan.tensors.values():
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
    return sizes


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
