"""What a checkpoint records about its run, and whether another run may continue from it.

A resumed run's position in the data is a number of global batches in a seeded order. It is valid on any number of ranks if
the global batch size stays the same, which `keep_global_batch` ensures.
"""

import functools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing.dcp_metadata import (
    TensorFacts,
    describe_tensors,
    find_mismatch,
    read_dcp_metadata,
    stored_tensors,
)
from hf_fsdp_recipes.checkpointing.layout import PARTS
from hf_fsdp_recipes.checkpointing.state import capture
from hf_fsdp_recipes.environment import package_version
from hf_fsdp_recipes.errors import CheckpointError, summarize
from hf_fsdp_recipes.parameter_names import is_adapter, without_adapter_name
from hf_fsdp_recipes.patches.transformers import register_resume_check
from hf_fsdp_recipes.peft_models import active_adapter, find_peft_model

if TYPE_CHECKING:
    from transformers import Trainer, TrainerState, TrainingArguments

PACKAGES = ("hf-fsdp-recipes", "torch", "accelerate", "transformers", "trl", "peft", "datasets")
TEMPLATE_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
PARAMS_FILE = "train_params.yaml"
FACTS = ("arguments", "recipe", "adapter")  # the parts of PARAMS_FILE that are compared on resume
# Arguments that do not affect the trained weights; their changes are not reported.
_UNREPORTED = re.compile(
    r"(output_dir|log|report|run_name|project|trackio|disable_tqdm|save_|enable_jit|push_to_hub|hub_|eval_|per_device_eval"
    r"|do_|load_best|metric_for|greater_is|resume_|restore_|ignore_data|use_cpu|dataloader_(?!drop)|remove_unused|ddp_|fsdp"
    r"|deepspeed|debug|skip_memory|local_rank|include_|prediction_loss|batch_eval|dataset_num_proc|activation_|gradient_check"
    r"|torch_|accelerator_config|parallelism|model_init|load_source|checkpoint_mirror|export|merge_adapter|verify|asynchronous|throughput"
    r"|dry_run|auto_mapping|inference_mode|base_model_name|peft_)"
)


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
        "recipe": getattr(args, "recipe_facts", {}),
        "template": template,
        "world_size": distributed.world_size(),
        "global_batch_size": global_batch_size(args),
        "versions": {name: found for name in PACKAGES if (found := package_version(name))},
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


def read_train_params(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's `train_params.yaml`, or None if a stock Trainer wrote the checkpoint.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        params = yaml.safe_load((checkpoint / PARAMS_FILE).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{checkpoint}/{PARAMS_FILE} cannot be read: {error}") from error
    if not isinstance(params, dict):
        raise CheckpointError(f"{checkpoint}/{PARAMS_FILE} is not a mapping of arguments. Use another checkpoint.")
    return params


def _read_batch_facts(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's `train_params.yaml` if it tells the batch size; another program's may not."""
    params = read_train_params(checkpoint)
    if params is None or "global_batch_size" not in params:
        return None
    required: dict[str, type] = {"arguments": dict, "global_batch_size": int, "world_size": int}
    for name, kind in required.items():
        if not isinstance(params.get(name), kind):
            raise CheckpointError(
                f"{checkpoint}/{PARAMS_FILE} is damaged: {name} is {params.get(name)!r:.80}. Use another checkpoint."
            )
    return params


def keep_global_batch(args: "TrainingArguments", checkpoint: Path) -> None:
    """Set gradient accumulation so that the resumed run keeps its global batch size.

    Call it on every rank before building the Trainer; not a collective. Prints what is not restored.

    Raises:
        CheckpointError: this number of ranks cannot keep the global batch size, or 8-bit optimizer states cannot be
            resharded, or a file cannot be read.
    """
    check_small_files(checkpoint)
    params = _read_batch_facts(checkpoint)
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
    params = _read_batch_facts(checkpoint) if checkpoint.is_dir() else None
    if params is None:
        return
    _check_optimizer(params, checkpoint)
    if int(params["global_batch_size"]) != global_batch_size(args):
        raise CheckpointError(
            f"{checkpoint} was trained with {params['global_batch_size']} rows per optimizer step, but this run has "
            f"{global_batch_size(args)}; rows would be skipped or repeated. Set gradient_accumulation_steps, or call "
            f"hf_fsdp_recipes.checkpointing.resume.keep_global_batch before building the Trainer."
        )


def describe_changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return which arguments that affect training differ between two runs' `train_params`, such as `seed 42 -> 7`."""
    old, new = ({n: v for part in FACTS for n, v in of.get(part, {}).items()} for of in (before, now))
    names = [name for name in sorted(old.keys() & new.keys()) if not _UNREPORTED.match(name)]
    return ", ".join(f"{name} {old[name]} -> {new[name]}" for name in names if old[name] != new[name])


def enable_checks() -> None:
    """Compare the checkpoints that Trainer resumes from with the run. Idempotent; not a collective."""
    register_resume_check(_check_checkpoint)


def _check_checkpoint(trainer: "Trainer", checkpoint: Path, is_sharded: bool) -> None:
    """Refuse a checkpoint of another model or optimizer, and report what else has changed. Collective."""
    if is_sharded:
        _check_state(trainer, checkpoint)
        return
    with distributed.sync_errors():
        check_small_files(checkpoint)
    model: Any = trainer.model
    peft_model = find_peft_model(model)
    # PEFT renames some tensors when it saves them; the adapter's name is not in every checkpoint.
    rename = functools.partial(without_adapter_name, adapter_name=active_adapter(peft_model)) if peft_model else str
    state = model.named_parameters() if peft_model else model.state_dict().items()
    tensors = {rename(n): TensorFacts(tuple(t.shape), None) for n, t in state if not peft_model or is_adapter(n)}

    def check() -> None:
        stored = {rename(name): facts for name, facts in _read_tensors(checkpoint).items()}
        tied = set(getattr(model, "all_tied_weights_keys", None) or {}) - stored.keys()
        wanted = {name: facts for name, facts in tensors.items() if name not in tied}
        _refuse(checkpoint, find_mismatch(stored, wanted, compare_names=not peft_model))
        changes = describe_changes(read_train_params(checkpoint) or {}, train_params(trainer.args, model))
        if changes:
            print(f"resume: changed since {checkpoint.name}: {changes}", flush=True)

    distributed.run_on_main(check)


def _check_state(trainer: "Trainer", checkpoint: Path) -> None:
    """Compare the checkpoint with what would be saved now. Collective."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    if not distributed.run_on_main((checkpoint / PARTS["optimizer"]).is_dir):
        return
    optimizer: Any = trainer.optimizer
    _init_optim_state(optimizer.optimizer)  # a new optimizer has no state to compare
    state = capture(trainer.model, optimizer, trainer.accelerator.state.fsdp_plugin)
    tensors = describe_tensors(state["model"])
    own = _last_parts(flatten_state_dict({"state": state["optimizer"]["state"]})[0], "state.")
    kept = set().union(*distributed.gather_objects(own))

    def check() -> None:
        _refuse(checkpoint, find_mismatch(_read_tensors(checkpoint), tensors))
        metadata = read_dcp_metadata(checkpoint / PARTS["optimizer"])
        stored = _last_parts(metadata.state_dict_metadata, "optimizer.state.")
        if stored != kept:
            recorded = (read_train_params(checkpoint) or {}).get("arguments", {}).get("optim", "another optimizer")
            raise CheckpointError(
                f"{checkpoint} was trained with {recorded}, which keeps {_join(stored)}, but this run's "
                f"{type(optimizer.optimizer).__name__} keeps {_join(kept)}. Set optim as in that run, or start a "
                f"new run from its export."
            )

    distributed.run_on_main(check)


def _read_tensors(checkpoint: Path) -> dict[str, TensorFacts]:
    return stored_tensors(read_dcp_metadata(checkpoint / PARTS["model"]), "model")


def _last_parts(names: Iterable[str], prefix: str) -> set[str]:
    """Return the kinds of per-parameter state, such as exp_avg, among the names of an optimizer's values."""
    return {name.rpartition(".")[2] for name in names if name.startswith(prefix)}


def _refuse(checkpoint: Path, mismatch: str | None) -> None:
    if mismatch is not None:
        raise CheckpointError(
            f"{checkpoint} {mismatch}. Use the model and adapter settings of the checkpoint's run, or start a new run in "
            f"another output_dir."
        )


def _join(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def check_small_files(checkpoint: Path) -> None:
    """Read the small files that Trainer will read on this rank. Not a collective.

    Raises:
        CheckpointError: one cannot be read, or contains objects other than plain data.
    """
    from transformers import PreTrainedConfig, TrainerState
    from transformers.trainer_pt_utils import safe_globals

    tensors = ("scheduler.pt", "scaler.pt", "rng_state.pth", f"rng_state_{distributed.rank()}.pth")
    readers: dict[str, Any] = dict.fromkeys(
        tensors, functools.partial(torch.load, map_location="cpu", weights_only=True)
    )
    readers |= {"trainer_state.json": TrainerState.load_from_json, "config.json": PreTrainedConfig.from_json_file}
    for name, read in readers.items():
        try:
            if (checkpoint / name).exists():
                with safe_globals():
                    read(checkpoint / name)
        except Exception as error:
            raise CheckpointError(
                f"{checkpoint / name} cannot be read: {summarize(error, 'line')}. Use another checkpoint."
            ) from error
