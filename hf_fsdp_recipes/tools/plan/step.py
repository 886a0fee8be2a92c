"""Predicts the memory of one training step from the model's config alone.

One step runs on fake tensors, which have shapes but no data. The process group is fake, too, and
has the planned size. The model, PEFT's adapter, Accelerate's FSDP2 units and TRL's loss are real.
torch's `MemTracker` counts what is allocated and freed. `stand_ins.py` has what is replaced.
From the steps of a few jobs, `table.py` computes what other jobs need.
"""

import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import ParallelismConfig
from peft import get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig
from trl import get_peft_config

from hf_fsdp_recipes.errors import ToolError, explained
from hf_fsdp_recipes.loading.load_model import build_on_meta, find_class, take_quantizer
from hf_fsdp_recipes.tools.plan.job import Job, read_config
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
    current_bytes,
    fsdp2_apply_ac,
    fsdp2_prepare_model,
)

# {part of the optimizer's name: number of its state tensors for each trained parameter}. The first
# part that fits counts. The other optimizers have two.
NUM_STATES = {"8bit": 0.5, "sgd": 0, "lion": 1, "rmsprop": 1}
# Assumed bytes of a rank on an accelerator: the context with cuBLAS, and NCCL's buffers.
CONTEXT_BYTES = 0.9e9
NCCL_BYTES = 0.6e9
FRAGMENTATION = 0.03  # of temporary memory, assumed
PROCESS_BYTES = 0.45e9  # Python and the libraries that a recipe imports, measured on CPU ranks
PARAMETERS = "parameters"
OPTIMIZER = "optimizer state"
BUCKETS = "gradient buckets of DDP"
KINDS = {  # {name in the plan: torch's kinds of memory}
    PARAMETERS: [MemoryKind.PARAM, MemoryKind.BUFFER],
    "forward pass: activations, gathered units": [MemoryKind.ACT],
    "backward pass: gradients, gathered units, temporary tensors": [
        MemoryKind.GRAD,
        MemoryKind.TEMP,
    ],
}


class Step(NamedTuple):
    """What a rank needs for a step, in bytes."""

    peak: dict[str, float]  # of each kind of memory, at the peak
    # Of all kinds, after each operation. A list for each stretch between two collectives.
    timeline: list[list[float]]
    host: dict[str, float]  # in host memory, for each purpose
    loading: float  # in rank 0's host memory while it loads the model

    def full_peak(self, job: Job) -> dict[str, float]:
        """Return the peak with an allowance for what is assumed."""
        if job.on_cpu:
            return self.peak | {"Python and its libraries (assumed)": PROCESS_BYTES}
        temporary = self.total - self.resident
        return self.peak | {
            "context, NCCL, fragmentation (assumed)": allowance(temporary, job.num_ranks)
        }

    @property
    def total(self) -> float:
        """What it needs at the peak, without what is assumed."""
        return sum(self.peak.values())

    @property
    def resident(self) -> float:
        """What stays in the device's memory between steps ("valley")."""
        return self.peak[PARAMETERS] + self.peak[OPTIMIZER] + self.peak.get(BUCKETS, 0)


def allowance(temporary_bytes: float, num_ranks: int) -> float:
    """Return the bytes that a rank of GPUs needs besides its tensors, according to assumptions."""
    nccl_bytes = NCCL_BYTES if num_ranks > 1 else 0
    return CONTEXT_BYTES + nccl_bytes + FRAGMENTATION * temporary_bytes


def measure_step(job: Job, config: PreTrainedConfig | None = None) -> Step:
    """Return what a rank needs for a step of the job.

    Meanwhile, a fake process group exists.

    Args:
        job: the job.
        config: of its model, if it is not the job's own. It is changed.

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
            model = _build(config or read_config(job), job)
            sizes = [parameter.nbytes for parameter in model.parameters()]
            with FakeTensorMode(allow_non_fake_inputs=True):
                # torch and Accelerate treat fake tensors like real ones.
                model.to_empty(device="cpu")
                model.tie_weights()
                if job.is_sharded:
                    model = _shard(model, parallelism, job)
                step = _run(model, job)
        if job.arguments.recipe.config_name:
            step.host["new model, which each rank builds"] = sum(sizes)
        # Rank 0 reads one parameter while it sends another one.
        return step._replace(loading=2 * max(sizes))
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
        every_n_layers = {key: options[key] for key in options if key == "every_n_layers"}
        known = {key: options[key] for key in options if key not in ("every_n_layers", "offload")}
        model.gradient_checkpointing_enable(
            {"use_reentrant": False, **known, "preserve_rng_state": False}, **every_n_layers
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


def _run(model: Any, job: Job) -> Step:
    """Run the forward and backward passes of a step, and return what it needs.

    This holds for any step after the first. The peak includes the optimizer's state and what
    `optimizer.step()` needs.
    """
    training = job.arguments.training
    trained = _trained_parameters(model)
    tracker = StepTracker(job.is_offloaded)
    tracker.track_external(model)
    if job.is_offloaded:
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(_move_gradient_to_host)
    precision = PRECISIONS.get(job.environment["ACCELERATE_MIXED_PRECISION"])
    accelerator_config: Any = training.accelerator_config  # TrainingArguments parses strings
    options = accelerator_config.gradient_accumulation_kwargs or {}
    with tracker:
        # One micro-batch stands for all those before the last one.
        for is_last in [False, True] if training.gradient_accumulation_steps > 1 else [True]:
            if job.is_sharded:
                model.set_requires_gradient_sync(is_last or options.get("sync_each_batch", False))
            with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
                # Like Trainer, keep no outputs.
                loss = -model(**_inputs(job), use_cache=False, fused_lm_head=True).log_probs.sum()
            loss.backward()
    trained_bytes = sum(_local(parameter).nbytes for parameter in trained)
    in_update = tracker.sizes("current")
    if training.optim == "adamw_torch" and not (job.on_cpu or job.is_offloaded):
        # Its multi-tensor step computes the new values of all parameters at once.
        in_update["optimizer's new values"] = trained_bytes
    peak = max(tracker.sizes("peak"), in_update, key=lambda sizes: sum(sizes.values()))
    resident, host = _optimizer_bytes(model, job)
    timeline = [*tracker.timeline, [sum(in_update.values())]]
    added = sum(resident.values())
    return Step(
        peak | resident, [[size + added for size in stretch] for stretch in timeline], host, 0
    )


def _optimizer_bytes(model: nn.Module, job: Job) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a rank has besides the tensors of a step: on the device, and in host memory."""
    optimizer = job.arguments.training.optim
    trained_parameters = _trained_parameters(model)
    trained = sum(_local(parameter).nbytes for parameter in trained_parameters)
    weights = sum(_local(parameter).nbytes for parameter in model.parameters())
    num_states = next((number for part, number in NUM_STATES.items() if part in optimizer), 2)
    state = num_states * trained
    if "32bit" in optimizer:
        state = num_states * 4 * sum(_local(parameter).numel() for parameter in trained_parameters)
    resident: dict[str, float] = {OPTIMIZER: state}
    host: dict[str, float] = {}
    if job.is_offloaded:
        resident[OPTIMIZER] = 0
        host["offloaded parameters, gradients and optimizer state"] = weights + trained + state
    elif "paged" in optimizer:
        resident[OPTIMIZER] = 0
        host["paged optimizer state"] = state
    if not job.is_sharded and job.num_ranks > 1:
        resident[BUCKETS] = trained
    if job.is_sharded and job.arguments.training.save_strategy != "no":
        host["copy that is written to a checkpoint"] = trained + state
    return resident, host


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _inputs(job: Job) -> dict[str, Tensor]:
    """Return a micro-batch, as TRL's collator makes it."""
    ids = torch.zeros(job.shape, dtype=torch.long)
    rows = "attention_mask"
    if job.is_joined:
        ids = ids.view(1, -1)
        rows = "position_ids"
    return dict.fromkeys(("input_ids", "labels", rows), ids)


def _move_gradient_to_host(parameter: Tensor) -> None:
    parameter.grad = None  # what is on the host is not counted


class StepTracker(MemTracker):
    """torch's tracker of live tensors, for fake ones.

    Args:
        is_offloaded: whether the parameters are in host memory and do not count.
    """

    def __init__(self, is_offloaded: bool) -> None:
        super().__init__()
        self.timeline: list[list[float]] = [[]]
        self._not_counted = {MemoryKind.PARAM} if is_offloaded else set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_VALUE:
            # The model reads a value, which a fake tensor does not have.
            return True if args[0].dtype == torch.bool else 1
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            self.timeline.append([])
        self.timeline[-1].append(sum(self._by_name(current_bytes(self)).values()))
        return result

    def sizes(self, when: str) -> dict[str, float]:
        """Return the bytes of each kind, now ("current") or at the peak."""
        [snapshot] = self.get_tracker_snapshot(when).values()
        return self._by_name(snapshot)

    def _by_name(self, snapshot: Mapping[Any, int]) -> dict[str, float]:
        return {
            name: sum(snapshot[kind] for kind in kinds if kind not in self._not_counted)
            for name, kinds in KINDS.items()
        }
