"""Predicts the memory of one training step from the model's config alone.

One step runs on fake tensors, which have shapes but no data. The process group is fake, too, and
has the planned size. The model, PEFT's adapter, Accelerate's FSDP2 units and TRL's loss are real.
torch's `MemTracker` counts what is allocated and freed. `stand_ins.py` has what is replaced.
"""

import os
import warnings
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import ParallelismConfig
from peft import get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedConfig
from trl import get_peft_config

from hf_fsdp_recipes.errors import ToolError, explained
from hf_fsdp_recipes.loading.load_model import build_on_meta, find_class, take_quantizer
from hf_fsdp_recipes.tools.plan.job import Job
from hf_fsdp_recipes.tools.plan.stand_ins import pack_linears, replacements
from hf_fsdp_recipes.training.adjustments import reduce_in_float32
from hf_fsdp_recipes.upstream.accelerate_internals import PRECISIONS
from hf_fsdp_recipes.upstream.patches import LOADER, apply_for_loading
from hf_fsdp_recipes.upstream.planner_internals import (
    READ_VALUE,
    FakeStore,
    FakeTensorMode,
    MemoryKind,
    MemTracker,
    add_fused_lm_head,
    fsdp2_apply_ac,
    fsdp2_prepare_model,
)

# {part of the optimizer's name: number of its state tensors on the device for each trained
# parameter}. The first part that fits counts; the other optimizers have two.
NUM_STATES = {"paged": 0, "sgd": 0, "lion": 1, "rmsprop": 1}
KINDS = {  # {name in the plan: torch's kinds of memory}
    # OTH has the buffers, if the parameters are offloaded.
    "parameters": [MemoryKind.PARAM, MemoryKind.BUFFER, MemoryKind.OTH],
    "forward pass: activations, gathered units": [MemoryKind.ACT],
    "backward pass: gradients, gathered units, temporary tensors": [MemoryKind.TEMP],
}


def measure_step(config: PreTrainedConfig, job: Job) -> dict[str, float]:
    """Return the bytes of each kind that a rank needs at a step's peak.

    Meanwhile, a fake process group exists. The config is changed.

    Raises:
        ToolError: the sizes of replicas do not fit the ranks, the recipe trains nothing, or PEFT
            cannot add the adapter.
    """
    dist.init_process_group("fake", rank=0, world_size=job.num_ranks, store=FakeStore())
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            patch.dict(os.environ, job.environment),
            ExitStack() as stack,
        ):
            for replacement in replacements(job):
                stack.enter_context(patch.object(*replacement))
            parallelism = ParallelismConfig()  # from the launcher's variables
            if parallelism.total_size not in (1, job.num_ranks):
                raise ToolError(
                    f"{job.num_ranks} ranks do not fit the sizes of parallelism_config, which need "
                    f"{parallelism.total_size}. Pass another --num_processes, or other sizes."
                )
            one_replica = dist.init_device_mesh(
                "cpu", (job.num_ranks,), mesh_dim_names=("dp_shard_cp",)
            )
            parallelism.device_mesh = parallelism.build_device_mesh("cpu") or one_replica
            model = _build(config, job)
            with FakeTensorMode(allow_non_fake_inputs=True):
                # torch and Accelerate treat fake tensors like real ones.
                model.to_empty(device="cpu")
                model.tie_weights()
                return _run(_shard(model, parallelism, job), job)
    finally:
        dist.destroy_process_group()


def _build(config: PreTrainedConfig, job: Job) -> Any:
    """Return the job's model on meta, built like the model of recipes/sft.py and SFTTrainer."""
    chosen = job.arguments.model
    training = job.arguments.training
    take_quantizer(config)
    dtype: Any = getattr(torch, str(chosen.dtype), None) or config.dtype or torch.float32
    model: Any = build_on_meta(
        config,
        dtype,
        find_class(config.architectures),
        # Unless eager attention is chosen, the model has SDPA, if it can.
        {"attn_implementation": "eager" if chosen.attn_implementation == "eager" else None},
    )
    model.train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if chosen.load_in_4bit:
        model.requires_grad_(False)
        stored = PRECISIONS.get(job.environment["ACCELERATE_MIXED_PRECISION"], dtype)
        pack_linears(model, stored, chosen.use_bnb_nested_quant)
    with explained(ToolError, "PEFT cannot add this adapter"):
        peft_config = get_peft_config(chosen)
        if peft_config:
            model = get_peft_model(model, peft_config)
    trained = _trained_parameters(model)
    if not trained:
        raise ToolError(
            "no parameter is trained: 4-bit weights need an adapter. Set use_peft: true."
        )
    if chosen.load_in_4bit:
        for parameter in trained:
            parameter.data = parameter.data.to(torch.bfloat16)  # as SFTTrainer does
    if training.gradient_checkpointing:
        # TrainingArguments parses strings.
        options: Any = training.gradient_checkpointing_kwargs or {}
        model.gradient_checkpointing_enable(
            {"use_reentrant": False, **options, "preserve_rng_state": False}
        )
        if peft_config:
            model.enable_input_require_grads()
    return model


def _trained_parameters(model: nn.Module) -> list:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _shard(model: Any, parallelism: ParallelismConfig, job: Job) -> Any:
    """Shard the model as `Accelerator.prepare` does."""
    precision = job.environment["ACCELERATE_MIXED_PRECISION"]
    # What would be on the host is not counted.
    plugin = FullyShardedDataParallelPlugin(cpu_offload=False, cpu_ram_efficient_loading=False)
    if precision != "no":
        plugin.set_mixed_precision(precision)
    if job.arguments.model.load_in_4bit:
        precision = "no"  # adapters of 4-bit models stay in bf16
    accelerator = SimpleNamespace(  # what Accelerate's functions for FSDP2 read of an Accelerator
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=parallelism.device_mesh,
        parallelism_config=parallelism,
        mixed_precision=precision,
        is_main_process=False,
        device=torch.device("cpu"),
    )
    apply_for_loading()
    # SIZE_BASED_WRAP works only for models that have a Loader. This one stands in; no one calls it.
    vars(model)[LOADER] = object()
    plugin.set_auto_wrap_policy(model)
    if plugin.activation_checkpointing:
        model = fsdp2_apply_ac(accelerator, model)
    reduce_in_float32(plugin, model)
    return fsdp2_prepare_model(accelerator, model)


def _run(model: Any, job: Job) -> dict[str, float]:
    """Run the forward and backward passes of a step. Return the bytes of each kind at the peak.

    The peak is that of any step after the first. It includes the optimizer's state and what
    `optimizer.step()` needs.
    """
    training = job.arguments.training
    tracker = StepTracker()
    tracker.track_external(*model.buffers())
    if job.is_offloaded:
        for parameter in _trained_parameters(model):
            parameter.register_post_accumulate_grad_hook(_move_gradient_to_host)
    else:
        tracker.track_external(model)
    ids = torch.zeros(job.shape, dtype=torch.long)
    rows = "attention_mask"
    if job.is_joined:
        ids = ids.view(1, -1)
        rows = "position_ids"
    inputs = dict.fromkeys(("input_ids", "labels", rows), ids)
    precision = PRECISIONS.get(job.environment["ACCELERATE_MIXED_PRECISION"])
    accelerator_config: Any = training.accelerator_config  # TrainingArguments parses strings
    options = accelerator_config.gradient_accumulation_kwargs or {}
    with tracker:
        # One micro-batch stands for all those before the last one.
        for is_last in [False, True] if training.gradient_accumulation_steps > 1 else [True]:
            model.set_requires_gradient_sync(is_last or options.get("sync_each_batch", False))
            with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
                # Like Trainer, keep no outputs.
                loss = -model(**inputs, use_cache=False, fused_lm_head=True).log_probs.sum()
            loss.backward()
    optimizer = training.optim
    trained = [] if job.is_offloaded else _trained_parameters(model)
    size = sum(parameter.to_local().nbytes for parameter in trained)
    num_states = next((number for part, number in NUM_STATES.items() if part in optimizer), 2)
    in_update = tracker.sizes("current")
    if optimizer == "adamw_torch" and not job.on_cpu:
        # Its multi-tensor step computes the new values of all parameters at once.
        in_update["optimizer's new values"] = size
    peak = max(tracker.sizes("peak"), in_update, key=lambda sizes: sum(sizes.values()))
    return peak | {"optimizer state": num_states * size}


def _move_gradient_to_host(parameter: Tensor) -> None:
    parameter.grad = None  # what is on the host is not counted


class StepTracker(MemTracker):
    """torch's tracker of live tensors, for fake ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_VALUE:
            # The model reads a value, which a fake tensor does not have.
            return True if args[0].dtype == torch.bool else 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    def sizes(self, when: str) -> dict[str, float]:
        """Return the bytes of each kind, now ("current") or at the peak."""
        [snapshot] = self.get_tracker_snapshot(when).values()
        return {name: sum(snapshot[kind] for kind in kinds) for name, kinds in KINDS.items()}
