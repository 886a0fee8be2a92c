"""What a checkpoint records about its run, and whether another run may continue from it.

A resumed run's position in the data is a number of global batches in a seeded order. It is valid on any number of ranks if
the global batch size stays the same, which `keep_global_batch` ensures.
"""

import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.peft_models import active_adapter, find_peft_model

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments

PACKAGES = ("hf-fsdp-recipes", "torch", "accelerate", "transformers", "trl", "peft", "datasets")
TEMPLATE_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
PARAMS_FILE = "train_params.yaml"


def global_batch_size(args: "TrainingArguments") -> int:
    """Return the number of rows in one optimizer step on all ranks."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * distributed.world_size()


def manifest_facts(args: "TrainingArguments", state: "TrainerState") -> dict[str, Any]:
    """Return the manifest entries that describe the run."""
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    return {
        "world_size": distributed.world_size(),
        "global_batch_size": global_batch_size(args),
        "epoch": state.epoch,
        "loss": losses[-1] if losses else None,
    }


def train_params(args: "TrainingArguments", model: torch.nn.Module | None = None) -> dict[str, Any]:
    """Return the run's arguments, model, template, world size and versions, without secrets, ready for YAML."""
    arguments = json.loads(json.dumps(args.to_dict(), default=str))
    template = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("FSDP_", "PARALLELISM_CONFIG_")) or name in TEMPLATE_VARIABLES
    }
    return {
        **(_model_facts(model) if model is not None else {}),
        "arguments": {name: value for name, value in arguments.items() if not name.endswith("token")},
        "template": template,
        "world_size": distributed.world_size(),
        "global_batch_size": global_batch_size(args),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _model_facts(model: torch.nn.Module) -> dict[str, Any]:
    """Return what an offline export needs: the name of the trained model and an adapter's PEFT config."""
    peft_model = find_peft_model(model)
    base = model if peft_model is None else peft_model.get_base_model()
    facts: dict[str, Any] = {"model_name_or_path": getattr(getattr(base, "config", None), "name_or_path", None)}
    if peft_model is not None:
        name = active_adapter(peft_model)
        config = peft_model.peft_config[name].to_dict()
        facts |= {"adapter_name": name, "adapter": json.loads(json.dumps(config, default=_as_plain))}
    return facts


def _as_plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(getattr(value, "value", value))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_train_params(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's `train_params.yaml`, or None if a stock Trainer wrote the checkpoint.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return yaml.safe_load((checkpoint / PARAMS_FILE).read_text())
    except FileNotFoundError:
        return None
    except (OSError, yaml.YAMLError) as error:
        raise CheckpointError(f"{checkpoint}/{PARAMS_FILE} cannot be read: {error}") from error


def keep_global_batch(args: "TrainingArguments", checkpoint: Path) -> None:
    """Set gradient accumulation so that the resumed run keeps its global batch size.

    Call it on every rank before building the Trainer; not a collective. Prints what is not restored.

    Raises:
        CheckpointError: this number of ranks cannot keep the global batch size, or 8-bit optimizer states cannot be
            resharded.
    """
    params = read_train_params(checkpoint)
    if params is None:
        return
    _check_optimizer(params, checkpoint)
    wanted, num_ranks = int(params["global_batch_size"]), distributed.world_size()
    rows_per_micro_step = args.per_device_train_batch_size * num_ranks
    if wanted % rows_per_micro_step:
        raise CheckpointError(
            f"{checkpoint} was trained with {wanted} rows per optimizer step, which is not a multiple of "
            f"{rows_per_micro_step} ({num_ranks} ranks x per_device_train_batch_size {args.per_device_train_batch_size}). "
            f"Choose another per_device_train_batch_size."
        )
    accumulation = wanted // rows_per_micro_step
    if accumulation != args.gradient_accumulation_steps:
        distributed.print_main(
            f"resume: gradient_accumulation_steps {args.gradient_accumulation_steps} -> {accumulation}, which keeps the global "
            f"batch at {wanted} rows on {num_ranks} ranks (before: {params['world_size']})"
        )
        args.gradient_accumulation_steps = accumulation
    if params["world_size"] != num_ranks:
        distributed.print_main(
            "resume: the number of ranks changed, so random states are not restored; dropout will differ from an uninterrupted "
            "run"
        )


def _check_optimizer(params: dict[str, Any], checkpoint: Path) -> None:
    optimizer = str(params["arguments"].get("optim"))
    if "8bit" in optimizer and params["world_size"] != distributed.world_size():
        raise CheckpointError(
            f"{checkpoint} holds {optimizer} states of {params['world_size']} ranks, but this run has "
            f"{distributed.world_size()}. 8-bit states cannot be resharded: resume on {params['world_size']} ranks, or "
            f"train with a 32-bit optimizer."
        )


def check_data_position(args: "TrainingArguments", state: "TrainerState") -> None:
    """Check that a resumed run has the checkpoint's global batch size.

    Raises:
        CheckpointError: it does not, so rows would be skipped or repeated.
    """
    checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    params = read_train_params(checkpoint) if checkpoint.is_dir() else None
    if params is None:
        return
    _check_optimizer(params, checkpoint)
    if int(params["global_batch_size"]) != global_batch_size(args):
        raise CheckpointError(
            f"{checkpoint} was trained with {params['global_batch_size']} rows per optimizer step, but this run has "
            f"{global_batch_size(args)}; rows would be skipped or repeated. Set gradient_accumulation_steps, or call "
            f"hf_fsdp_recipes.checkpointing.resume.keep_global_batch before building the Trainer."
        )
