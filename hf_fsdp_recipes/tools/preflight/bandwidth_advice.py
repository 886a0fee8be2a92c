"""Advises on a template's sharding strategy, based on the measured bandwidth.

Transfers are hidden behind computation unless they take longer. In a step over T tokens, a rank computes 6 T FLOPs per
parameter. Full sharding moves 3 values per parameter over the slowest link: the parameter for forward, the parameter again
for backward, and its gradient. That link thus needs a bandwidth of 3 x bytes per value / (6 T) x the
rank's FLOP/s, regardless of model size.

Source: Kaplan et al. 2020 (6 FLOPs per parameter and token); Rajbhandari et al. 2020, ZeRO, section 7 (a rank moves 3 values
per parameter if parameters are sharded, else 2).
"""

import statistics
from dataclasses import dataclass
from typing import TypedDict

from hf_fsdp_recipes.configs.strategy import read_sharding
from hf_fsdp_recipes.configs.validate import Section
from hf_fsdp_recipes.tools.preflight.node_info import Row

NUM_FLOPS = 6  # per parameter and token
PASSES = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2}
MIN_HYBRID_GAIN = 1.2  # do not advise hybrid sharding for a smaller gain
SLOW_FRACTION = 0.75  # a rate below this share of the median is slow; healthy nodes of the same kind differ less


Bandwidths = dict[str, float]  # bus bandwidth of all_gather and all_reduce, in bytes per second


class WorkerRates(TypedDict):
    """What one rank measured. `links` has "within" if nodes have several ranks, "between" if there are several nodes.

    With three nodes or more, `partners` maps the numbers of some other nodes to the all-gather bandwidth with them.
    """

    links: dict[str, Bandwidths]
    partners: dict[str, float]
    flops_per_second: float


@dataclass(frozen=True)
class RankLoad:
    """What a rank computes per micro-batch, and how many bytes it moves per parameter."""

    num_tokens: int  # tokens per rank in one forward and backward pass
    tokens_source: str  # where the number of tokens comes from
    flops_per_second: float  # speed of a matrix product on the slowest rank
    parameter_bytes: int  # size of one parameter when gathered
    gradient_bytes: int = 4  # size of one gradient when reduced


def apply_launch_counts(config: Section, num_nodes: int, ranks_per_node: int) -> Section:
    """Return a copy of an Accelerate config with the node and rank counts of this launch, which override the file's."""
    launched = config | {"num_machines": num_nodes, "num_processes": num_nodes * ranks_per_node}
    if "hybrid" in read_sharding(config) and "parallelism_config" in config:
        sizes = {
            "parallelism_config_dp_replicate_size": num_nodes,
            "parallelism_config_dp_shard_size": ranks_per_node,
        }
        launched["parallelism_config"] = config["parallelism_config"] | sizes
    return launched


def read_load(config: Section, recipe: Section, flops_per_second: float) -> RankLoad:
    """Return what a rank computes and moves, with TRL's defaults for keys that the recipe lacks."""
    num_rows = int(recipe.get("per_device_train_batch_size", 8))  # trl 1.16 SFTConfig
    max_length = int(recipe.get("max_length") or 1024)
    source = "the recipe and TRL's defaults" if recipe else "TRL's defaults, as no recipe was given"
    parameter_bytes = 4 if str(config.get("mixed_precision", "no")) in ("no", "False") else 2
    gradient_bytes = parameter_bytes if recipe.get("reduce_dtype") == "bfloat16" else 4
    return RankLoad(num_rows * max_length, source, flops_per_second, parameter_bytes, gradient_bytes)


def hybrid_gain(
    moved_bytes: int, load: RankLoad, between: float, within: float, num_nodes: int, num_local: int
) -> float:
    """Return how many times faster a micro-batch's transfers are with hybrid sharding than with sharding over all ranks.

    Hybrid sharding gathers parameters only among the `num_local` ranks of a node. Between nodes, only an all-reduce of
    the gradients remains. This all-reduce moves 2 * (nodes - 1) / nodes times the gradients' bytes.
    """
    num_ranks = num_nodes * num_local
    flat = moved_bytes * (num_ranks - 1) / num_ranks / between
    within_nodes = moved_bytes * (num_local - 1) / num_local / within
    return flat / (within_nodes + 2 * load.gradient_bytes * (num_nodes - 1) / num_nodes / between)


def advise(
    strategy: str, load: RankLoad, within: float | None, between: float | None, num_nodes: int, ranks_per_node: int
) -> str:
    """Return a line that compares measured all-gather bandwidths (bytes per second) with what a strategy needs."""
    if within is None and between is None:
        return "one rank: nothing to transfer"
    is_between = between is not None and not strategy.startswith("hybrid")
    link, where = (between, "between nodes") if is_between else (within, "within nodes")
    if strategy == "no_shard" or link is None:
        return f"{strategy}: no parameters are transferred, so bandwidth is not compared"
    num_gathers = PASSES.get(strategy, 2) - 1
    moved_bytes = (
        num_gathers * load.parameter_bytes + load.gradient_bytes
    )  # per parameter in a micro-batch that reduces gradients
    needed = moved_bytes * load.flops_per_second / (NUM_FLOPS * load.num_tokens)
    comparison = (
        f"{strategy} needs {_format_rate(needed)} {where} to hide transfers behind computation "
        f"({num_gathers} x {load.parameter_bytes} + {load.gradient_bytes} bytes per parameter, {NUM_FLOPS} FLOPs "
        f"per parameter and token, {load.num_tokens:,} tokens per rank from {load.tokens_source}, "
        f"{load.flops_per_second / 1e12:,.2f} TFLOP/s measured); measured {_format_rate(link)}"
    )
    if link >= needed:
        return f"{comparison}: sufficient"
    comparison = f"{comparison}: {needed / link:.1f} times too slow"
    if is_between and within is not None and ranks_per_node > 1:
        gain = hybrid_gain(moved_bytes, load, link, within, num_nodes, ranks_per_node)
        if gain > MIN_HYBRID_GAIN:
            better = "hybrid_shard" if strategy == "full_shard" else "hybrid_shard_zero2"
            return (
                f"{comparison}. Use {better} if the model fits on one node: at {_format_rate(within)} within nodes, transfers "
                f"become {gain:.1f} times faster"
            )
    alternative = ", or shard_grad_op, which moves less, if the model fits" if strategy == "full_shard" else ""
    return f"{comparison}. Use more tokens per rank (batch size, sequence length) or a faster network{alternative}"


def describe(
    config: Section,
    recipe: Section,
    rates_by_node: list[list[WorkerRates]],
    names: list[str],
    ranks_per_node: int,
) -> list[Row]:
    """Return the rows of the preflight table about bandwidth and slow nodes; with a template, also advice on its strategy."""
    rows: list[Row] = [("warning", warning) for warning in find_slow(rates_by_node, names)]
    gather_rates: dict[str, float] = {}
    for link in rates_by_node[0][0]["links"]:
        measured = [(rates[0]["links"][link], name) for rates, name in zip(rates_by_node, names, strict=True)]
        slowest, name = min(measured, key=lambda each: each[0]["all_gather"])
        gather_rates[link] = slowest["all_gather"]
        text = f"all-gather {_format_rate(slowest['all_gather'])}, all-reduce {_format_rate(slowest['all_reduce'])}"
        rows.append((link, f"{text} {link} nodes" + (f" (slowest: {name})" if link == "within" else "")))
    if config:
        load = read_load(config, recipe, min(rank["flops_per_second"] for rates in rates_by_node for rank in rates))
        within, between = gather_rates.get("within"), gather_rates.get("between")
        rows.append(("strategy", advise(read_sharding(config), load, within, between, len(names), ranks_per_node)))
    return rows


def find_slow(rates_by_node: list[list[WorkerRates]], names: list[str]) -> list[str]:
    """Return a warning for each node that is slow with all of its partners, and for each rank that computes slowly."""
    # A healthy node is fast with at least one partner, even if another partner is slow.
    best = [max(rates[0]["partners"].values(), default=0.0) for rates in rates_by_node]
    typical = statistics.median(best)
    warnings = [
        f"{name} is slow: all-gather with one other node reaches {_format_rate(rate)} at most, but {_format_rate(typical)} on "
        f"a typical node. Check its network ports, or leave it out (sbatch --exclude)."
        for name, rate in zip(names, best, strict=True)
        if rate < SLOW_FRACTION * typical
    ]
    flops = [rates["flops_per_second"] for node in rates_by_node for rates in node]
    typical = statistics.median(flops)
    return warnings + [
        f"rank {rank} of {names[rank // len(rates_by_node[0])]} computes slowly: {each / 1e12:,.2f} TFLOP/s, but "
        f"{typical / 1e12:,.2f} TFLOP/s on a typical rank. Check what else runs there, the clocks and the temperature."
        for rank, each in enumerate(flops)
        if each < SLOW_FRACTION * typical
    ]


def _format_rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:,.2f} GB/s" if bytes_per_second >= 1e8 else f"{bytes_per_second / 1e6:,.1f} MB/s"
