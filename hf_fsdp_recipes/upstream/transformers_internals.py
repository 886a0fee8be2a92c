"""Names of transformers that are private or not in its documentation, and why each is needed."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping  # how files become weights
from transformers.core_model_loading import (
    WeightConverter,  # makes weights from several tensors of the files
    WeightRenaming,  # renames a tensor of the files
    WeightTransform,  # either of them
    dot_natural_key,  # the order in which a converter expects its tensors
    rename_source_key,  # the weight to which a tensor of the files belongs
    revert_weight_conversion,  # how weights become files again
)
from transformers.dynamic_module_utils import custom_object_save  # copies a model's own code
from transformers.initialization import (
    meta_device_safe_creation_ops,  # lets models on meta read the numbers of a schedule
    no_init_weights,  # builds a model without random numbers
)
from transformers.modeling_utils import (
    _get_resolved_checkpoint_files as resolve_weights,  # which files `from_pretrained` reads
)
from transformers.modeling_utils import (
    local_torch_dtype,  # the dtype in which layers are created
    remove_tied_weights_from_state_dict,  # which name of a tied weight is saved
    str_to_torch_dtype,  # the dtypes of safetensors
)
from transformers.quantizers.auto import (
    AutoHfQuantizer,  # the quantizer for a config
    AutoQuantizationConfig,  # the class of a checkpoint's quantization config
)

from hf_fsdp_recipes.upstream.versions import check, reads

INITIALIZED = "_is_hf_initialized"  # a tensor's: a model's methods do not initialize it again
CONVERSIONS = "_weight_conversions"  # a model's: how files were converted; saving reverts it
ATTENTION = "_attn_implementation"  # a config's: for a message
GET_OUTPUT_DIR = "_get_output_dir"  # a trainer's: returns the directory of a run's checkpoints
PUSH_CHECKPOINT = "_push_from_checkpoint"  # uploads a checkpoint if `hub_strategy` says so
SAVE_CHECKPOINT = "_save_checkpoint"  # saves a checkpoint
RUN_EPOCH = "_run_epoch"  # trains an epoch
INTERNAL_CALL = "_internal_call"  # argument of `save_model`: Trainer saves a checkpoint
EVALUATE = "_evaluate"  # evaluates as in training, with callbacks and scheduler
DETERMINE_BEST = "_determine_best_metric"  # notes the best metric and its step
FINALIZE = "_finalize_training"  # loads the best model after the last epoch
SAVE_RANDOM_STATE = "_save_rng_state"  # writes this rank's random state to a directory
LOAD_RANDOM_STATE = "_load_rng_state"  # restores it, or does nothing if it is not there
# Methods of Trainer that `ShardedCheckpointCallback` calls, or replaces while a trainer trains.
USED = (
    GET_OUTPUT_DIR,
    PUSH_CHECKPOINT,
    SAVE_CHECKPOINT,
    RUN_EPOCH,
    FINALIZE,
    EVALUATE,
    DETERMINE_BEST,
    SAVE_RANDOM_STATE,
    LOAD_RANDOM_STATE,
)


def metrics_of(trainer: Any) -> dict[str, dict]:
    """Return the metrics that TRL's trainers have not logged yet, by "train" and "eval"."""
    return trainer._metrics


def check_trainer() -> None:
    """Raise a PatchError if Trainer lacks a method that `ShardedCheckpointCallback` needs."""
    from transformers import Trainer

    for name in USED:
        check(
            hasattr(Trainer, name),
            "transformers",
            f"Trainer.{name}",
            "load_model and export_model work without it",
        )


def get_builder(model_class: type[PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """Return the method that builds a model. Only auto classes have a public one."""
    return model_class._from_config


def plan_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return {pattern of names: dtype} for the weights that a model keeps in float32."""
    return model._get_dtype_plan(dtype)


def names_not_saved(model: PreTrainedModel) -> set[str]:
    """Return the names that `save_pretrained` leaves out."""
    return set(model._keys_to_ignore_on_save or ())


def find_tied(model: PreTrainedModel) -> dict[str, str]:
    """Return {a tied weight: the weight that is saved}. A model without `post_init` has none."""
    return getattr(model, "all_tied_weights_keys", None) or {}


@torch.no_grad()
def new_value(model: PreTrainedModel, name: str) -> torch.Tensor:
    """Return the values that the model's `_init_weights` gives to a weight that the files lack."""
    path, _, parameter = name.rpartition(".")
    twin = copy.deepcopy(model.get_submodule(path)).to_empty(device="cpu", recurse=False)
    model._init_weights(twin)
    return twin.get_parameter(parameter).detach()


def keep_present_units(model: PreTrainedModel) -> None:
    """Let a model's FSDP units be only classes that it has. Accelerate refuses any others.

    A unit must not hold the embeddings either, because Accelerate shards them again.
    """
    name = "_no_split_modules"
    is_read = reads("accelerate", FullyShardedDataParallelPlugin.set_auto_wrap_policy, name)
    check(is_read, "accelerate", name, "models of from_pretrained work without it")
    wanted = set(model._no_split_modules or ())
    embeddings = model.get_input_embeddings()
    model._no_split_modules = {
        type(module).__name__
        for module in model.modules()
        if type(module).__name__ in wanted and embeddings not in set(module.modules())
    }


def set_conversions(model: PreTrainedModel, conversions: list | None) -> None:
    """Let saving and exporting a model revert these conversions, unless they are None."""
    if conversions is not None:
        is_read = reads("transformers", revert_weight_conversion, CONVERSIONS)
        check(is_read, "transformers", CONVERSIONS, "from_pretrained works without it")
        setattr(model, CONVERSIONS, conversions)
