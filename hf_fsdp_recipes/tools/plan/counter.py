"""Counts the memory that a training step allocates and frees, separately for each kind of tensor."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._guards import active_fake_mode
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHARDS, GATHERED, GRADIENTS, ACTIVATIONS = "parameters", "gathered units", "gradients", "activations and loss"
KINDS = {"unshard": GATHERED, "wait_for_unshard": GATHERED, "post_backward": GRADIENTS}  # what FSDP2's methods allocate


class MemoryCounter(TorchDispatchMode):
    """Tracks the bytes of live storages of fake tensors, by kind: `live` has the current bytes, `peak` those of the peak.

    torch's `_tools.FSDPMemTracker` supports neither Accelerate's units of several modules nor a head that TRL never calls.
    """

    def __init__(self, resident: list[torch.Tensor], is_offloaded: bool) -> None:
        """Count the tensors that exist before the step. If `is_offloaded` is true, gradients leave the device once reduced."""
        super().__init__()
        self.kind, self._is_offloaded = SHARDS, is_offloaded
        self.live: dict[str, int] = {}  # {kind: bytes}, like `peak`
        self.peak: dict[str, int] = {}
        self._alive: dict[int, tuple[str, int]] = {}
        for tensor in resident:
            self._add(tensor.untyped_storage())
        self.kind = ACTIVATIONS

    def __enter__(self) -> "MemoryCounter":
        self._mode, self._patches, original = active_fake_mode(), contextlib.ExitStack(), torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            original(storage, size)
            self._change(storage._cdata, size)

        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize))
        for name in KINDS:
            method = self._watch(name, getattr(FSDPParamGroup, name))
            self._patches.enter_context(mock.patch.object(FSDPParamGroup, name, method))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _watch(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            before, self.kind = self.kind, KINDS[name]
            result = method(group, *args, **kwargs)
            self.kind = before
            for parameter in group.fsdp_params if self._is_offloaded and name == "post_backward" else ():
                if parameter.sharded_param.grad is not None:
                    self._change(parameter.sharded_param.grad._local_tensor.untyped_storage()._cdata, 0)
            return result

        return call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first turns this into operations on local tensors
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # the fake version of this operation would copy
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or 1  # the model reads a value, which a fake tensor does not have
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._mode:  # DTensor's own fake mode only finds shapes
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = (self.kind, 0)
            self._change(key, storage.nbytes())
            weakref.finalize(storage, self._remove, key).atexit = False

    def _remove(self, key: int) -> None:
        self._change(key, 0)
        del self._alive[key]

    def _change(self, key: int, size: int) -> None:
        if key in self._alive:
            kind, before = self._alive[key]
            self._alive[key] = (kind, size)
            self.live[kind] = self.live.get(kind, 0) + size - before
            if sum(self.live.values()) > sum(self.peak.values()):
                self.peak = dict(self.live)
