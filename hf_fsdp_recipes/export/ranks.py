"""Divides the files of an export among the ranks, which gather and write one step at a time."""

import functools
import itertools
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers.utils import logging

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.export.files import FileWriter, Tensors
from hf_fsdp_recipes.export.steps import Plan, Step

ALIGNMENT = 64  # bytes


@torch.no_grad()
def write_files(plan: Plan, files: Mapping[str, list[str]], target: Path) -> None:
    """Write all files, given as {file name: names of its tensors}. Collective.

    After an error, the remaining tensors are still gathered but not written.
    """
    num_writers = _num_writers()
    own_files: dict[str, Tensors] = {}
    rank_of: dict[str, int] = {}
    for number, (file, names) in enumerate(files.items()):
        writer = number % num_writers
        rank_of.update(dict.fromkeys(names, writer))
        if writer == distributed.rank():
            own_files[file] = {name: plan.outputs[name] for name in names}
    file_writer = FileWriter(target, own_files)
    sizes = {}
    for name, source in plan.sources.items():
        sizes[name] = (source.meta.nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    # One half of this memory is filled while the other half is written. The kernel would clear new
    # memory first, which is slow.
    largest = max(sum(sizes[name] for name in step.inputs) for step in plan.steps)
    halves = itertools.cycle(torch.empty(2, largest, dtype=torch.uint8))
    memory = next(halves)
    turns = _in_turns(plan.steps, rank_of)
    is_silent = not distributed.is_main()
    for writer, step in logging.tqdm(turns, desc="Exporting weights", disable=is_silent):
        is_writer = writer == distributed.rank()
        tensors = {}
        start = 0
        for name in step.inputs:
            source = plan.sources[name]
            # After an error, this rank still helps to gather tensors.
            with file_writer.recording_errors():
                if source.is_collective or is_writer:
                    tensors[name] = source.read(writer, memory[start:])
            start += sizes[name]
        if is_writer:
            file_writer.submit(functools.partial(step.compute, tensors))
            memory = next(halves)
        del tensors  # not needed while the next step is gathered
    with distributed.agreed():
        file_writer.close()


def _num_writers() -> int:
    """Return the number of ranks on rank 0's node. Other nodes may not share this node's disk."""
    if not distributed.is_distributed():
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _in_turns(steps: list[Step], rank_of: Mapping[str, int]) -> list[tuple[int, Step]]:
    """Return (rank, step) pairs: which rank writes which step.

    They are sorted so that all ranks write in parallel. `rank_of` maps outputs to ranks.
    """
    written_bytes: dict[int, int] = defaultdict(int)  # {rank: bytes of its turns so far}
    turns = []
    for step in steps:
        step_bytes: dict[int, int] = defaultdict(int)
        for name, value in step.outputs.items():
            step_bytes[rank_of[name]] += value.nbytes
        for rank, num_bytes in step_bytes.items():
            turns.append((written_bytes[rank], rank, step))
            written_bytes[rank] += num_bytes
    turns.sort(key=lambda turn: turn[0])
    return [(rank, step) for _, rank, step in turns]
