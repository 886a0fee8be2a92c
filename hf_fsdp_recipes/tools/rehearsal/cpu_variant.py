"""Turns anybody's Accelerate FSDP config into one for CPU ranks of this machine: device and counts, nothing else."""

import copy
from typing import Any

RANKS_OF_A_HYBRID = 4  # two copies of two shards
WITHIN_A_NODE = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


def to_cpu_ranks(config: dict[str, Any], num_ranks: int = 2) -> dict[str, Any]:
    """Return a config for CPU ranks on one node that shards, wraps, offloads and casts as the given one does.

    FSDP1's hybrid strategies copy between nodes, which one launcher cannot have: they become the strategy that
    they use inside a node.

    Args:
        config: as read from YAML; it is not changed.
        num_ranks: ranks to start; a hybrid mesh gets four.
    """
    config = copy.deepcopy(config)
    fsdp = config["fsdp_config"]
    if "parallelism_config" in config:
        num_ranks = RANKS_OF_A_HYBRID
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_dp_shard_size": num_ranks // 2,
        }
    strategy = fsdp.get("fsdp_sharding_strategy")
    if strategy in WITHIN_A_NODE:
        fsdp["fsdp_sharding_strategy"] = WITHIN_A_NODE[strategy]
    for key in ("rdzv_backend", "dynamo_config", "main_process_ip", "main_process_port", "machine_rank"):
        config.pop(key, None)
    return config | {"use_cpu": True, "num_machines": 1, "num_processes": num_ranks}
