"""The units of a tiny model that Accelerate shards on real ranks, for the planner's tests."""

from typing import Any


def units_of(kind: str, lora_rank: int) -> tuple[list[int], int]:
    """Return the sizes of the units and of this rank's shard, in elements. Every rank runs this."""
    from hf_fsdp_recipes.patches import cpu_ranks, registry

    cpu_ranks.enable()
    registry.apply("size wrap")
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tests.conftest import tiny_config

    model: Any = AutoModelForCausalLM.from_config(tiny_config(kind))
    if lora_rank:
        model = get_peft_model(model, LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    accelerator = Accelerator()
    if accelerator.is_fsdp2:
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return _units_of_fsdp2(model)
    if lora_rank:
        from transformers.distributed.fsdp import update_fsdp_plugin_peft

        update_fsdp_plugin_peft(model, accelerator)
    return _units_of_fsdp1(accelerator.prepare(model))


def _units_of_fsdp2(model: Any) -> tuple[list[int], int]:
    from torch.distributed.fsdp import FSDPModule

    groups = {
        id(m._get_fsdp_state()._fsdp_param_group): m._get_fsdp_state()
        for m in model.modules()
        if isinstance(m, FSDPModule)
    }
    sizes = [
        sum(parameter._orig_size.numel() for parameter in state._fsdp_param_group.fsdp_params)
        for state in groups.values()
        if state._fsdp_param_group is not None
    ]
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    return sorted(size for size in sizes if size), local


def _units_of_fsdp1(model: Any) -> tuple[list[int], int]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    handles = [m._handle for m in FullyShardedDataParallel.fsdp_modules(model) if m._handle is not None]
    sizes = [sum(shape.numel() for shape in handle.flat_param._shapes) for handle in handles]
    return sorted(sizes), sum(handle.flat_param.numel() for handle in handles)
