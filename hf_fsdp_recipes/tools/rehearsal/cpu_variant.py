"""Adapt an Accelerate FSDP config to CPU ranks of this machine."""

import copy
from typing import Any

NUM_HYBRID_RANKS = 4  # two replicas of two shards
STRATEGY_WITHIN_NODE = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


def to_cpu_ranks(config: dict[str, Any], num_ranks: int = 2) -> dict[str, Any]:
    """Return a copy of a config with only device and rank counts changed; sharding, wrapping and dtypes stay.

    FSDP1's hybrid strategies replicate across nodes, and here there is only one, so they become the strategy that they
    use within a node. An FSDP2 hybrid mesh gets four ranks, whatever `num_ranks` is.
    """
    config = copy.deepcopy(config)
    fsdp = config["fsdp_config"]
    if "parallelism_config" in config:
        num_ranks = NUM_HYBRID_RANKS
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_dp_shard_size": num_ranks // 2,
        }
    strategy = fsdp.get("fsdp_sharding_strategy")
    if strategy in STRATEGY_WITHIN_NODE:
        fsdp["fsdp_sharding_strategy"] = STRATEGY_WITHIN_NODE[strategy]
    for key in ("rdzv_backend", "dynamo_config", "main_process_ip", "main_process_port", "machine_rank"):
        config.pop(key, None)
    return config | {"use_cpu": True, "num_machines": 1, "num_processes": num_ranks}
