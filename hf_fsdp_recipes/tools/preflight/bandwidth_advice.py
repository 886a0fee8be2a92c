"""What the measured bandwidth says about a template's sharding strategy.

The rule: transfers hide behind computing as long as they are no slower. A step of a rank that sees T tokens computes
6 T operations a parameter; full sharding moves each parameter 3 times over the slowest link (gathered for forward and
for backward, its gradient scattered), so the link has to carry 3 x bytes / (6 T) of the rank's operations a second,
whatever the size of the model.

Source: Kaplan et al. 2020 (6 operations a parameter and token); Rajbhandari et al. 2020, ZeRO, section 7 (3 volumes
with parameters sharded, 2 without).
"""

from dataclasses import dataclass
from typing import Any

from hf_fsdp_recipes.configs.strategy import read_sharding

OPERATIONS_PER_TOKEN = 6
PASSES = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2}


@dataclass(frozen=True)
class Load:
    """What a rank computes and moves.

    Attributes:
        tokens: of one forward and backward of one rank; `tokens_source` says where the number is from.
        flops_per_second: of a matrix product on the slowest rank.
        item_bytes: of a parameter on the wire.
    """

    tokens: int
    tokens_source: str
    flops_per_second: float
    item_bytes: int


def as_launched(config: dict[str, Any], num_nodes: int, ranks_per_node: int) -> dict[str, Any]:
    """Return an Accelerate config with the counts that the launcher gives it on the command line."""
    launched = config | {"num_machines": num_nodes, "num_processes": num_nodes * ranks_per_node}
    if "hybrid" in read_sharding(config) and "parallelism_config" in config:
        sizes = {
            "parallelism_config_dp_replicate_size": num_nodes,
            "parallelism_config_dp_shard_size": ranks_per_node,
        }
        launched["parallelism_config"] = config["parallelism_config"] | sizes
    return launched


def read_load(config: dict[str, Any], recipe: dict[str, Any] | None, flops_per_second: float) -> Load:
    """Return what a rank computes and moves; TRL's defaults where the recipe says nothing."""
    rows, length = 8, 1024  # trl 1.16 SFTConfig
    source = "TRL's defaults, no recipe was given"
    if recipe is not None:
        rows = int(recipe.get("per_device_train_batch_size", rows))
        length = int(recipe.get("max_length") or length)
        source = "the recipe, TRL's defaults where it is silent"
    item_bytes = 4 if str(config.get("mixed_precision", "no")) in ("no", "False") else 2
    return Load(rows * length, source, flops_per_second, item_bytes)


def needed_bytes_per_second(strategy: str, load: Load) -> float:
    """Return what the slowest link has to carry so that computing does not wait for it."""
    passes = PASSES.get(strategy, 2)
    return passes * load.item_bytes * load.flops_per_second / (OPERATIONS_PER_TOKEN * load.tokens)


def hybrid_gain(strategy: str, between: float, within: float, num_nodes: int, ranks_per_node: int) -> float:
    """Return how many times less time transfers take if parameters stay inside a node, per micro step.

    Between nodes an all-reduce of the gradients remains: two volumes, (nodes - 1) / nodes of each.
    """
    passes = PASSES[strategy]
    ranks = num_nodes * ranks_per_node
    flat = passes * (ranks - 1) / ranks / between
    hybrid = passes * (ranks_per_node - 1) / ranks_per_node / within + 2 * (num_nodes - 1) / num_nodes / between
    return flat / hybrid


def advise(
    strategy: str, load: Load, within: float | None, between: float | None, num_nodes: int, ranks_per_node: int
) -> str:
    """Say in one line what the measured all-gather bandwidths (bytes a second) mean for a strategy."""
    if within is None and between is None:
        return "one rank: nothing to move"
    crosses = between is not None and not strategy.startswith("hybrid")
    link, where = (between, "between nodes") if crosses else (within, "within nodes")
    if strategy == "no_shard" or link is None:
        return f"{strategy}: no parameters are moved; not judged"
    needed = needed_bytes_per_second(strategy, load)
    basis = (
        f"{strategy} needs {_rate(needed)} {where} to hide behind computing ({PASSES.get(strategy, 2)} x {load.item_bytes} "
        f"bytes a parameter against {OPERATIONS_PER_TOKEN} operations a token, {load.tokens:,} tokens a rank from "
        f"{load.tokens_source}, {load.flops_per_second / 1e12:,.2f} TFLOP/s measured); measured {_rate(link)}"
    )
    if link >= needed:
        return f"{basis}: enough"
    text = f"{basis}: {needed / link:.1f} times too slow"
    if crosses and between is not None and within is not None and ranks_per_node > 1:
        gain = hybrid_gain(strategy, between, within, num_nodes, ranks_per_node)
        if gain > 1.2:
            better = "hybrid_shard" if strategy == "full_shard" else "hybrid_shard_zero2"
            return (
                f"{text}. Take {better} if the model fits into one node: with {_rate(within)} within, transfers take "
                f"{gain:.1f} times less time"
            )
    fewer = "; shard_grad_op moves a third less, if the model fits" if strategy == "full_shard" else ""
    return f"{text}. More tokens a rank (batch size, length) help, and a faster wire{fewer}"


def describe(
    config: dict[str, Any],
    recipe: dict[str, Any] | None,
    results: list[list[dict[str, Any]]],
    names: list[str],
    num_nodes: int,
    ranks_per_node: int,
) -> list[str]:
    """Return the table's lines about bandwidth, the advice last; `results` holds one dict a local rank."""
    lines, rates = [], {}
    for where in ("within", "between"):
        known = [(each[0][where], name) for each, name in zip(results, names, strict=True) if each[0][where]]
        if known:
            slowest, name = min(known, key=lambda each: each[0]["all_gather"])
            rates[where] = slowest["all_gather"]
            culprit = f" (slowest: {name})" if where == "within" and num_nodes > 1 else ""
            figures = f"all-gather {_rate(slowest['all_gather'])}, all-reduce {_rate(slowest['all_reduce'])}"
            lines.append(f"{where:<10}{figures} {where} nodes{culprit}")
    if config:
        flops_per_second = min(each["flops_per_second"] for local in results for each in local)
        load = read_load(config, recipe, flops_per_second)
        text = advise(read_sharding(config), load, rates.get("within"), rates.get("between"), num_nodes, ranks_per_node)
        lines.append(f"{'strategy':<10}{text}")
    return lines


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:,.2f} GB/s" if bytes_per_second >= 1e8 else f"{bytes_per_second / 1e6:,.1f} MB/s"
