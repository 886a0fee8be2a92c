"""Writes an export: an adapter, or weights that the ranks gather and write one step at a time."""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_torch_storage_size, split_state_dict_into_shards_factory
from peft import PeftModel
from transformers.utils import logging

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.export import directory, shells
from hf_fsdp_recipes.export.files import FileWriter, OptionalDtype, PathLike, check_finite
from hf_fsdp_recipes.export.sources import Sources, on_meta
from hf_fsdp_recipes.export.steps import Plan, outputs_of
from hf_fsdp_recipes.upstream.torch_internals import StorageWeakRef


def plan_adapter(
    model: PeftModel,
    held: Sources,
    dtype: OptionalDtype,
) -> Callable[..., Path]:
    """Return a function that writes the active adapter, with the arguments of `write_weights`.

    Rank 0 gathers the adapter, and writes it with PEFT's `save_pretrained`.
    """
    metas = {name: source.meta for name, source in held.items()}
    names = sorted({*shells.match_adapter(model, metas).values()})
    is_main = distributed.is_main()

    def write(target: Path) -> None:
        state = {}
        for name in names:
            tensor = held[name].read(0)
            if tensor is not None and is_main:
                state[name] = tensor.to("cpu", on_meta(tensor, dtype).dtype)
        with distributed.agreed():
            if is_main:
                for name, tensor in state.items():
                    check_finite(name, tensor)
                model.save_pretrained(
                    str(target),
                    state_dict=state,
                    selected_adapters=[model.active_adapter],
                )

    return lambda output_dir, _, processor: directory.create(output_dir, write, processor)


def write_weights(
    plan: Plan,
    output_dir: PathLike,
    max_shard_size: int | str,
    processor: Any,
) -> Path:
    """Write the weights, the configs and the files of `processor`, as in `create`. Collective."""
    split = split_state_dict_into_shards_factory(
        plan.outputs,
        # Views of one tensor stay in one file.
        get_storage_id=lambda value: StorageWeakRef(value.untyped_storage()),
        get_storage_size=get_torch_storage_size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    dtype = next(
        value.dtype for value in outputs_of(plan.steps).values() if value.is_floating_point()
    )

    def write(target: Path) -> None:
        _write_files(plan, split.filename_to_tensors, target)
        with distributed.agreed():
            if distributed.is_main():
                directory.write_configs(target, plan.shell, dtype)
                if split.is_sharded:
                    directory.write_index(target, plan.shell, split)

    return directory.create(output_dir, write, processor)


@torch.no_grad()
def _write_files(
    plan: Plan,
    files: Mapping[str, list[str]],
    target: Path,
) -> None:
    """Write all files, given as {file name: names of its tensors}. Collective.

    After an error, the remaining tensors are still gathered but not written.
    """
    own_rank = distributed.rank()
    num_writers = 1
    if distributed.is_distributed():
        # Only the ranks on rank 0's node write: the other nodes may not share this node's disk.
        num_writers = int(os.getenv("LOCAL_WORLD_SIZE", "1"))
    file_writer = FileWriter(target)
    rank_of = {}  # {name of a tensor: the rank that writes it}
    for number, (file, names) in enumerate(files.items()):
        rank = number % num_writers
        rank_of.update(dict.fromkeys(names, rank))
        if rank == own_rank:
            file_writer.begin(file, {name: plan.outputs[name] for name in names})
    turns_of = defaultdict(list)
    for step in plan.steps:
        for rank in {rank_of[name] for name in step.outputs}:
            turns_of[rank].append((rank, step))
    # The ranks take turns, so that all of them write in parallel.
    for rank, step in logging.tqdm(
        [turn for turns in zip_longest(*turns_of.values()) for turn in turns if turn],
        desc="Exporting weights",
        disable=not distributed.is_main(),
    ):
        tensors = {}
        for name in step.inputs:
            # After an error, this rank still helps to gather tensors.
            with file_writer.recording_errors():
                tensors[name] = plan.sources[name].read(rank)
        if rank == own_rank:
            file_writer.submit(partial(step.compute, tensors))
        del tensors  # not needed while the next step is gathered
    with distributed.agreed():
        file_writer.close()
