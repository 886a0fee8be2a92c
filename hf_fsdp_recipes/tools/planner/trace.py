"""What one training step keeps in memory: the model's own forward and backward, run on meta and watched.

Every op runs on meta tensors, which have shapes and no bytes, under a dispatch mode that counts the storages that
are alive. So activations, logits, temporary results and recomputation are those of the very architecture, with no
formula for it. Parameters and their gradients are left out: `schedule.py` adds them as FSDP cuts and gathers them.
Flash and memory-efficient attention stand as what they save: q, k, v, the output and one fp32 number a row.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hf_fsdp_recipes.tools.planner.job import Job

ACTIVATIONS, LOGITS = "activations", "logits and loss"


@dataclass(frozen=True)
class Moment:
    """Something FSDP reacts to, and the memory up to it.

    Attributes:
        kind: enter, exit (a module's forward), loss (forward is done), backward_enter, backward_exit (gradients of
            its outputs and of its inputs are there), gradient (a parameter has its own), end.
        name: the module's or the parameter's.
        live_bytes: what is alive now, by part.
        peak_bytes: what was alive, by part, when the sum was highest since the moment before.
    """

    kind: str
    name: str
    live_bytes: dict[str, int]
    peak_bytes: dict[str, int]


class _Watch(TorchDispatchMode):
    """Count the bytes of storages that ops make, until they are freed."""

    def __init__(self, known: Collection[int]) -> None:
        super().__init__()
        self.part = ACTIVATIONS
        self.is_forward = True
        self.moments: list[Moment] = []
        self._known = set(known)
        self._live = {ACTIVATIONS: 0, LOGITS: 0}
        self._peak = dict(self._live)
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # Meta has no values. Yes is what the questions of a plain batch come to: nothing padded, nothing packed.
            return args[0].dtype == torch.bool or 1
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known or key in self._alive:
            return
        self._alive.add(key)
        self._live[self.part] += num_bytes
        if sum(self._live.values()) > sum(self._peak.values()):
            self._peak = dict(self._live)
        weakref.finalize(storage, self._forget, key, num_bytes, self.part).atexit = False

    def _forget(self, key: int, num_bytes: int, part: str) -> None:
        self._alive.discard(key)
        self._live[part] -= num_bytes

    def note(self, kind: str, name: str = "") -> None:
        """Write down a moment and start a new peak."""
        self.moments.append(Moment(kind, name, dict(self._live), self._peak))
        self._peak = dict(self._live)


class _PlannedAttention(torch.autograd.Function):
    """Attention without scores: saves what flash and memory-efficient kernels save."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)  # the kernels' own layout
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, row_sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        # Kernels with fewer key and value heads work on one copy for each query head, and sum at the end.
        whole = [tensor.new_empty(*query.shape[:2], *tensor.shape[2:]) for tensor in (key, value)]
        key_and_value = [
            grown if grown.shape == tensor.shape else torch.empty_like(tensor)
            for grown, tensor in zip(whole, (key, value), strict=True)
        ]
        return torch.empty_like(query), *key_and_value


def _plan_attention(query: Any, key: Any, value: Any, *mask_and_more: Any, **more: Any) -> Any:
    return _PlannedAttention.apply(query, key, value)


class _Boundary(torch.autograd.Function):
    """Pass tensors through; say when their gradients are there."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[], None], *tensors: Any) -> Any:
        ctx.note = note
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.note()
        return None, *gradients


def trace_step(
    model: Any, job: Job, watched: Collection[str], last_layer: str | None, device: str = "meta"
) -> list[Moment]:
    """Run one step on meta and return its moments, in order.

    Args:
        model: from `blueprint.build`: on meta, in the compute dtype, with adapters and checkpointing as in the run.
        job: rows, loss and attention.
        watched: modules whose forward and backward are to be noted.
        last_layer: from whose end on memory counts as logits and loss, until its backward begins.
        device: where the model is; another one than meta computes for real, to compare with.
    """
    watched = dict.fromkeys([*watched, *([last_layer] if last_layer else [])])
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    watch = _Watch(known)
    handles = [*_watch_modules(model, watched, last_layer, watch), *_watch_parameters(model, watch)]
    try:
        with _meta_can_run(job.on_cpu), watch:
            rows = torch.zeros(job.batch, job.length, dtype=torch.long, device=device)
            value, kept = _forward(model, rows, job.loss, job.attention == "sdpa_padded")
            watch.note("loss")
            watch.is_forward = False
            torch.autograd.backward(value)
            watch.note("end")
            del kept, value
    finally:
        for handle in handles:
            handle.remove()
    return watch.moments


def _forward(model: Any, rows: Any, loss: str, is_padded: bool) -> tuple[Any, Any]:
    """Return the loss and what a plain loop keeps alive beside it."""
    mask = _mask(model, rows, is_padded)
    if loss == "fused":
        outputs = model(input_ids=rows, attention_mask=mask, labels=rows, fused_lm_head=True)
        return -outputs.log_probs.sum() / rows.numel(), None
    if loss == "model":
        return model(input_ids=rows, attention_mask=mask, labels=rows, use_cache=False).loss, None
    logits = model(input_ids=rows, attention_mask=mask, use_cache=False).logits.float()
    shifted = logits[:, :-1].contiguous().view(-1, logits.shape[-1])
    return torch.nn.functional.cross_entropy(shifted, rows[:, 1:].reshape(-1)), logits


def _mask(model: Any, rows: Any, is_padded: bool) -> Any:
    is_eager = model.config._attn_implementation == "eager"
    if not is_eager and not is_padded:
        return None
    batch, length = rows.shape
    return torch.empty(batch, 1, length, length, dtype=model.dtype if is_eager else torch.bool, device=rows.device)


def _watch_modules(model: Any, watched: Collection[str], last_layer: str | None, watch: _Watch) -> Iterator[Any]:
    for name in watched:
        module = model.get_submodule(name)
        is_last = name == last_layer
        yield module.register_forward_pre_hook(_before(watch, name, is_last), with_kwargs=True)
        yield module.register_forward_hook(_after(watch, name, is_last))


def _before(watch: _Watch, name: str, is_last: bool) -> Any:
    def enter(module: Any, args: Any, kwargs: Any) -> Any:
        watch.note("enter", name)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not tensors or not torch.is_grad_enabled():
            return None
        passed = _Boundary.apply(lambda: watch.note("backward_exit", name), *tensors)
        instead = {id(old): new for old, new in zip(tensors, passed, strict=True)}
        return tree_map(lambda leaf: instead.get(id(leaf), leaf), (args, kwargs))

    return enter


def _after(watch: _Watch, name: str, is_last: bool) -> Any:
    def leave(module: Any, args: Any, output: Any) -> None:
        watch.note("exit", name)
        if is_last and watch.is_forward:
            watch.part = LOGITS
        noted: list[bool] = []

        def arrive(gradient: Any) -> None:
            if not noted:
                noted.append(True)
                watch.note("backward_enter", name)
                if is_last:
                    watch.part = ACTIVATIONS

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(arrive)

    return leave


def _watch_parameters(model: Any, watch: _Watch) -> Iterator[Any]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(_take_gradient(watch, name))


def _take_gradient(watch: _Watch, name: str) -> Any:
    def take(parameter: Any) -> None:
        parameter.grad = None
        watch.note("gradient", name)

    return take


@contextlib.contextmanager
def _meta_can_run(on_cpu: bool) -> Iterator[None]:
    """Stand in for what meta lacks: attention kernels, autocast, and on GPUs the kernels of TRL's fused loss.

    Those work in place on tiles that their caller has allocated. Experts' grouped products take transformers' own
    stand-in, which knows their shapes on meta whatever their alignment.

    Source: trl 1.16 `kernels/chunked_logprob.py`; transformers 5.23 `integrations/moe.py`.
    """
    from transformers.integrations import moe

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    with contextlib.ExitStack() as patches:
        functional = torch.nn.functional
        patches.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", _plan_attention))
        # Asking for autocast on meta is an error; the model is in the compute dtype already.
        patches.enter_context(mock.patch.object(torch, "is_autocast_enabled", lambda *device: False))
        patches.enter_context(mock.patch.object(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext()))
        patches.enter_context(mock.patch.object(moe, "_can_use_grouped_mm", lambda *tensors: False))
        if not on_cpu:
            from trl.kernels import chunked_logprob

            for kernel in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
                patches.enter_context(mock.patch.object(chunked_logprob, kernel, nothing))
        yield
