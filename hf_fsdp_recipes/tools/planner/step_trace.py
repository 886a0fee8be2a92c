"""Measures activation memory: runs the model's own forward and backward on the meta device and counts every allocation.

Meta tensors have shapes but no data, so a step of any model runs in seconds. Activations, logits, temporary buffers and
recomputation come from the modeling code itself, not from formulas. Parameters and their gradients are not counted
here: `fsdp_simulator` adds them as FSDP gathers and shards them. Attention is replaced by a function that saves what flash
and memory-efficient kernels save: query, key, value, output and one fp32 number per head and query position.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Literal
from unittest import mock

import torch
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import PyTree, tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from hf_fsdp_recipes.tools.planner.meta_model import MetaModel
from hf_fsdp_recipes.tools.planner.training_job import TrainingJob

ACTIVATIONS, LOGITS = "activations", "logits and loss"
# What has just been computed when an event occurs: at pre_backward, the gradients of a module's outputs; at post_backward,
# those of its inputs; at gradient, the gradient of a parameter; at forward_done, the loss.
EventKind = Literal[
    "pre_forward", "post_forward", "forward_done", "pre_backward", "post_backward", "gradient", "step_done"
]
LossFunction = Callable[[MetaModel, torch.Tensor, TrainingJob], torch.Tensor]


@dataclass(frozen=True)
class TraceEvent:
    """A point in the step where FSDP acts, with the memory in use there and the peak since the previous event."""

    kind: EventKind
    name: str  # name of the module or parameter
    live_bytes: dict[str, int]  # in use now, by category
    peak_bytes: dict[str, int]  # by category, at the peak since the previous event


class AllocationTracker(TorchDispatchMode):
    """Count the bytes that ops have allocated and not yet freed, except in `known` storages (parameters and buffers)."""

    def __init__(self, known: Collection[int]) -> None:
        super().__init__()
        self.category = ACTIVATIONS
        self.is_forward = True
        self.events: list[TraceEvent] = []
        self._known = set(known)
        self._live_bytes = {ACTIVATIONS: 0, LOGITS: 0}
        self._peak_bytes = dict(self._live_bytes)
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[torch.Tensor, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # The model's code reads the value of a tensor, which a meta tensor does not have. Return true or 1, which
            # is the value in a batch without padding or packing.
            return args[0].dtype == torch.bool or 1
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known or key in self._alive:
            return
        self._alive.add(key)
        self._live_bytes[self.category] += num_bytes
        if sum(self._live_bytes.values()) > sum(self._peak_bytes.values()):
            self._peak_bytes = dict(self._live_bytes)
        weakref.finalize(storage, self._remove, key, num_bytes, self.category).atexit = False

    def _remove(self, key: int, num_bytes: int, category: str) -> None:
        self._alive.discard(key)
        self._live_bytes[category] -= num_bytes

    def record(self, kind: EventKind, name: str = "") -> None:
        """Record an event, and start to measure the peak until the next one."""
        self.events.append(TraceEvent(kind, name, dict(self._live_bytes), self._peak_bytes))
        self._peak_bytes = dict(self._live_bytes)


def compute_job_loss(model: MetaModel, rows: torch.Tensor, job: TrainingJob) -> torch.Tensor:
    """Run a forward pass over token ids of shape (batch, length) and return the loss, computed as `job.loss` says."""
    mask = make_mask(model, rows, job)
    if job.loss == "fused":
        outputs = model(input_ids=rows, attention_mask=mask, labels=rows, fused_lm_head=True)
        return -outputs.log_probs.sum() / rows.numel()
    return model(input_ids=rows, attention_mask=mask, labels=rows, use_cache=False).loss


def make_mask(model: MetaModel, rows: torch.Tensor, job: TrainingJob) -> torch.Tensor | None:
    """Return a mask of shape (batch, 1, length, length), or None if the job's attention needs no mask."""
    is_eager = model.config._attn_implementation == "eager"
    if not is_eager and job.attention != "sdpa_padded":
        return None
    batch, length = rows.shape
    return torch.empty(batch, 1, length, length, dtype=model.dtype if is_eager else torch.bool, device=rows.device)


def trace_step(
    model: MetaModel,
    job: TrainingJob,
    watched: Collection[str],
    last_layer: str | None,
    compute_loss: LossFunction = compute_job_loss,
    device: str = "meta",
) -> list[TraceEvent]:
    """Run forward and backward of one micro-batch and return the events of the watched modules, in order.

    Memory allocated after the last decoder layer's forward and before its backward counts as logits. Tests pass
    `device` to compare with real tensors on the CPU.
    """
    watched = dict.fromkeys([*watched, *([last_layer] if last_layer else [])])
    tracker = AllocationTracker({t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())})
    handles = list(_watch_modules(model, watched, last_layer, tracker))
    try:
        with _patched_for_meta(job.strategy.on_cpu), tracker:
            rows = torch.zeros(job.batch, job.length, dtype=torch.long, device=device)
            loss = compute_loss(model, rows, job)
            tracker.record("forward_done")
            tracker.is_forward = False
            torch.autograd.backward(loss)
            tracker.record("step_done")
    finally:
        for handle in handles:
            handle.remove()
    return tracker.events


def _watch_modules(
    model: MetaModel, watched: Collection[str], last_layer: str | None, tracker: AllocationTracker
) -> Iterator[RemovableHandle]:
    for name in watched:
        module = model.get_submodule(name)
        yield module.register_forward_pre_hook(partial(_pre_forward, tracker, name), with_kwargs=True)
        yield module.register_forward_hook(partial(_post_forward, tracker, name, name == last_layer))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(partial(_free_gradient, tracker, name))


def _pre_forward(
    tracker: AllocationTracker, name: str, module: torch.nn.Module, args: PyTree, kwargs: PyTree
) -> PyTree:
    tracker.record("pre_forward", name)
    inputs = _tensors_with_gradient((args, kwargs))
    if not inputs or not torch.is_grad_enabled():
        return None
    outputs = _RecordBackward.apply(lambda: tracker.record("post_backward", name), *inputs)
    replacements = {id(old): new for old, new in zip(inputs, outputs, strict=True)}
    return tree_map(lambda leaf: replacements.get(id(leaf), leaf), (args, kwargs))


def _post_forward(
    tracker: AllocationTracker, name: str, is_last_layer: bool, module: torch.nn.Module, args: PyTree, output: PyTree
) -> None:
    tracker.record("post_forward", name)
    if is_last_layer and tracker.is_forward:
        tracker.category = LOGITS

    def record_backward(gradient: torch.Tensor) -> None:
        tracker.record("pre_backward", name)
        if is_last_layer:
            tracker.category = ACTIVATIONS

    torch.autograd.graph.register_multi_grad_hook(_tensors_with_gradient(output), record_backward, mode="any")


def _free_gradient(tracker: AllocationTracker, name: str, parameter: torch.nn.Parameter) -> None:
    parameter.grad = None
    tracker.record("gradient", name)


def _tensors_with_gradient(tree: PyTree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


class _RecordBackward(torch.autograd.Function):
    """Return tensors unchanged, and call a function once their gradients are computed."""

    @staticmethod
    def forward(ctx: FunctionCtx, callback: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.callback = callback
        return tensors

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.callback()
        return None, *gradients


class _AttentionStandIn(torch.autograd.Function):
    """Allocate and save the same tensors as flash and memory-efficient attention, without computing them."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)  # the kernels' own layout
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, row_sums)
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        # With grouped key and value heads, kernels compute one gradient per query head and sum these at the end.
        per_query_head = [tensor.new_empty(*query.shape[:2], *tensor.shape[2:]) for tensor in (key, value)]
        key_and_value = [
            gradient if gradient.shape == tensor.shape else torch.empty_like(tensor)
            for gradient, tensor in zip(per_query_head, (key, value), strict=True)
        ]
        return torch.empty_like(query), *key_and_value


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask_and_more: object, **more: object
) -> torch.Tensor:
    return _AttentionStandIn.apply(query, key, value)


@contextlib.contextmanager
def _patched_for_meta(on_cpu: bool) -> Iterator[None]:
    """Replace functions that cannot run on meta: attention kernels, autocast and, if the job runs on GPUs, TRL's fused loss.

    TRL's kernels can be skipped: they allocate nothing, but work in place on tiles that their caller allocates. Grouped
    matrix products of experts use transformers' own fallback, whose shapes can be computed on meta.

    Source: trl 1.16 `kernels/chunked_logprob.py`; transformers 5.23 `integrations/moe.py`.
    """
    from transformers.integrations import moe
    from trl.kernels import chunked_logprob

    def do_nothing(*args: object, **kwargs: object) -> None:
        return None

    replacements: list[tuple[ModuleType, str, Callable[..., object]]] = [
        (torch.nn.functional, "scaled_dot_product_attention", _attend),
        # Autocast raises on meta, and the model is in the compute dtype already.
        (torch, "is_autocast_enabled", lambda *device: False),
        (torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext()),
        (moe, "_can_use_grouped_mm", lambda *tensors: False),
    ]
    if not on_cpu:
        replacements += [
            (chunked_logprob, name, do_nothing) for name in ("_forward_tile", "_backward_tile", "_addmm_fp32")
        ]
    with contextlib.ExitStack() as patches:
        for owner, name, replacement in replacements:
            patches.enter_context(mock.patch.object(owner, name, replacement))
        yield
