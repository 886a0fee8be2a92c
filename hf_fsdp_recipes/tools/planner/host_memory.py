"""Host memory of one node: while loading, training, saving and exporting; here, and as the stack does it alone.

The figures of this package come from docs/measured.md; the sizes from the plan.
"""

from dataclasses import dataclass

from hf_fsdp_recipes.export.write_export import CHUNK_BYTES
from hf_fsdp_recipes.loading.distribute import BUCKET_BYTES
from hf_fsdp_recipes.tools.planner.rank_memory import OPTIMIZER, PARAMETERS, Plan

PROCESS_BYTES = 930_000_000  # a rank before it loads anything: document 004 printed 926 and 933 MB
LOADING_BYTES = 60_000_000  # beside shard and buckets, per rank, with either source: docs/measured.md
QUANTIZING_BYTES = 500_000_000  # the same while 4-bit weights are made, over the largest weight: docs/measured.md


@dataclass(frozen=True)
class HostNeed:
    """Bytes that one node's host needs at one stage.

    Attributes:
        stage: load, train, save or export.
        ours_bytes, stock_bytes: with this package, and with transformers and Accelerate alone.
        why: where the numbers come from.
    """

    stage: str
    ours_bytes: int
    stock_bytes: int
    why: str


def host_needs(plan: Plan) -> list[HostNeed]:
    """Return what each stage needs of a node."""
    job, ranks = plan.job, plan.job.machine.ranks_on_node
    version, num_ranks = job.strategy.version, job.shard_ranks
    base = ranks * (PROCESS_BYTES + sum(plan.host.values()))
    shard = sum(unit.stored_bytes(num_ranks, version) for unit in plan.units)
    whole = round(sum(w.num_elements * w.stored_bytes for unit in plan.units for w in unit.weights))
    trained = round(sum(w.num_elements * w.stored_bytes for unit in plan.units for w in unit.weights if w.is_trained))
    loaded = whole if job.is_4bit else plan.num_parameters * job.dtype.itemsize
    optimizer = plan.valley.get(OPTIMIZER, plan.host.get(OPTIMIZER, 0))
    saved = optimizer + (_trained_shard(plan) if job.lora_rank else shard)
    state = trained + round(optimizer * num_ranks)
    start = ranks * (PROCESS_BYTES + plan.host.get(PARAMETERS, 0))
    if job.on_cpu:  # a rank's own memory is the host's
        base, start = base + ranks * plan.peak_bytes, start + ranks * shard
    return [
        HostNeed(
            "load",
            start + 2 * BUCKET_BYTES + ranks * (_quantizing_bytes(plan) if job.is_4bit else LOADING_BYTES),
            start + ranks * loaded,
            "stock: every rank loads the whole" + (", packed" if job.is_4bit else ""),
        ),
        HostNeed("train", base, base, "processes, and what is offloaded or paged"),
        HostNeed("save", base + round(ranks * saved), base + state, "stock: FULL_STATE_DICT on rank 0"),
        HostNeed("export", base + ranks * CHUNK_BYTES, base + (trained if job.lora_rank else whole), "stock: the same"),
    ]


def _quantizing_bytes(plan: Plan) -> int:
    """Return what a rank needs that reads weights whole to quantise them: the largest of them, and bitsandbytes."""
    largest = max(weight.num_elements for unit in plan.units for weight in unit.weights)
    return QUANTIZING_BYTES + largest * plan.job.compute_dtype.itemsize


def _trained_shard(plan: Plan) -> int:
    return sum(unit.reduced_bytes(plan.job.shard_ranks, plan.job.strategy.version) for unit in plan.units)
