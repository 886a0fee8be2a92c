"""What a checkpoint says about the run that wrote it, and whether another run may go on from it.

The data position of a resumed run is "so many global batches into a seeded order". It holds on any number of
ranks as long as the global batch stays the same; `keep_global_batch` sees to that.
"""

import json
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import CheckpointError

logger = logging.getLogger(__name__)

PACKAGES = ("hf-fsdp-recipes", "torch", "accelerate", "transformers", "trl", "peft", "datasets")
TEMPLATE_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")


def global_batch_size(args: Any) -> int:
    """Return the rows of one optimizer step over all ranks."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * distributed.world_size()


def manifest_facts(args: Any, state: Any) -> dict[str, Any]:
    """Return what the manifest says beside its files."""
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    return {
        "world_size": distributed.world_size(),
        "global_batch_size": global_batch_size(args),
        "epoch": state.epoch,
        "loss": losses[-1] if losses else None,
    }


def train_params(args: Any, model: Any = None) -> dict[str, Any]:
    """Return the run's arguments, model, template, world size and versions, without secrets, ready for YAML."""
    arguments = json.loads(json.dumps(args.to_dict(), default=str))
    template = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("FSDP_", "PARALLELISM_CONFIG_")) or name in TEMPLATE_VARIABLES
    }
    return {
        **_model_facts(model),
        "arguments": {name: value for name, value in arguments.items() if not name.endswith("token")},
        "template": template,
        "world_size": distributed.world_size(),
        "global_batch_size": global_batch_size(args),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _model_facts(model: Any) -> dict[str, Any]:
    """Return which model was trained and, with an adapter, its PEFT config: what an offline export needs."""
    if model is None:
        return {}
    from hf_fsdp_recipes.export import lora_merge

    peft_model = lora_merge.find_peft_model(model)
    base = model if peft_model is None else peft_model.get_base_model()
    facts: dict[str, Any] = {"model_name_or_path": getattr(getattr(base, "config", None), "name_or_path", None)}
    if peft_model is not None:
        name = lora_merge.active_adapter(peft_model)
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
    """Return a checkpoint's `train_params.yaml`, or None where a stock Trainer wrote it."""
    try:
        return yaml.safe_load((checkpoint / "train_params.yaml").read_text())
    except FileNotFoundError:
        return None
    except (OSError, yaml.YAMLError) as error:
        raise CheckpointError(f"{checkpoint}/train_params.yaml cannot be read: {error}") from error


def keep_global_batch(args: Any, checkpoint: Path) -> None:
    """Adjust gradient accumulation so that the resumed run's optimizer steps see as many rows as before.

    Every rank calls this, before the Trainer is built; no collective. Says what is restored and what is not.

    Raises:
        CheckpointError: the global batch of the checkpoint does not divide over these ranks, or its 8-bit
            optimizer states cannot be cut anew.
    """
    params = read_train_params(checkpoint)
    if params is None:
        return
    _check_optimizer(params, checkpoint)
    wanted, num_ranks = int(params["global_batch_size"]), distributed.world_size()
    rows_per_micro_step = args.per_device_train_batch_size * num_ranks
    if wanted % rows_per_micro_step:
        raise CheckpointError(
            f"{checkpoint} was trained with {wanted} rows an optimizer step; {num_ranks} ranks x "
            f"per_device_train_batch_size {args.per_device_train_batch_size} = {rows_per_micro_step} do not divide that. "
            f"Rule: the global batch stays the same, or rows would be skipped or seen twice. Remedy: another "
            f"per_device_train_batch_size."
        )
    accumulation = wanted // rows_per_micro_step
    if accumulation != args.gradient_accumulation_steps:
        distributed.print_main(
            f"resume: gradient_accumulation_steps {args.gradient_accumulation_steps} -> {accumulation}, to keep the global "
            f"batch at {wanted} rows on {num_ranks} ranks (it was {params['world_size']})"
        )
        args.gradient_accumulation_steps = accumulation
    if params["world_size"] != num_ranks:
        distributed.print_main(
            "resume: weights, optimizer, scheduler and data position are restored; random states are not (they belong to "
            "ranks), so dropout and the like differ from an uninterrupted run"
        )


def _check_optimizer(params: dict[str, Any], checkpoint: Path) -> None:
    optimizer = str(params["arguments"].get("optim"))
    if "8bit" in optimizer and params["world_size"] != distributed.world_size():
        raise CheckpointError(
            f"{checkpoint} holds states of {optimizer}, written on {params['world_size']} ranks; this run has "
            f"{distributed.world_size()}. Rule: blocks of 8-bit states belong to the rows of one rank. Remedy: resume on "
            f"{params['world_size']} ranks, or train with a 32-bit optimizer."
        )


def check_data_position(args: Any, state: Any) -> None:
    """Refuse a resumed run whose global batch differs from the checkpoint's, as far as that can be told.

    Raises:
        CheckpointError: rows would be skipped or seen twice.
    """
    checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    params = read_train_params(checkpoint) if checkpoint.is_dir() else None
    if params is not None:
        _check_optimizer(params, checkpoint)
    if params is not None and int(params["global_batch_size"]) != global_batch_size(args):
        raise CheckpointError(
            f"{checkpoint} was trained with {params['global_batch_size']} rows an optimizer step and this run has "
            f"{global_batch_size(args)}. Rule: the same, or rows are skipped or seen twice. Remedy: set "
            f"gradient_accumulation_steps, or let hf_fsdp_recipes.checkpointing.resume.keep_global_batch do it."
        )
