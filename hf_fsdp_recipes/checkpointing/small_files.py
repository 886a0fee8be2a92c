"""Collects the files of a checkpoint that are not sharded: random state, scheduler, Trainer's state, arguments, model assets."""

import copy
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import yaml
from transformers.trainer_callback import ExportableState

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import layout, resume
from hf_fsdp_recipes.checkpointing.state import random_state

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments


def collect(
    args: "TrainingArguments",
    state: "TrainerState",
    event: Mapping[str, Any],
    random: dict[str, object],
    rank_files: Mapping[str, str],
    assets: Mapping[str, bytes],
) -> dict[str, bytes]:
    """Return this rank's small files as {file name: current content}.

    `event` holds the keyword arguments of a TrainerCallback method. Files that are the same on all ranks, such as
    `assets` (the model's config and tokenizer files), are returned on rank 0 only.
    """
    name = f"rng_state_{distributed.rank()}.pth" if distributed.world_size() > 1 else "rng_state.pth"
    files = {name: _dump(random or random_state())} | {name: text.encode() for name, text in rank_files.items()}
    if distributed.is_main():
        trainer_state = json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"
        files |= assets
        files["scheduler.pt"] = _dump(event["lr_scheduler"].state_dict())
        scaler = getattr(event["optimizer"], "scaler", None)  # Accelerate's, if the run trains in fp16
        if scaler is not None:
            files[layout.SCALER_FILE] = _dump(scaler.state_dict())
        files[layout.STATE_FILE] = trainer_state.encode()
        files[resume.PARAMS_FILE] = format_params(args, event["model"])
    return files


def export_callbacks(state: "TrainerState", callbacks: Iterable[object]) -> None:
    """Update the callbacks' states in Trainer's state, as Trainer does before it saves."""
    states: dict[str, list[dict[str, object]]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(copy.deepcopy(callback.state()))
    state.stateful_callbacks |= {name: found[0] if len(found) == 1 else found for name, found in states.items()}


def format_params(args: "TrainingArguments", model: torch.nn.Module) -> bytes:
    """Return the content of a run's `train_params.yaml` as bytes."""
    return yaml.safe_dump(resume.train_params(args, model), sort_keys=True).encode()


def _dump(value: object) -> bytes:
    """Return the bytes that `torch.save` writes for a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
