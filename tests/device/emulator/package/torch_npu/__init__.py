"""An emulated accelerator under the name of torch_npu, for tests: device `npu`, collectives `hccl`.

torch imports this package by itself (entry point `torch.backends`) if it is on PYTHONPATH.

If the host reads or writes device memory, that is a segmentation fault. The CPU's kernels work on a
second mapping of the same memory. Queued work (non-blocking copies between pinned memory and the
device, waits for events) runs as late as possible, and fresh and freed memory is NaN, so a missing
wait shows in every run.
"""

import os
import sys
from typing import Any

import torch

from torch_npu import _C, device_module

_C._storage_Use_Count = torch._C._storage_Use_Count  # TRL looks for it here
_data = torch._C.TensorBase.data
_is_registered = False


def _autoload() -> None:
    """Called by torch; the import has already registered the device."""


def _register() -> None:
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", device_module.npu)
    sys.modules["torch.npu"] = device_module.npu
    sys.modules["torch.npu.random"] = device_module.random
    sys.modules["torch.npu.amp"] = device_module.amp
    device_module.fill()
    torch.Tensor.data = property(_data.__get__, _set_data)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True
    )
    import torch.distributed as dist

    dist.Backend.register_backend("hccl", _make_backend, devices=["npu"])
    _offload_as_with_nccl(dist)
    if os.environ.get("EMU_WATCH"):
        from torch_npu import watch

        watch.start(os.environ["EMU_WATCH"])


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Assign `.data` across devices, which torch allows only for devices that it knows by name."""
    types = (tensor.device.type, value.device.type)
    if types[0] != types[1] and "npu" in types:
        _C.set_data(tensor, value)
    else:
        _data.__set__(tensor, value)


def _make_backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    import torch.distributed as dist

    return _C.make_backend(dist.ProcessGroupGloo(store, rank, size, timeout), store)


def _offload_as_with_nccl(dist: Any) -> None:
    """Add gloo for host tensors if parameters are offloaded.

    Accelerate does so with nccl and xccl only.
    """
    start = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        is_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        is_offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
        is_full = os.environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT") == "FULL_STATE_DICT"
        if backend == "hccl" and is_fsdp and (is_offload or is_full):
            backend = "npu:hccl,cpu:gloo"
        return start(backend, *args, **kwargs)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group


def npu_fusion_attention(*_: Any, **__: Any) -> None:
    """Refuse: transformers imports this if torch_npu is installed, but no test calls it."""
    raise NotImplementedError("the emulated accelerator has no fused kernels")


npu_rotary_mul = npu_rms_norm = npu_fusion_attention
_register()
