"""Exports a model during training, or a checkpoint, to a directory that `from_pretrained` and vLLM can load.

Every file is written by a single rank, so two nodes never write to the same page of a file. The ranks gather one parameter
at a time: they send their shards to the rank that writes the file with this parameter.
"""

import contextlib
import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from peft import PeftConfig, PeftModel
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing.directory import list_checkpoints
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export import directory, merge, shells, sources
from hf_fsdp_recipes.export.files import FileWriter, check_finite
from hf_fsdp_recipes.export.sources import Source, on_meta
from hf_fsdp_recipes.export.steps import Plan, Step, Tensors, copy_step, plan_in_file_format
from hf_fsdp_recipes.loading.checkpoint import Checkpoint
from hf_fsdp_recipes.upstream.torch_internals import StorageWeakRef
from hf_fsdp_recipes.upstream.transformers_internals import (
    NOT_SAVED,
    remove_tied_weights_from_state_dict,
)

MODEL_FOLDER = (
    "pytorch_model_fsdp_0"  # Accelerate's name for the folder of sharded weights in a checkpoint
)
PathLike = str | os.PathLike[str]


def export_model(
    model: torch.nn.Module,
    output_dir: PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: PreTrainedTokenizerBase | None = None,
    merge_adapter: bool = False,
) -> Path:
    """Write a model, which may be sharded with FSDP2. Collective: every rank calls this with the same arguments.

    Args:
        model: a transformers model or a PeftModel. For a PeftModel, only the adapter is written, unless `merge_adapter` is set.
        output_dir: the directory to create. If it exists, `<output_dir>-1` or the next free name is used instead.
        dtype: floating-point dtype of the weights in the files. None keeps the dtype of each parameter.
        max_shard_size: maximum size of a file, as in `save_pretrained`.
        tokenizer: the tokenizer to save next to the weights.
        merge_adapter: write the base model with the adapter merged in. If the base is quantized, its original files are read.

    Returns:
        The export's directory.

    Raises:
        ExportError: on every rank. The model cannot be exported, and no files are left behind.
    """

    save_tokenizer = (lambda target: None) if tokenizer is None else tokenizer.save_pretrained
    output_dir, dtype = Path(output_dir), parse_dtype(dtype)
    is_adapted = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    held = sources.from_model(model, None if is_adapted else dtype)
    if is_adapted and not merge_adapter:
        return _export_adapter(model, held, output_dir, dtype, save_tokenizer)
    with distributed.agreed():
        base = model.get_base_model() if is_adapted else model
        shell = shells.copy_on_meta(base)
        if not is_adapted:
            plan = _plan_full(shell, model, held, dtype)
        else:
            adapter = model.active_adapter
            adapted = (shell, *shells.adapt(shell, model.peft_config[adapter], adapter))
            if getattr(base, "quantization_method", None) is None:
                plan = merge.plan_merge(*adapted, held, dtype)
            else:
                plan = merge.plan_merge_into_files(*adapted, held, base.config.name_or_path, dtype)
    return _export_weights(plan, shell, output_dir, max_shard_size, save_tokenizer)


def export_checkpoint(
    checkpoint_dir: PathLike,
    output_dir: PathLike,
    *,
    base_model: PathLike | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    merge_adapter: bool = False,
) -> Path:
    """Export a sharded checkpoint or an exported adapter, one tensor at a time. This needs only one process and no GPU.

    Args:
        checkpoint_dir: a checkpoint that has the folder `pytorch_model_fsdp_0`, or the directory of an exported adapter.
        output_dir: as in `export_model`.
        base_model: directory or Hub id of the model that gives the config and, for a merge, the weights. None uses the
            base model in the checkpoint's `adapter_config.json` or, without an adapter, the checkpoint's own config.
        dtype: as in `export_model`.
        max_shard_size: as in `export_model`.
        merge_adapter: write the base model with the adapter merged in, instead of the adapter alone.

    Returns:
        The export's directory.

    Raises:
        ExportError: the checkpoint is damaged or does not fit the model, or the export cannot be written. Nothing is left behind.
    """
    checkpoint, output_dir, dtype = Path(checkpoint_dir), Path(output_dir), parse_dtype(dtype)
    if not checkpoint.is_dir():
        raise ExportError(
            f"{checkpoint} is no directory. `hf-fsdp checkpoints {checkpoint.parent}` lists a run's."
        )
    if found := list_checkpoints(checkpoint):
        raise ExportError(
            f"{checkpoint} is the directory of a run. Export one of its checkpoints, such as {found[0]}."
        )
    sharded = next(
        (
            path
            for path in (checkpoint / MODEL_FOLDER, checkpoint)
            if (path / ".metadata").is_file()
        ),
        None,
    )
    held = (
        sources.from_files(Checkpoint(checkpoint))
        if sharded is None
        else sources.from_checkpoint(sharded)
    )
    has_adapter = (checkpoint / "adapter_config.json").is_file()
    config = PeftConfig.from_pretrained(os.fspath(checkpoint)) if has_adapter else None
    if config is None and any(".lora_" in name for name in held):
        raise ExportError(
            f"{checkpoint} has no adapter_config.json. Copy it there from the run's export."
        )
    name = base_model or (config.base_model_name_or_path if config is not None else checkpoint)
    shell, save_tokenizer = (
        shells.load_on_meta(name),
        functools.partial(_save_tokenizer_of, [checkpoint, name]),
    )
    if config is None:
        plan = _plan_full(shell, shell, held, dtype)
        return _export_weights(plan, shell, output_dir, max_shard_size, save_tokenizer)
    adapted, base_names = shells.adapt(shell, config, "default")
    stored = shells.match_adapter(adapted, adapted.state_dict(), "default")
    if differing := sorted(stored.keys() ^ held.keys()):
        raise ExportError(
            f"{checkpoint} does not fit its adapter_config.json and {name}: {differing[:3]}."
        )
    held = {stored[key]: source for key, source in held.items()}
    if not merge_adapter:
        return _export_adapter(adapted, held, output_dir, dtype, save_tokenizer)
    plan = merge.plan_merge_into_files(shell, adapted, base_names, held, name, dtype)
    return _export_weights(plan, shell, output_dir, max_shard_size, save_tokenizer)


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return `dtype` as a torch.dtype or None. Raise an ExportError if it is no floating-point dtype. Not a collective."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ExportError(
            f"{dtype!r} is no floating-point dtype. Use float32, bfloat16 or float16."
        )
    return found


def _save_tokenizer_of(names: list[PathLike], target: Path) -> None:
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            AutoTokenizer.from_pretrained(name).save_pretrained(target)
            return


def _plan_full(
    shell: PreTrainedModel,
    owner: PreTrainedModel,
    held: Mapping[str, Source],
    dtype: torch.dtype | None,
) -> Plan:
    """Return a plan that writes all weights of a model. `owner` knows which weights are tied, and may be `shell` itself."""
    ignored = set(getattr(shell, NOT_SAVED) or ())
    state = {name: value for name, value in shell.state_dict().items() if name not in ignored}
    kept = remove_tied_weights_from_state_dict(dict(state), owner)
    wrong = [name for name in kept if name not in held or held[name].meta.shape != kept[name].shape]
    if wrong := wrong + sorted(held.keys() - state.keys() - ignored):
        raise ExportError(
            f"the weights do not fit the config of {type(shell).__name__}: {wrong[:3]}."
        )
    steps = [
        copy_step(name, on_meta(held[name].meta.shape, held[name].meta.dtype, dtype), name)
        for name in kept
    ]
    return plan_in_file_format(shell, kept, steps, held)


def _export_adapter(
    model: PeftModel,
    held: Mapping[str, Source],
    output_dir: Path,
    dtype: torch.dtype | None,
    save_tokenizer: Callable[[Path], None],
) -> Path:
    """Gather the adapter on rank 0. Rank 0 writes the adapter with PEFT's own `save_pretrained`. Collective."""
    adapter = model.active_adapter
    with distributed.agreed():
        stored = shells.match_adapter(
            model, {name: source.meta for name, source in held.items()}, adapter
        )
    names = distributed.from_main(sorted(set(stored.values())))

    def write(target: Path) -> None:
        state = {}
        for name in names:
            source = held[name]
            is_needed = source.is_collective or distributed.is_main()
            tensor = (
                source.read(0, torch.empty(source.meta.nbytes, dtype=torch.uint8))
                if is_needed
                else None
            )
            if tensor is not None and distributed.is_main():
                state[name] = tensor.to("cpu", dtype if tensor.is_floating_point() else None)
        with distributed.agreed():
            if distributed.is_main():
                for name, tensor in state.items():
                    check_finite(name, tensor)
                model.save_pretrained(
                    os.fspath(target), state_dict=state, selected_adapters=[adapter]
                )
                save_tokenizer(target)

    return directory.create(output_dir, write)


def _export_weights(
    plan: Plan,
    shell: PreTrainedModel,
    output_dir: Path,
    max_shard_size: int | str,
    save_tokenizer: Callable[[Path], None],
) -> Path:
    """Write the weights, the configs and the tokenizer. Collective."""
    split = split_state_dict_into_shards_factory(
        plan.outputs,
        get_storage_id=lambda value: StorageWeakRef(
            value.untyped_storage()
        ),  # views of one tensor stay in one file
        get_storage_size=lambda value: value.untyped_storage().nbytes(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    files = {
        file: {name: plan.outputs[name] for name in names}
        for file, names in split.filename_to_tensors.items()
    }
    dtype = next(value.dtype for value in plan.outputs.values() if value.is_floating_point())

    def write(target: Path) -> None:
        _write_files(plan, files, target)
        with distributed.agreed():
            if distributed.is_main():
                directory.write_configs(target, shell, dtype)
                if split.is_sharded:
                    directory.write_index(target, shell, split)
                save_tokenizer(target)

    return directory.create(output_dir, write)


@torch.no_grad()
def _write_files(plan: Plan, files: Mapping[str, Tensors], target: Path) -> None:
    """Write all files. Collective. After an error, the remaining tensors are still gathered but not written."""
    # Only the ranks on rank 0's node write, because the other nodes may not share this node's disk.
    num_writers = (
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if distributed.is_distributed() else 1
    )
    rank_of = {file: number % num_writers for number, file in enumerate(files)}
    own = {file: tensors for file, tensors in files.items() if rank_of[file] == distributed.rank()}
    file_writer = FileWriter(target, own)
    # One half of this memory is filled while the other half is written. The kernel would clear new memory first, which is slow.
    sizes = {
        name: -(-source.meta.nbytes // 64) * 64 for name, source in plan.sources.items()
    }  # aligned
    largest = max(sum(sizes[name] for name in step.inputs) for step in plan.steps)
    memories = itertools.cycle(torch.empty(2, largest, dtype=torch.uint8))
    turns = _in_turns(
        plan.steps, {name: rank_of[file] for file, names in files.items() for name in names}
    )
    for rank, step in logging.tqdm(
        turns, desc="Exporting weights", disable=not distributed.is_main()
    ):
        tensors, memory = {}, next(memories) if rank == distributed.rank() else torch.empty(0)
        for name in step.inputs:
            source = plan.sources[name]
            with (
                file_writer.recording_errors()
            ):  # after an error, this rank still helps to gather tensors
                if source.is_collective or rank == distributed.rank():
                    tensors[name] = source.read(rank, memory)
            memory = memory[sizes[name] :]
        if rank == distributed.rank():
            file_writer.submit(functools.partial(step.compute, tensors))
        del tensors
    with distributed.agreed():
        file_writer.close()


def _in_turns(steps: list[Step], rank_of: Mapping[str, int]) -> list[tuple[int, Step]]:
    """Return (rank, step) pairs: which rank writes which step. They are sorted so that all ranks write in parallel."""
    turns: list[tuple[int, int, int, Step]] = []
    written = Counter[
        int
    ]()  # {rank: bytes of its turns so far}; the turns are sorted by these bytes
    for step in steps:
        for rank in dict.fromkeys(rank_of[name] for name in step.outputs):
            turns.append((written[rank], len(turns), rank, step))
            written[rank] += sum(
                value.nbytes for name, value in step.outputs.items() if rank_of[name] == rank
            )
    return [(rank, step) for *_, rank, step in sorted(turns, key=lambda turn: turn[:2])]
