"""How a model is cut, as an Accelerate config says it: a shipped template by name, or anybody's file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.configs.templates import Template
from hf_fsdp_recipes.errors import PlanError


@dataclass(frozen=True)
class Strategy:
    """The parts of an Accelerate FSDP config that decide over memory and communication.

    Attributes:
        name: of the template or file.
        version: FSDP's, 1 or 2.
        sharding: full_shard, shard_grad_op, hybrid_shard, hybrid_shard_zero2 or no_shard.
        is_offloaded: parameters, gradients and optimizer on the host.
        min_num_params: parameters a unit must exceed; None to wrap by layer class.
        wrap_class: layer classes to wrap, comma-separated; None for what the model declares.
        precision: the template's, as Accelerate spells it.
        on_cpu: for CPU ranks.
        usual_gpus, usual_nodes: the counts in the file.
    """

    name: str = "fsdp2_full_shard"
    version: int = 2
    sharding: str = "full_shard"
    is_offloaded: bool = False
    min_num_params: int | None = None
    wrap_class: str | None = None
    precision: str = "bf16"
    on_cpu: bool = False
    usual_gpus: int = 8
    usual_nodes: int = 1

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is copied between nodes and cut inside them."""
        return self.sharding.startswith("hybrid")

    @property
    def keeps_whole(self) -> bool:
        """Whether units stay gathered from forward to backward."""
        return self.sharding in ("shard_grad_op", "hybrid_shard_zero2")


def find_strategy(name_or_file: str) -> Strategy:
    """Read a shipped template's name, or the path of an Accelerate config.

    Raises:
        TemplateError: neither, or not YAML.
        PlanError: a config that does not shard.
    """
    return read_strategy(validate.read_config(name_or_file), Path(name_or_file).stem)


def from_template(template: Template) -> Strategy:
    """Return a template's strategy without reading its file."""
    return Strategy(
        name=template.name,
        version=template.version,
        sharding=template.strategy,
        is_offloaded=template.is_offloaded,
        min_num_params=template.min_num_params,
        wrap_class=template.wrap_class,
        precision="no" if template.on_cpu else "bf16",
        on_cpu=template.on_cpu,
        usual_gpus=template.num_processes,
        usual_nodes=template.num_machines,
    )


def read_strategy(config: dict[str, Any], name: str) -> Strategy:
    """Read an Accelerate config's values.

    Raises:
        PlanError: it does not turn FSDP on.
    """
    fsdp = {str(key).removeprefix("fsdp_"): value for key, value in (config.get("fsdp_config") or {}).items()}
    if config.get("distributed_type") != "FSDP" or not fsdp:
        raise PlanError(f"{name}: distributed_type {config.get('distributed_type')}. Rule: an FSDP config.")
    version = int(fsdp.get("version", 1))
    is_by_size = str(fsdp.get("auto_wrap_policy", "")).upper() == "SIZE_BASED_WRAP"
    return Strategy(
        name=name,
        version=version,
        sharding=_sharding(config, fsdp, version),
        is_offloaded=validate.is_true(fsdp.get("offload_params", False)),
        min_num_params=int(fsdp.get("min_num_params", 10**8)) if is_by_size else None,
        wrap_class=fsdp.get("transformer_layer_cls_to_wrap"),
        precision=str(config.get("mixed_precision", "no")),
        on_cpu=validate.is_true(config.get("use_cpu", False)),
        usual_gpus=int(config.get("num_processes", 1)),
        usual_nodes=int(config.get("num_machines", 1)),
    )


def _sharding(config: dict[str, Any], fsdp: dict[str, Any], version: int) -> str:
    if version == 1:
        return str(fsdp.get("sharding_strategy", "FULL_SHARD")).lower()
    reshards = validate.is_true(fsdp.get("reshard_after_forward", True))
    copies = (config.get("parallelism_config") or {}).get("parallelism_config_dp_replicate_size", 1)
    if int(copies) > 1:
        return "hybrid_shard" if reshards else "hybrid_shard_zero2"
    return "full_shard" if reshards else "shard_grad_op"
