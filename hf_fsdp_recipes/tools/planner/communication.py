"""Bytes that one optimizer step moves between ranks, and how long communication and compute take.

In an all-gather over n ranks, each rank receives (n - 1) / n of the data. Data from other nodes enters a node
only once, over the node's interconnect. Latency and contention are not modeled, and compute is assumed to reach a fixed
share of the peak. Use the seconds to compare strategies, not to predict step times.
"""

from dataclasses import dataclass

from hf_fsdp_recipes.metrics.flops import TokenCounts
from hf_fsdp_recipes.tools.planner.fsdp_units import FsdpUnit
from hf_fsdp_recipes.tools.planner.memory_planner import MemoryPlan
from hf_fsdp_recipes.tools.planner.training_job import TrainingJob

COMPUTE_EFFICIENCY = 0.4  # assumed share of the peak FLOP/s


@dataclass(frozen=True)
class StepTraffic:
    """Communication and compute of one optimizer step."""

    gpu_bytes: int  # bytes that one GPU receives from the other GPUs of its node
    node_bytes: int  # bytes that one node receives from the other nodes
    seconds: float  # time of communication
    compute_seconds: float | None  # compute time at 40% of the peak FLOP/s; None if the model's FLOPs cannot be counted

    @property
    def step_seconds(self) -> float:
        """Time of a step if communication and compute overlap perfectly."""
        return max(self.seconds, self.compute_seconds or 0.0)


def estimate_traffic(plan: MemoryPlan) -> StepTraffic:
    """Estimate the communication and compute of one optimizer step of the planned run."""
    job, cluster = plan.job, plan.job.cluster
    gathered = sum(_num_gathers(unit, job) * unit.unsharded_bytes for unit in plan.units)
    num_reductions = job.accumulation if job.sync_each_batch else 1
    gradient_bytes = sum(unit.unsharded_gradient_bytes for unit in plan.units)
    reduced = num_reductions * round(gradient_bytes * job.reduction_factor)
    gpu_share = (cluster.ranks_per_node - 1) / cluster.ranks_per_node
    node_share = (cluster.num_nodes - 1) / cluster.num_nodes
    if job.strategy.is_hybrid:
        gpu_bytes, node_bytes = (gathered + reduced) * gpu_share, 2 * reduced * node_share
    else:
        moved = 2 * reduced if job.strategy.sharding == "no_shard" else gathered + reduced
        gpu_bytes, node_bytes = moved * gpu_share, moved * node_share
    gpu_seconds, node_seconds = gpu_bytes / cluster.gpu_bytes_per_second, node_bytes / cluster.node_bytes_per_second
    # With hybrid sharding, collectives within and between nodes run one after the other. Without hybrid sharding, one
    # collective uses both kinds of links at the same time.
    seconds = gpu_seconds + node_seconds if job.strategy.is_hybrid else max(gpu_seconds, node_seconds)
    flops = step_flops(plan)
    compute_seconds = None if flops is None else flops / (cluster.gpu_flops * COMPUTE_EFFICIENCY)
    return StepTraffic(round(gpu_bytes), round(node_bytes), seconds, compute_seconds)


def _num_gathers(unit: FsdpUnit, job: TrainingJob) -> int:
    """Return how often a step gathers a unit: once per micro-batch, twice if forward frees it, never without sharding."""
    if job.strategy.sharding == "no_shard" or job.num_shards == 1:
        return 0
    return job.accumulation * (2 if unit.reshards_after_forward else 1)


def step_flops(plan: MemoryPlan) -> int | None:
    """Return the FLOPs of one rank's step, including recomputation; None if they cannot be counted."""
    job, flops = plan.job, plan.flops
    if flops is None:
        return None
    full = TokenCounts.of([job.length] * job.batch * job.accumulation, flops.window)
    causal_pairs = full.pairs // 2  # causal attention kernels skip the masked half of the pairs
    work = TokenCounts(full.tokens, causal_pairs, min(causal_pairs, full.window_pairs))
    return flops.hardware(work) if job.gradient_checkpointing else flops.training(work)
