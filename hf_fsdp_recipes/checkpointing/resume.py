"""What a checkpoint records about its run, and whether another run may continue from it.

A resumed run's position in the data is a number of global batches in a seeded order. It is valid on any number of ranks if
the global batch size stays the same, which `keep_global_batch` ensures.
"""

import json
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import dcp_metadata
from hf_fsdp_recipes.checkpointing.dcp_metadata import TensorFacts
from hf_fsdp_recipes.checkpointing.state import capture
from hf_fsdp_recipes.checkpointing.writer import PARTS
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.parameter_names import is_adapter, without_adapter_name
from hf_fsdp_recipes.patches.transformers import register_resume_checks
from hf_fsdp_recipes.peft_models import active_adapter, find_peft_model

if TYPE_CHECKING:
    from transformers import Trainer, TrainerState, TrainingArguments

PACKAGES = ("hf-fsdp-recipes", "torch", "accelerate", "transformers", "trl", "peft", "datasets")
TEMPLATE_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
PARAMS_FILE = "train_params.yaml"
# Arguments that change neither what is trained nor on what; their changes are not reported.
_UNREPORTED = re.compile(
    r"(output_dir|log|report|run_name|project|trackio|disable_tqdm|save_|enable_jit|push_to_hub|hub_|eval_|per_device_eval"
    r"|do_|load_best|metric_for|greater_is|resume_|restore_|ignore_data|use_cpu|dataloader_(?!drop)|remove_unused|ddp_|fsdp"
    r"|deepspeed|debug|skip_memory|local_rank|include_|prediction_loss|batch_eval|dataset_num_proc|activation_|gradient_check"
    r"|torch_|accelerator_config|parallelism|model_init|load_source|export|merge_adapter|verify|asynchronous|throughput"
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
        params = yaml.safe_load((checkpoint / PARAMS_FILE).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{checkpoint}/{PARAMS_FILE} cannot be read: {error}") from error
    if not isinstance(params, dict):
        raise CheckpointError(f"{checkpoint}/{PARAMS_FILE} is not a mapping of arguments. Use another checkpoint.")
    return params


def _read_run(checkpoint: Path) -> dict[str, Any] | None:
    """Return `train_params.yaml` if this package wrote it."""
    params = read_train_params(checkpoint)
    if params is not None and not {"arguments", "global_batch_size", "world_size"} <= params.keys():
        raise CheckpointError(
            f"{checkpoint}/{PARAMS_FILE} does not describe a run of this package. Use another checkpoint."
        )
    return params


def keep_global_batch(args: "TrainingArguments", checkpoint: Path) -> None:
    """Set gradient accumulation so that the resumed run keeps its global batch size.

    Call it on every rank before building the Trainer; not a collective. Prints what is not restored.

    Raises:
        CheckpointError: this number of ranks cannot keep the global batch size, or 8-bit optimizer states cannot be
            resharded, or a file cannot be read.
    """
    _check_small_files(checkpoint)
    params = _read_run(checkpoint)
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
    params = _read_run(checkpoint) if checkpoint.is_dir() else None
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
    old, new = ({**of["arguments"], **of.get("recipe", {}), **of.get("adapter", {})} for of in (before, now))
    names = [name for name in sorted(old.keys() & new.keys()) if not _UNREPORTED.match(name)]
    return ", ".join(f"{name} {old[name]} -> {new[name]}" for name in names if old[name] != new[name])


def enable_checks() -> None:
    """Compare the checkpoints that Trainer resumes from with the run. Idempotent; not a collective."""
    register_resume_checks(_TrainerChecks())


class _TrainerChecks:
    """Refuses a checkpoint of another model or optimizer on every rank, and reports what else has changed."""

    def check_unsharded(self, trainer: "Trainer", checkpoint: Path) -> None:
        with distributed.sync_errors():
            _check_small_files(checkpoint)
        model: Any = trainer.model
        tensors = {name: TensorFacts(tuple(tensor.shape), None) for name, tensor in model.state_dict().items()}
        peft_model = find_peft_model(model)
        adapter = None if peft_model is None else active_adapter(peft_model)
        tied = getattr(model, "all_tied_weights_keys", None) or {}

        def check() -> None:
            stored = _read_tensors(checkpoint, "model")
            if adapter is None:
                wanted = {name: facts for name, facts in tensors.items() if name in stored or name not in tied}
            else:  # PEFT renames some tensors when it saves them
                stored = {without_adapter_name(name, adapter): facts for name, facts in stored.items()}
                wanted = {
                    without_adapter_name(name, adapter): facts for name, facts in tensors.items() if is_adapter(name)
                }
            _refuse(checkpoint, dcp_metadata.find_mismatch(stored, wanted, compare_names=adapter is None))
            params = _read_run(checkpoint)
            changes = "" if params is None else describe_changes(params, train_params(trainer.args, model))
            if changes:
                print(f"resume: changed since {checkpoint.name}: {changes}", flush=True)

        distributed.run_on_main(check)

    def check_sharded(self, trainer: "Trainer", checkpoint: Path) -> None:
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        if not distributed.run_on_main((checkpoint / PARTS["optimizer"]).is_dir):
            return
        optimizer: Any = trainer.optimizer
        _init_optim_state(optimizer.optimizer)  # a new optimizer has no state to compare
        state = capture(trainer.model, optimizer, trainer.accelerator.state.fsdp_plugin)
        tensors = dcp_metadata.describe_tensors(state["model"])
        own = {value for values in state["optimizer"]["state"].values() for value in values}
        values = set().union(*distributed.gather_objects(own))

        def check() -> None:
            _refuse(checkpoint, dcp_metadata.find_mismatch(_read_tensors(checkpoint, "model"), tensors))
            stored = {name.rpartition(".")[2] for name in _read_tensors(checkpoint, "optimizer", "optimizer.state")}
            if stored != values:
                before = ((_read_run(checkpoint) or {}).get("arguments") or {}).get("optim", "another optimizer")
                raise CheckpointError(
                    f"{checkpoint} was trained with {before}, which keeps {_join(stored)}, but this run's "
                    f"{type(optimizer.optimizer).__name__} keeps {_join(values)}. Set optim to that of the checkpoint, or "
                    f"start a new run from its export."
                )

        distributed.run_on_main(check)


def _read_tensors(checkpoint: Path, part: str, prefix: str | None = None) -> dict[str, TensorFacts]:
    return dcp_metadata.stored_tensors(dcp_metadata.read_dcp_metadata(checkpoint / PARTS[part]), prefix or part)


def _refuse(checkpoint: Path, mismatch: str | None) -> None:
    if mismatch is not None:
        raise CheckpointError(
            f"{checkpoint} {mismatch}. Use the model and adapter settings of the checkpoint's run, or start a new run in "
            f"another output_dir."
        )


def _join(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _check_small_files(checkpoint: Path) -> None:
    """Read the files that Trainer will read on this rank, as it does."""
    from transformers import PreTrainedConfig, TrainerState
    from transformers.trainer_pt_utils import safe_globals

    def load(file: Path) -> Any:
        with safe_globals():
            return torch.load(file, map_location="cpu", weights_only=True)

    readers: dict[str, Any] = dict.fromkeys(("scheduler.pt", "scaler.pt", "rng_state.pth"), load)
    readers |= {f"rng_state_{distributed.rank()}.pth": load, "trainer_state.json": TrainerState.load_from_json}
    for name, read in {**readers, "config.json": PreTrainedConfig.from_json_file}.items():
        try:
            if (checkpoint / name).exists():
                read(checkpoint / name)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"{checkpoint / name} cannot be read: {reason}. Use another checkpoint.") from error
