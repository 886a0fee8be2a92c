"""Builds a job's model on the meta device, with the job's attention, adapter and gradient checkpointing."""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

import torch

from hf_fsdp_recipes.errors import LoadError, PlanError, summarize
from hf_fsdp_recipes.loading.bnb_4bit import check_experts
from hf_fsdp_recipes.loading.build_on_meta import build_on_meta
from hf_fsdp_recipes.model_class import choose_class, task_type_of
from hf_fsdp_recipes.tools.planner.training_job import TrainingJob

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

MetaModel = Union["PreTrainedModel", "PeftModel"]
PACKED_ITEM_BYTES = 0.5  # bytes of a 4-bit value


@dataclass(frozen=True)
class Parameter:
    """One parameter as FSDP shards and gathers it."""

    name: str
    requires_grad: bool
    num_elements: int  # elements of the unsharded parameter
    num_padded_elements: int  # num_elements plus FSDP2's padding
    num_shard_elements: float  # padded elements per rank
    sharded_item_bytes: float  # per element in the shard: 4 for fp32 masters, 0.5 for 4-bit weights
    unsharded_item_bytes: float  # per element when gathered


def build_meta_model(config: "PreTrainedConfig", job: TrainingJob) -> MetaModel:
    """Build the model that a job trains, on the meta device and in the compute dtype, ready to trace.

    Raises a PlanError if the model cannot be built as the job asks.
    """
    config = type(config).from_dict(config.to_dict())
    config.use_cache = config.get_text_config().use_cache = False
    try:
        has_sdpa = choose_class(config)[0]._supports_sdpa
        config._attn_implementation = "sdpa" if has_sdpa and job.attention != "eager" else "eager"
        model = build_on_meta(config, job.compute_dtype)
    except LoadError as error:
        raise PlanError(f"Cannot build a model from this config: {error}") from error
    model = model.to("meta").train()
    if job.loss == "fused":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if job.lora_rank:
        model = _add_adapter(model, job)
    if job.gradient_checkpointing:
        _enable_checkpointing(model, bool(job.lora_rank))
    return model


def _add_adapter(model: "PreTrainedModel", job: TrainingJob) -> "PeftModel":
    from peft import LoraConfig, get_peft_model

    targets = job.lora_targets if isinstance(job.lora_targets, str) else list(job.lora_targets)
    adapter = LoraConfig(
        r=job.lora_rank,
        target_modules=targets,
        target_parameters=list(job.lora_parameters) or None,
        task_type=task_type_of(type(model)),
    )
    try:
        return get_peft_model(model, adapter, autocast_adapter_dtype=False)
    except ValueError as error:
        targets = ", ".join((*([targets] if isinstance(targets, str) else targets), *job.lora_parameters))
        raise PlanError(f"lora_targets is {targets}: {summarize(error, 'line')}") from error


def _enable_checkpointing(model: MetaModel, has_adapter: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Do not save RNG states: a run on meta needs none, and in a real run they take only a few bytes.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    if has_adapter:
        model.enable_input_require_grads()  # as Trainer does; otherwise frozen layers would not be recomputed


def list_parameters(model: MetaModel, job: TrainingJob) -> list[Parameter]:
    """Return the parameters in the model's order. A tied parameter appears once."""
    packed = _find_packed(model) if job.is_4bit else set()
    return [_describe(name, tensor, job, name in packed) for name, tensor in model.named_parameters()]


def _describe(name: str, tensor: torch.nn.Parameter, job: TrainingJob, is_packed: bool) -> Parameter:
    num_elements = num_padded = tensor.numel()
    # FSDP2 pads a parameter's rows to a multiple of the ranks. FSDP1's padding, under one element per rank, is ignored.
    if job.strategy.version == 2:
        num_rows = tensor.shape[0] if tensor.shape else 1
        num_padded = -(-num_rows // job.num_shards) * job.num_shards * (num_elements // max(num_rows, 1))
    # In mixed precision, Accelerate upcasts trained parameters to fp32; frozen ones keep their dtype.
    is_master = tensor.requires_grad and job.mixed_precision is not None
    stored = torch.float32 if is_master else job.dtype
    return Parameter(
        name=name,
        requires_grad=tensor.requires_grad and not is_packed,
        num_elements=num_elements,
        num_padded_elements=num_padded,
        num_shard_elements=num_padded / job.num_shards,
        sharded_item_bytes=PACKED_ITEM_BYTES if is_packed else stored.itemsize,
        unsharded_item_bytes=PACKED_ITEM_BYTES if is_packed else tensor.dtype.itemsize,
    )


def _find_packed(model: MetaModel) -> set[str]:
    """Return the names of the weights that bitsandbytes packs: those of linear layers, except the head and adapters.

    Raises:
        PlanError: the model has fused experts, which would stay unpacked.
    """
    try:
        check_experts(model)
    except LoadError as error:
        raise PlanError(str(error)) from error
    head = model.get_output_embeddings()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and "lora_" not in name
    }
