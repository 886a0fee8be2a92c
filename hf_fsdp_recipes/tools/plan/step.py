"""Predicts the memory of one training step from the model's config alone.

One step runs on fake tensors, which have shapes but no data. The process group is fake, too, and has the planned size. The
model, PEFT's adapter, Accelerate's FSDP2 units and TRL's loss are real. torch's `MemTracker` counts what is allocated and freed.
Two things are replaced: bitsandbytes' layers, and functions that differ on a GPU or cannot run on fake tensors.
"""

import contextlib
import copy
import dataclasses
import functools
import os
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate import FullyShardedDataParallelPlugin
from peft import get_peft_model
from transformers import PreTrainedConfig
from trl import get_peft_config

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.loading.load_model import build_on_meta, take_quantizer
from hf_fsdp_recipes.metrics.flops import find_model_flops
from hf_fsdp_recipes.tools.plan.job import Job
from hf_fsdp_recipes.training.adjustments import gather_units_once
from hf_fsdp_recipes.training.sharded_optimizer import optimizer_name
from hf_fsdp_recipes.upstream.patches import LOADER, apply_for_loading
from hf_fsdp_recipes.upstream.planner_internals import (
    MODULE_TRACKER,
    MULTIPLY_GROUPS,
    NEEDS_NO_MASK,
    READ_VALUE,
    TILES,
    FakeStore,
    FakeTensorMode,
    MemoryKind,
    MemTracker,
    active_fake_mode,
    add_fused_lm_head,
    chunked_logprob,
    fsdp2_apply_ac,
    fsdp2_prepare_model,
    masking_utils,
    moe,
)

# {part of the optimizer's name: number of its state tensors for each trained parameter}
NUM_STATES = {"sgd": 0, "lion": 1, "rmsprop": 1, "adamw": 2}
SCALE_BYTES = {
    False: 4 / 64,
    True: 1 / 64 + 4 / (64 * 256),
}  # bytes per value; True: scales are quantized too
KINDS = {  # {torch's kind of memory: name in the plan}
    MemoryKind.PARAM: "parameters",
    MemoryKind.BUFFER: "parameters",
    MemoryKind.OTH: "parameters",  # buffers, if the parameters are offloaded
    MemoryKind.ACT: "forward pass: activations, gathered units",
    MemoryKind.TEMP: "backward pass: gradients, gathered units, temporary tensors",
}
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StepMemory(NamedTuple):
    """What a step needs on one rank: bytes by kind at the peak, and FLOPs if they can be counted."""

    peak: dict[str, int]
    flops: int | None


def measure_step(config: PreTrainedConfig, job: Job) -> StepMemory:
    """Return what a step of the job needs on one rank. During this call, a fake process group exists.

    Raises:
        ToolError: the ranks are no multiple of the replicas, the recipe trains nothing, or PEFT cannot add the adapter.
    """
    if job.num_ranks % job.num_replicas:
        raise ToolError(
            f"{job.num_ranks} ranks cannot hold {job.num_replicas} replicas. Pass another --num_processes."
        )
    dist.init_process_group("fake", rank=0, world_size=job.num_ranks, store=FakeStore())
    try:
        sizes, names = (job.num_replicas, job.num_ranks // job.num_replicas), ("replicate", "shard")
        first = 0 if job.num_replicas > 1 else 1
        mesh = dist.init_device_mesh("cpu", sizes[first:], mesh_dim_names=names[first:])
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(mock.patch.dict(os.environ, job.environment))
            _replace_kernels(stack, job)
            model, flops = _build(config, job), None
            rows, length = (
                job.shape[0] * job.arguments.training.gradient_accumulation_steps,
                job.shape[1],
            )
            with contextlib.suppress(
                AttributeError, ValueError
            ):  # FLOPs are counted only for text decoders
                flops = find_model_flops(model).training(rows * length, rows * length**2)
            with FakeTensorMode(allow_non_fake_inputs=True):
                model.to_empty(
                    device="cpu"
                )  # fake tensors, which torch and Accelerate treat like real ones
                model.tie_weights()
                return StepMemory(_run(_shard(model, mesh, job), job), flops)
    finally:
        dist.destroy_process_group()


def _build(config: PreTrainedConfig, job: Job) -> Any:
    """Return the job's model on meta. It is built like the model of recipes/sft.py and SFTTrainer."""
    config, chosen, training = copy.deepcopy(config), job.arguments.model, job.arguments.training
    config.get_text_config().use_cache = config.use_cache = False
    take_quantizer(config)
    auto_class = getattr(
        transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM
    )
    dtype = getattr(torch, str(chosen.dtype), None) or config.dtype or torch.float32
    implementation = (
        "eager" if chosen.attn_implementation == "eager" else None
    )  # otherwise SDPA, if the model has it
    model = build_on_meta(
        config, dtype, auto_class, {"attn_implementation": implementation}
    ).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if chosen.load_in_4bit:
        stored = PRECISIONS.get(job.environment["ACCELERATE_MIXED_PRECISION"], dtype)
        _pack_linears(model.requires_grad_(False), stored, chosen.use_bnb_nested_quant)
    if chosen.use_peft:
        try:
            model = get_peft_model(model, get_peft_config(chosen))
        except ValueError as error:
            raise ToolError(f"PEFT cannot add this adapter: {error}") from error
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ToolError(
            "no parameter is trained: 4-bit weights need an adapter. Set use_peft: true."
        )
    for parameter in trained if chosen.load_in_4bit else ():
        parameter.data = parameter.data.to(torch.bfloat16)  # as SFTTrainer does
    if training.gradient_checkpointing:
        options = {"use_reentrant": False} | (training.gradient_checkpointing_kwargs or {})
        model.gradient_checkpointing_enable(options | {"preserve_rng_state": False})
        if chosen.use_peft:
            model.enable_input_require_grads()
    return model


def _shard(model: Any, mesh: Any, job: Job) -> Any:
    """Shard the model as `Accelerator.prepare` does."""
    plugin, precision = (
        FullyShardedDataParallelPlugin(),
        job.environment["ACCELERATE_MIXED_PRECISION"],
    )
    if precision != "no":
        plugin.set_mixed_precision(precision)
        policy = dataclasses.replace(
            plugin.mixed_precision_policy, reduce_dtype=torch.float32
        )  # as `adjust` does
        plugin.mixed_precision_policy = policy
    plugin.cpu_offload = plugin.cpu_ram_efficient_loading = (
        None  # what would be on the host is not counted
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={(): mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=()),
        mixed_precision="no"
        if job.arguments.model.load_in_4bit
        else precision,  # adapters of 4-bit models stay in bf16
        is_main_process=False,
        device=torch.device("cpu"),
    )
    apply_for_loading()
    model.__dict__[LOADER] = job  # SIZE_BASED_WRAP needs a model that looks like load_model's
    plugin.set_auto_wrap_policy(model)
    model = fsdp2_apply_ac(accelerator, model) if plugin.activation_checkpointing else model
    gather_units_once(model)
    return fsdp2_prepare_model(accelerator, model)


def _run(model: Any, job: Job) -> dict[str, int]:
    """Return the bytes of each kind at the peak of a step."""
    training, precision = (
        job.arguments.training,
        PRECISIONS.get(job.environment["ACCELERATE_MIXED_PRECISION"]),
    )
    rows = torch.zeros(job.shape, dtype=torch.long).view((1, -1) if job.is_joined else job.shape)
    inputs = {
        "input_ids": rows,
        "labels": rows,
        "position_ids" if job.is_joined else "attention_mask": rows,
    }
    options = training.accelerator_config.gradient_accumulation_kwargs or {}
    tracker = StepTracker()
    tracker.track_external(*model.buffers(), *(() if job.is_offloaded else [model]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained if job.is_offloaded else ():
        parameter.register_post_accumulate_grad_hook(
            lambda reduced: setattr(reduced, "grad", None)
        )  # it is on the host
    with tracker:
        for is_last in (False, True)[training.gradient_accumulation_steps == 1 :]:
            model.set_requires_gradient_sync(is_last or options.get("sync_each_batch", False))
            with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
                loss = -model(
                    **inputs, fused_lm_head=True
                ).log_probs.sum()  # keeps no outputs, like Trainer
            loss.backward()
    return _add_optimizer(model, tracker, job)


class StepTracker(MemTracker):
    """torch's tracker of live tensors, without its statistics per module, which would take minutes for a large model."""

    def __init__(self) -> None:
        super().__init__()
        self._mode = active_fake_mode()
        getattr(self, MODULE_TRACKER).register_user_hooks = lambda *hooks: None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_VALUE:
            return (
                args[0].dtype == torch.bool or 1
            )  # the model reads a value, which a fake tensor does not have
        if (
            active_fake_mode() is not self._mode
        ):  # DTensor's own mode only finds shapes; torch 2.11 would count them
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def sizes(self, when: str) -> dict[str, int]:
        """Return the bytes of each kind, now ("current") or at the peak."""
        [found] = self.get_tracker_snapshot(when).values()
        return {
            text: sum(found[kind] for kind in KINDS if KINDS[kind] == text)
            for text in KINDS.values()
        }


def _add_optimizer(model: Any, tracker: StepTracker, job: Job) -> dict[str, int]:
    """Return the peak of any step after the first. It includes the optimizer's state and what `optimizer.step()` needs."""
    optimizer = optimizer_name(job.arguments.training)
    shards = [one.to_local() for one in model.parameters() if one.requires_grad]
    num_states = next((number for name, number in NUM_STATES.items() if name in optimizer), 2)
    states = num_states * sum(one.nbytes for one in shards)
    resident = {"optimizer state": 0 if job.is_offloaded or "paged" in optimizer else states}
    is_multi_tensor = optimizer == "adamw_torch" and not (job.on_cpu or job.is_offloaded)
    update = {"optimizer's new values": sum(one.nbytes for one in shards) if is_multi_tensor else 0}
    peaks = (tracker.sizes("peak") | resident, tracker.sizes("current") | resident | update)
    return {
        name: size
        for name, size in max(peaks, key=lambda peak: sum(peak.values())).items()
        if size > 0
    }


def _pack_linears(model: Any, dtype: torch.dtype, is_nested: bool) -> None:
    """Pack the weights of linear layers, except the head, into 4 bits, like bitsandbytes. Every rank has all scales."""
    head = model.get_output_embeddings()
    for module in [
        one for one in model.modules() if isinstance(one, torch.nn.Linear) and one is not head
    ]:
        num_values = module.weight.numel()
        scales = torch.empty(
            round(num_values * SCALE_BYTES[is_nested]), dtype=torch.uint8, device="meta"
        )
        module.register_buffer("scales", scales, persistent=False)
        module.forward = functools.partial(_multiply_packed, module, module.weight.shape, dtype)
        packed = torch.empty(num_values // (2 * dtype.itemsize), 1, dtype=dtype, device="meta")
        module.weight = torch.nn.Parameter(packed, requires_grad=False)


def _multiply_packed(
    module: Any, shape: torch.Size, dtype: torch.dtype, rows: torch.Tensor
) -> torch.Tensor:
    """Multiply rows by a packed weight. It is unpacked for this, and again in the backward pass."""

    def unpack(_: Any = None) -> torch.Tensor:
        return module.weight.new_empty(shape).t()

    rows = rows.to(dtype)
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, unpack):
        return rows @ unpack()


def _replace_kernels(stack: contextlib.ExitStack, job: Job) -> None:
    """Replace functions that differ on a GPU or fail on fake tensors. Closing the stack restores them."""
    is_flash = "flash" in str(job.arguments.model.attn_implementation)
    # SDPA needs a mask for padded rows, for packed rows and for sliding windows.
    has_mask = not is_flash and (
        job.is_joined or (job.shape[0] > 1 and not job.arguments.training.packing)
    )

    def ignore_mask(
        padding: Any, length: int, kv_length: int, offset: Any, kv_offset: Any, window: Any = None
    ) -> bool:
        return is_flash or not (has_mask or (window is not None and kv_length >= window))

    replacements: list[tuple[Any, str, Any]] = [
        (masking_utils, NEEDS_NO_MASK, ignore_mask),
        (
            masking_utils,
            "find_packed_sequence_indices",
            lambda position_ids: position_ids if has_mask else None,
        ),
        (
            moe,
            MULTIPLY_GROUPS,
            lambda rows, weight, offs: rows.to(weight.dtype) @ weight[0],
        ),  # same shape
    ]
    if not job.on_cpu:  # on GPUs, Triton kernels work in place, and attention kernels have dropout
        attend = torch.nn.functional.scaled_dot_product_attention
        without = lambda *args, dropout_p=0.0, **kwargs: attend(*args, **kwargs)  # noqa: E731
        replacements.append((torch.nn.functional, "scaled_dot_product_attention", without))
        for name in TILES:
            replacements.append((chunked_logprob, name, lambda *args, **kwargs: None))
    for owner, name, replacement in replacements:
        stack.enter_context(mock.patch.object(owner, name, replacement))
