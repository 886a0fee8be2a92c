"""Collects the files of a checkpoint that are not sharded: random state, scheduler, Trainer's state, arguments, model assets."""

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import layout, resume
from hf_fsdp_recipes.checkpointing.state import random_state

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments


def collect(
    args: "TrainingArguments",
    state: "TrainerState",
    event: Mapping[str, Any],
    random: dict[str, Any],
    rank_files: Mapping[str, str],
    assets: Mapping[str, bytes],
) -> dict[str, Callable[[Path], None]]:
    """Return this rank's small files as they are now: for each name, a function that writes the file to a path.

    `event` holds a callback's keyword arguments. Rank 0 also writes `assets`, the config and tokenizer files.
    """
    name = f"rng_state_{distributed.rank()}.pth" if distributed.world_size() > 1 else "rng_state.pth"
    files = {name: _save_tensors(random or random_state())}
    files |= {name: _save_bytes(text.encode()) for name, text in rank_files.items()}
    if distributed.is_main():
        params = yaml.safe_dump(resume.train_params(args, event["model"]), sort_keys=True)
        trainer_state = json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"
        files |= {name: _save_bytes(content) for name, content in assets.items()}
        files["scheduler.pt"] = _save_tensors(copy.deepcopy(event["lr_scheduler"].state_dict()))
        files[layout.STATE_FILE] = _save_bytes(trainer_state.encode())
        files[resume.PARAMS_FILE] = _save_bytes(params.encode())
    return files


def _save_tensors(value: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path)


def _save_bytes(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write
