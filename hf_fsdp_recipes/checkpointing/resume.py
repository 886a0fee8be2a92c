"""Records facts about a run in its checkpoints, and checks whether another run may resume from them.

A checkpoint's position in the data is the number of global batches trained so far, in an order that the seed determines. It is
valid on any number of ranks if the global batch size stays the same, which `keep_global_batch` ensures. Streams record their
position themselves.
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
from hf_fsdp_recipes.checkpointing.layout import PARTS, SCALER_FILE
from hf_fsdp_recipes.checkpointing.run_end import PATIENCE, read_patience
from hf_fsdp_recipes.checkpointing.run_identity import read_run
from hf_fsdp_recipes.checkpointing.run_inputs import checksum_weights, describe_rows
from hf_fsdp_recipes.checkpointing.state import capture
from hf_fsdp_recipes.checkpointing.verification import check_once, check_small_files, read_tensor_file
from hf_fsdp_recipes.environment import package_version
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.parameter_names import is_adapter, without_adapter_name
from hf_fsdp_recipes.patches.transformers import register_resume_check
from hf_fsdp_recipes.peft_models import active_adapter, describe_class, find_peft_model

if TYPE_CHECKING:
    from transformers import Trainer, TrainerState, TrainingArguments

PACKAGES = ("hf-fsdp-recipes", "torch", "accelerate", "transformers", "trl", "peft", "datasets")
TEMPLATE_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
PARAMS_FILE = "train_params.yaml"
FACTS = ("arguments", "recipe", "adapter")  # the parts of PARAMS_FILE that are compared on resume
# On resume, Trainer restores the old values of these arguments together with the optimizer and the scheduler.
_RESTORED = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
# Arguments that do not affect the trained weights; changes to them are not reported.
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


def manifest_facts(args: "TrainingArguments", state: "TrainerState", callbacks: Iterable[object]) -> dict[str, object]:
    """Return the manifest entries that describe the run."""
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    return {
        "world_size": distributed.world_size(),
        "global_batch_size": global_batch_size(args),
        "run": read_run(state),
        "epoch": state.epoch,
        "loss": losses[-1] if losses else None,
        PATIENCE: read_patience(callbacks),
    }


def train_params(args: "TrainingArguments", model: torch.nn.Module | None = None) -> dict[str, Any]:
    """Return what `train_params.yaml` records: the run's arguments, model, template, world size and versions; no secrets."""
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


def _model_facts(model: torch.nn.Module) -> dict[str, object]:
    """Return what an offline export needs: the name of the trained model and an adapter's PEFT config."""
    peft_model = find_peft_model(model)
    base = model if peft_model is None else peft_model.get_base_model()
    facts: dict[str, object] = {"model_name_or_path": getattr(getattr(base, "config", None), "name_or_path", None)}
    if peft_model is not None:
        name = active_adapter(peft_model)
        config = peft_model.peft_config[name].to_dict() | {"auto_mapping": describe_class(base)}
        facts |= {
            "adapter_name": name,
            "base_weights": _checksum_base(base),
            "adapter": json.loads(json.dumps(config, default=_as_plain)),
        }
    return facts


def _checksum_base(base: torch.nn.Module) -> int | None:
    config = getattr(base, "config", None)
    name = getattr(config, "name_or_path", None)
    return checksum_weights(name, getattr(config, "_commit_hash", None)) if name else None


def _as_plain(value: object) -> object:
    return sorted(value) if isinstance(value, set) else str(getattr(value, "value", value))


def read_train_params(checkpoint: Path) -> dict[str, Any] | None:
    """Return the content of a checkpoint's `train_params.yaml`, or None if there is no such file.

    Raises a CheckpointError if the file cannot be read.
    """
    try:
        params = yaml.safe_load((checkpoint / PARAMS_FILE).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{checkpoint}/{PARAMS_FILE} cannot be read: {error}. Use another checkpoint.") from error
    if not isinstance(params, dict):
        raise CheckpointError(f"{checkpoint}/{PARAMS_FILE} is not a mapping of arguments. Use another checkpoint.")
    return params


def _read_batch_facts(checkpoint: Path) -> dict[str, Any] | None:
    """Return the content of a checkpoint's `train_params.yaml`, or None if it does not record the global batch size.

    Only this package records the size.
    """
    params = read_train_params(checkpoint) or {}
    return params if "global_batch_size" in params else None


def keep_global_batch(args: "TrainingArguments", checkpoint: str | os.PathLike[str] | None) -> None:
    """Keep a resumed run's global batch size on a different number of ranks: set `args.gradient_accumulation_steps`.

    Call it on every rank after `load_model` and before building the Trainer; not a collective. Prints a change of
    gradient accumulation, and a note if random states are not restored because the number of ranks changed.

    Args:
        args: the arguments for the Trainer. Only `gradient_accumulation_steps` is changed.
        checkpoint: the checkpoint to resume from, such as the result of `latest_checkpoint`. With None, or with a checkpoint
            that does not record its global batch, nothing changes.

    Raises:
        CheckpointError: on every rank, if no whole number of accumulation steps keeps the global batch size, if 8-bit
            optimizer states would have to be resharded, or if a file cannot be read.
    """
    if checkpoint is None:
        return
    checkpoint = Path(checkpoint)
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
    is_sharded = (checkpoint / PARTS["optimizer"]).is_dir()
    if is_sharded and "8bit" in optimizer and params["world_size"] != distributed.world_size():
        raise CheckpointError(
            f"{checkpoint} holds {optimizer} states of {params['world_size']} ranks, but this run has "
            f"{distributed.world_size()}. 8-bit states cannot be resharded: resume on {params['world_size']} ranks, or "
            f"train with a 32-bit optimizer."
        )


def check_batches(args: "TrainingArguments", checkpoint: Path, starts_over: bool) -> None:
    """Raise a CheckpointError if a resumed run has another global batch size, or 8-bit states of another number of ranks.

    With another global batch size, rows would be skipped or repeated, unless the run starts over at the first row.
    """
    params = _read_batch_facts(checkpoint)
    if params is None:
        return
    _check_optimizer(params, checkpoint)
    if int(params["global_batch_size"]) != global_batch_size(args) and not starts_over:
        raise CheckpointError(
            f"{checkpoint} was trained with {params['global_batch_size']} rows per optimizer step, but this run has "
            f"{global_batch_size(args)}; rows would be skipped or repeated. Set gradient_accumulation_steps, or call "
            f"hf_fsdp_recipes.keep_global_batch before building the Trainer."
        )


def describe_changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the changes between two runs' `train_params` that affect training, such as `seed 42 -> 7`."""
    old, new = ({n: v for part in FACTS for n, v in of.get(part, {}).items()} for of in (before, now))
    names = [name for name in sorted(old.keys() & new.keys()) if not _UNREPORTED.match(name)]
    return ", ".join(f"{name} {old[name]} -> {new[name]}" for name in names if old[name] != new[name])


def enable_checks() -> None:
    """Make Trainer check on resume that the checkpoint fits the run. Idempotent; not a collective."""
    register_resume_check(_check_checkpoint)


def _check_checkpoint(trainer: "Trainer", checkpoint: Path, is_sharded: bool) -> None:
    """Raise a CheckpointError if a checkpoint is damaged or of another model or optimizer; print other changes. Collective."""
    if is_sharded:
        _check_state(trainer, checkpoint)
        return
    check_once(checkpoint)
    with distributed.sync_errors():
        check_small_files(checkpoint)
        _check_scaler(trainer, checkpoint)
        record_rows(trainer)
    model: Any = trainer.model
    if not trainer.is_fsdp_enabled:  # without FSDP, Trainer itself compares the model's tensors when it loads them
        optimizer = trainer.create_optimizer()
        distributed.run_on_main(lambda: _compare_optimizer(checkpoint, optimizer))
        distributed.run_on_main(lambda: _compare_runs(checkpoint, trainer))
        return
    peft_model = find_peft_model(model)
    # PEFT renames some tensors when it saves them, so extra or missing names are ignored below. The adapter's name is removed
    # from tensor names, because only some checkpoints include it in these names.
    rename = functools.partial(without_adapter_name, adapter_name=active_adapter(peft_model)) if peft_model else str
    state = model.named_parameters() if peft_model else model.state_dict().items()
    tensors = {rename(n): TensorFacts(tuple(t.shape), None) for n, t in state if not peft_model or is_adapter(n)}

    def check() -> None:
        stored = {rename(name): facts for name, facts in _read_tensors(checkpoint).items()}
        tied = set(getattr(model, "all_tied_weights_keys", None) or {}) - stored.keys()
        wanted = {name: facts for name, facts in tensors.items() if name not in tied}
        _refuse(checkpoint, find_mismatch(stored, wanted, compare_names=not peft_model))
        _compare_runs(checkpoint, trainer)

    distributed.run_on_main(check)


def _check_scaler(trainer: "Trainer", checkpoint: Path) -> None:
    if (checkpoint / SCALER_FILE).is_file() and trainer.accelerator.scaler is None:
        raise CheckpointError(
            f"{checkpoint} was trained in fp16 and holds a gradient scaler, which this run's precision does not use. Set fp16 "
            f"as in that run, or start a new run from its export."
        )


def _compare_runs(checkpoint: Path, trainer: "Trainer") -> None:
    """Raise a CheckpointError for an adapter of another base model; print what else changed in the run. Rank 0 only."""
    before, now = read_train_params(checkpoint) or {}, train_params(trainer.args, trainer.model)
    weights = [params.get("base_weights") for params in (before, now)]
    if None not in weights and weights[0] != weights[1]:
        names = [params["model_name_or_path"] for params in (before, now)]
        _refuse(checkpoint, f"holds an adapter of {names[0]}, whose weights differ from those of this run's {names[1]}")
    changes = describe_changes(before, now)
    if changes:
        print(f"resume: changed since {checkpoint.name}: {changes}", flush=True)
    old, new = (params.get("arguments", {}) for params in (before, now))
    restored = [name for name in _RESTORED if name in old and old[name] != new.get(name)]
    if restored and (checkpoint / "scheduler.pt").is_file():
        print(
            f"resume: the checkpoint's optimizer and scheduler keep the old {', '.join(restored)}. For new values, start a new "
            f"run from the export.",
            flush=True,
        )


def record_rows(trainer: "Trainer") -> None:
    """Make checkpoints record the number and checksum of the training rows, unless a recipe already does. Not a collective."""
    args: Any = trainer.args
    if not hasattr(args, "recipe_facts"):
        args.recipe_facts = describe_rows(trainer.train_dataset)


def _check_state(trainer: "Trainer", checkpoint: Path) -> None:
    """Refuse a checkpoint whose tensors differ from those that the run would save now. Collective."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    if not distributed.run_on_main((checkpoint / PARTS["optimizer"]).is_dir):
        return
    optimizer: Any = trainer.optimizer
    _init_optim_state(optimizer.optimizer)  # without this, a new optimizer has no state to compare
    state = capture(trainer.model, optimizer, trainer.accelerator.state.fsdp_plugin)
    tensors = describe_tensors(state["model"])
    own = _last_parts(flatten_state_dict({"state": state["optimizer"]["state"]})[0], "state.")
    kept = set().union(*distributed.gather_objects(own))

    def check() -> None:
        _refuse(checkpoint, find_mismatch(_read_tensors(checkpoint), tensors))
        metadata = read_dcp_metadata(checkpoint / PARTS["optimizer"])
        stored = _last_parts(metadata.state_dict_metadata, "optimizer.state.")
        if stored != kept:
            raise _other_optimizer(checkpoint, optimizer.optimizer, f"keeps {_join(stored)}", f"keeps {_join(kept)}")

    distributed.run_on_main(check)


def _compare_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Raise a CheckpointError if the stored state and `optimizer` each have settings that the other lacks.

    Extra settings on one side only are accepted: a new version of an optimizer may add or remove settings.
    """
    if not (checkpoint / "optimizer.pt").is_file():
        return
    state = read_tensor_file(checkpoint / "optimizer.pt", mmap=True)
    stored, own = (set(one["param_groups"][0]) - {"params", "initial_lr"} for one in (state, optimizer.state_dict()))
    if stored - own and own - stored:
        raise _other_optimizer(
            checkpoint, optimizer, f"has the settings {_join(stored - own)}", f"has {_join(own - stored)} instead"
        )


def _other_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer, stored: str, own: str) -> CheckpointError:
    recorded = (read_train_params(checkpoint) or {}).get("arguments", {}).get("optim", "another optimizer")
    return CheckpointError(
        f"{checkpoint} was trained with {recorded}, which {stored}, but this run's {type(optimizer).__name__} {own}. Set optim "
        f"as in that run, or start a new run from its export."
    )


def _read_tensors(checkpoint: Path) -> dict[str, TensorFacts]:
    return stored_tensors(read_dcp_metadata(checkpoint / PARTS["model"]), "model")


def _last_parts(names: Iterable[str], prefix: str) -> set[str]:
    """Return the kinds of per-parameter state, such as exp_avg, from the last parts of an optimizer's tensor names."""
    return {name.rpartition(".")[2] for name in names if name.startswith(prefix)}


def _refuse(checkpoint: Path, mismatch: str | None) -> None:
    if mismatch is not None:
        raise CheckpointError(
            f"{checkpoint} {mismatch}. Use the model and adapter settings of the checkpoint's run, or start a new run in "
            f"another output_dir."
        )


def _join(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
