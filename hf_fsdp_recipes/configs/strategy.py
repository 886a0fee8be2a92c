"""Reads how an Accelerate config shards a model."""

from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_recipes.configs.validate import Section, read_config
from hf_fsdp_recipes.environment import is_true
from hf_fsdp_recipes.errors import TemplateError

# In the order of torch's ShardingStrategy, because FSDP1 configs may name a strategy by its number, counted from 1.
FSDP1_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")


@dataclass(frozen=True)
class Strategy:
    """The parts of an Accelerate FSDP config that determine memory and communication."""

    name: str = "fsdp2_full_shard"  # name of the template or file
    version: int = 2  # FSDP version
    sharding: str = "full_shard"  # or shard_grad_op, hybrid_shard, hybrid_shard_zero2, no_shard
    is_offloaded: bool = False  # keeps parameters, gradients and optimizer state in host memory
    min_num_params: int | None = None  # parameter count that an FSDP unit must exceed; None to wrap by layer class
    wrap_class: str | None = None  # comma-separated layer classes to wrap; None for the class that the model declares
    precision: str = "bf16"  # `mixed_precision`, as Accelerate spells it
    on_cpu: bool = False
    num_processes: int = 8  # ranks on all nodes
    num_machines: int = 1

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is sharded inside each node and replicated across nodes."""
        return self.sharding.startswith("hybrid")

    @property
    def reshards_after_forward(self) -> bool:
        """Whether parameters are freed after forward and gathered again in backward."""
        return self.sharding not in ("shard_grad_op", "hybrid_shard_zero2")


def find_strategy(name_or_file: str) -> Strategy:
    """Return the strategy of the template or Accelerate config file with this name; raise a TemplateError if there is none."""
    return read_strategy(read_config(name_or_file), Path(name_or_file).stem)


def read_strategy(config: Section, name: str) -> Strategy:
    """Return the strategy of a parsed Accelerate config; raise a TemplateError if it does not turn on FSDP."""
    fsdp = _fsdp_keys(config)
    if config.get("distributed_type") != "FSDP" or not fsdp:
        raise TemplateError(
            f"{name} does not turn on FSDP (distributed_type: {config.get('distributed_type')}). Use a config with "
            f"distributed_type: FSDP and an fsdp_config."
        )
    wrap_class = fsdp.get("transformer_layer_cls_to_wrap")
    if wrap_class is not None and not isinstance(wrap_class, str):
        raise TemplateError(f"{name}: transformer_layer_cls_to_wrap is {wrap_class}. Write one string: A,B.")
    is_by_size = str(fsdp.get("auto_wrap_policy", "")).upper() == "SIZE_BASED_WRAP"
    return Strategy(
        name=name,
        version=int(fsdp.get("version", 1)),
        sharding=read_sharding(config),
        is_offloaded=is_true(fsdp.get("offload_params", False)),
        min_num_params=int(fsdp.get("min_num_params", 10**8)) if is_by_size else None,
        wrap_class=wrap_class,
        precision=str(config.get("mixed_precision", "no")),
        on_cpu=is_true(config.get("use_cpu", False)),
        num_processes=int(config.get("num_processes", 1)),
        num_machines=int(config.get("num_machines", 1)),
    )


def read_sharding(config: Section) -> str:
    """Return the sharding strategy of a parsed Accelerate config, such as `full_shard` or `shard_grad_op`."""
    fsdp = _fsdp_keys(config)
    if str(fsdp.get("version", 1)) == "1":
        strategy = str(fsdp.get("sharding_strategy", "full_shard")).lower()
        return FSDP1_STRATEGIES[int(strategy) - 1] if strategy in ("1", "2", "3", "4", "5") else strategy
    reshards = is_true(fsdp.get("reshard_after_forward", True))
    replicas = int((config.get("parallelism_config") or {}).get("parallelism_config_dp_replicate_size", 1))
    if replicas > 1:
        return "hybrid_shard" if reshards else "hybrid_shard_zero2"
    return "full_shard" if reshards else "shard_grad_op"


def _fsdp_keys(config: Section) -> Section:
    return {str(key).removeprefix("fsdp_"): value for key, value in (config.get("fsdp_config") or {}).items()}
