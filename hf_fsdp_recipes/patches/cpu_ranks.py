"""Lets Accelerate run FSDP1 and FSDP2 on CPU ranks over gloo.

Accelerate turns GPU ranks into FSDP ranks in `AcceleratorState.__init__` and leaves CPU ranks as plain data
parallel ones, silently ignoring the FSDP template. `enable` adds the missing branch. It does not choose
a strategy, start ranks or touch anything when the launcher did not ask for both CPU and FSDP.

Source: accelerate 1.15 `state.py` (the list of MULTI_* types that may become FSDP has no MULTI_CPU);
torch 2.13 `fsdp/_init_utils.py` (`_get_compute_device` answers `cpu:0` for modules that live on `cpu`).
"""

import functools
import inspect
import logging
import os
from typing import Any

import torch

from hf_fsdp_recipes.errors import TemplateError

_is_enabled = False


def is_asked_for() -> bool:
    """Tell whether the launcher asked for FSDP on CPU ranks.

    `accelerate launch` passes `use_cpu: true` of an FSDP template on to nobody (accelerate 1.15 sets
    ACCELERATE_USE_CPU in its simple launcher only), so on a machine without an accelerator FSDP means CPU ranks;
    on one with an accelerator, ACCELERATE_USE_CPU=true in the environment says so.
    """
    use_cpu = os.environ.get("ACCELERATE_USE_CPU")
    if use_cpu is None:
        use_cpu = str(not torch.accelerator.is_available())
    return all(is_true(flag) for flag in (use_cpu, os.environ.get("ACCELERATE_USE_FSDP", "false")))


def is_true(flag: str) -> bool:
    """Read an environment flag the way Accelerate does."""
    return flag.lower() in ("true", "1", "yes", "on", "y", "t")


def enable() -> bool:
    """Make Accelerate treat CPU ranks as FSDP ranks, if the launcher asked for that. Idempotent.

    Every rank calls this before its first Accelerator or TrainingArguments; no collective inside.

    Returns:
        Whether FSDP on CPU ranks is on.

    Raises:
        TemplateError: if Accelerate or torch no longer has the places that this leans on.
    """
    global _is_enabled
    if not is_asked_for():
        return False
    os.environ["ACCELERATE_USE_CPU"] = "true"
    # Says on every CPU rank that a kernel which nobody asked for is not there.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if not _is_enabled:
        _patch_accelerate()
        _patch_fsdp1()
        _is_enabled = True
    _promote_existing_state()
    return True


def _patch_accelerate() -> None:
    from accelerate.state import AcceleratorState

    original = AcceleratorState.__init__
    if "fsdp_plugin" not in inspect.signature(original).parameters:
        raise TemplateError(_moved("accelerate", "AcceleratorState.__init__(fsdp_plugin=...)"))

    @functools.wraps(original)
    def init_with_cpu_fsdp(self: Any, *args: Any, **kwargs: Any) -> None:
        was_initialized = self._shared_state.get("_mixed_precision") is not None
        original(self, *args, **kwargs)
        if not was_initialized and kwargs.get("fsdp_plugin") is not None:
            _make_fsdp(self, kwargs["fsdp_plugin"])

    AcceleratorState.__init__ = init_with_cpu_fsdp


def _make_fsdp(state: Any, plugin: Any) -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if state.distributed_type not in (DistributedType.MULTI_CPU, DistributedType.NO):
        return
    if not torch.distributed.is_initialized():
        _start_single_rank_group()
    if state._mixed_precision != "no":
        plugin.set_mixed_precision(state._mixed_precision)
    _unpin_offload(plugin)
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def _start_single_rank_group() -> None:
    # One CPU rank has no process group under Accelerate, but FSDP shards over one even when it has one rank.
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def _unpin_offload(plugin: Any) -> None:
    # Pinned memory needs an accelerator. FSDP1 always pins what it offloads, so there offloading is left out:
    # on CPU ranks the parameters are already where it would put them.
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

    if isinstance(plugin.cpu_offload, CPUOffload):
        plugin.cpu_offload = CPUOffload(offload_params=False)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)


def _promote_existing_state() -> None:
    # An Accelerator that was made before `enable` holds its plugin nowhere: FSDP cannot be added to it any more.
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    state = AcceleratorState._shared_state
    if state and state.get("distributed_type") == DistributedType.MULTI_CPU:
        raise TemplateError(
            "an Accelerator was created before hf_fsdp_recipes could turn on FSDP for CPU ranks. Rule: the template "
            "asks for FSDP with use_cpu, so load_model, ShardedCheckpointCallback or build_trainer must be called "
            "before the first Accelerator or Trainer. Remedy: create the callback or load the model first."
        )


def _patch_fsdp1() -> None:
    from torch.distributed.fsdp import _init_utils

    for name in ("_get_compute_device", "_init_intra_and_inter_node_groups"):
        if not hasattr(_init_utils, name):
            raise TemplateError(_moved("torch", f"torch.distributed.fsdp._init_utils.{name}"))
    get_compute_device = _init_utils._get_compute_device
    init_groups = _init_utils._init_intra_and_inter_node_groups

    @functools.wraps(get_compute_device)
    def get_compute_device_on_cpu(
        module: Any, ignored_params: Any, device_from_device_id: Any, *args: Any
    ) -> torch.device:
        if device_from_device_id is not None and device_from_device_id.type == "cpu":
            return torch.device("cpu")
        device = get_compute_device(module, ignored_params, device_from_device_id, *args)
        return torch.device("cpu") if device.type == "cpu" else device

    @functools.wraps(init_groups)
    def init_groups_by_local_ranks(global_group: Any, num_devices_per_node: int) -> Any:
        # torch.cpu counts one device a node; on CPU ranks a node's width is the number of ranks on it.
        if torch.distributed.get_backend(global_group) == "gloo":
            num_devices_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_devices_per_node))
        return init_groups(global_group, num_devices_per_node)

    _init_utils._get_compute_device = get_compute_device_on_cpu
    _init_utils._init_intra_and_inter_node_groups = init_groups_by_local_ranks


def _moved(package: str, place: str) -> str:
    from importlib.metadata import version

    return (
        f"{package} {version(package)} has no {place}, which FSDP on CPU ranks leans on. Rule: this package was tried "
        f"with accelerate 1.15 and torch 2.11 to 2.13. Remedy: install one of those, or run on GPUs."
    )
