"""Bytes over the wires in one step, the seconds they take, and what each strategy would cost instead.

Counts what must arrive: of a gather over n ranks each rank lacks (n - 1) / n, and what a node lacks has to enter it
once, through its share of the interconnect. Latency, contention and uneven rings are not modelled, and computing
is taken at a fixed share of the peak; so seconds order strategies, they do not promise step times.
"""

from dataclasses import dataclass
from typing import Any

from hf_fsdp_recipes.tools.planner.job import Job
from hf_fsdp_recipes.tools.planner.meta_model import Weight
from hf_fsdp_recipes.tools.planner.rank_memory import Plan
from hf_fsdp_recipes.tools.planner.units import Unit

REACHED_SHARE = 0.4  # of the peak arithmetic: assumed


@dataclass(frozen=True)
class Traffic:
    """What one optimizer step moves and takes.

    Attributes:
        gpu_bytes: into one GPU from the others of its node.
        node_bytes: into one node from the others.
        seconds: that this takes.
        compute_seconds: that the arithmetic takes at 40 % of the peak.
    """

    gpu_bytes: int
    node_bytes: int
    seconds: float
    compute_seconds: float

    @property
    def step_seconds(self) -> float:
        """Seconds of a step in which the two overlap as well as they can."""
        return max(self.seconds, self.compute_seconds)


def traffic(plan: Plan, config: Any) -> Traffic:
    """Return what a step of a plan moves."""
    job, machine = plan.job, plan.job.machine
    gathered = sum(_gathers(unit, job) * unit.whole_bytes(job.shard_ranks, job.strategy.version) for unit in plan.units)
    reductions = job.accumulation if job.sync_each_batch else 1
    reduced = reductions * sum(unit.gradient_bytes() for unit in plan.units)
    nodes, ranks = machine.num_nodes, machine.ranks_on_node
    if job.strategy.is_hybrid:
        gpu_bytes = (gathered + reduced) * (ranks - 1) / ranks
        node_bytes = 2 * reduced * (nodes - 1) / nodes
        seconds = gpu_bytes / machine.gpu_bytes_per_second + node_bytes / machine.node_bytes_per_second
    else:
        moved = 2 * reduced if job.strategy.sharding == "no_shard" else gathered + reduced
        gpu_bytes = moved * (ranks - 1) / ranks
        node_bytes = moved * (nodes - 1) / nodes
        seconds = max(gpu_bytes / machine.gpu_bytes_per_second, node_bytes / machine.node_bytes_per_second)
    compute = step_flops(plan, config) / (machine.gpu_flops * REACHED_SHARE)
    return Traffic(round(gpu_bytes), round(node_bytes), seconds, compute)


def _gathers(unit: Unit, job: Job) -> int:
    """Count how often a step gathers a unit: once a micro-batch, and once more where it is freed in between."""
    if job.strategy.sharding == "no_shard" or job.shard_ranks == 1:
        return 0
    return job.accumulation * (2 if unit.reshards else 1)


def step_flops(plan: Plan, config: Any) -> float:
    """Return the arithmetic of one rank's step: matrix products of the weights that a token meets, and attention."""
    job = plan.job
    text = config.get_text_config()
    tokens = job.batch * job.length * job.accumulation
    heads = getattr(text, "num_attention_heads", 1)
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    layers = getattr(text, "num_hidden_layers", 1)
    attention = 2 * 2 * tokens * job.length * heads * head_width * layers / 2  # causal: half of the scores
    forward = 2 * tokens * sum(_met_elements(w, text) for u in plan.units for w in u.weights) + attention
    passes = 2 if job.lora_rank else 3  # frozen weights need no gradient of their own
    return forward * (passes + (1 if job.checkpointing else 0))


def _met_elements(weight: Weight, text: Any) -> float:
    """Return how many of a weight's elements a token is multiplied with."""
    if weight.is_looked_up or len(weight.shape) < 2:
        return 0
    if len(weight.shape) == 3:  # experts, stacked
        return weight.num_elements * (getattr(text, "num_experts_per_tok", None) or weight.shape[0]) / weight.shape[0]
    return weight.num_elements
