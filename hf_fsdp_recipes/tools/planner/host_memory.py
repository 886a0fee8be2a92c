"""Estimates the host memory of one node while loading, training, saving and exporting, with and without this package."""

from dataclasses import dataclass

from hf_fsdp_recipes.checkpointing import staging
from hf_fsdp_recipes.device_copies import NUM_BUFFERS
from hf_fsdp_recipes.export.write_export import CHUNK_BYTES
from hf_fsdp_recipes.loading.distribute import BUCKET_BYTES, NUM_SLOTS, UPLOAD_BYTES
from hf_fsdp_recipes.tools.planner.memory_planner import OPTIMIZER, PARAMETERS, MemoryPlan

# docs/planner.md explains these figures.
# In Hugging Face's Llama-2-70B FSDP article, a rank uses 926 or 933 MB before it loads anything.
PROCESS_BYTES = 930_000_000
LOADING_BYTES = 60_000_000  # per rank, in addition to its shard and the buckets, with any load_source
QUANTIZING_BYTES = 500_000_000  # per rank, in addition to its shard and the largest weight, for 4-bit weights


@dataclass(frozen=True)
class HostMemory:
    """Host memory of one node at one stage, with this package and with stock code; `why` explains the stock figure."""

    stage: str
    ours_bytes: int
    stock_bytes: int
    why: str


def estimate_host_memory(plan: MemoryPlan) -> list[HostMemory]:
    """Estimate the host memory of one node at each stage."""
    job, num_ranks = plan.job, plan.job.cluster.ranks_per_node
    shard = sum(unit.shard_bytes for unit in plan.units)
    model = round(sum(p.num_elements * p.sharded_item_bytes for p in plan.parameters))
    trained = round(sum(p.num_elements * p.sharded_item_bytes for p in plan.parameters if p.requires_grad))
    loaded = model if job.is_4bit else plan.num_parameters * job.dtype.itemsize
    optimizer = plan.valley.get(OPTIMIZER, plan.host.get(OPTIMIZER, 0))
    # Each rank has host memory for a copy of its state, which it keeps between saves, and buffers to upload weights.
    saved = sum(unit.shard_gradient_bytes for unit in plan.units) if job.lora_rank else shard
    is_pinned = not (job.strategy.on_cpu or job.is_offloaded)
    staged = _pinned_bytes(saved) + _pinned_bytes(optimizer) if is_pinned else saved + optimizer
    upload = 0 if job.strategy.on_cpu else NUM_BUFFERS * UPLOAD_BYTES
    before_load = num_ranks * (PROCESS_BYTES + plan.host.get(PARAMETERS, 0))
    training = num_ranks * (PROCESS_BYTES + sum(plan.host.values()))
    if job.strategy.on_cpu:  # shards, gradients and activations are in host memory too
        before_load += num_ranks * shard
        training += num_ranks * plan.peak_bytes
    per_rank = upload + (_quantizing_bytes(plan) if job.is_4bit else LOADING_BYTES)
    loading = before_load + NUM_SLOTS * BUCKET_BYTES + num_ranks * per_rank
    every_rank = "stock: every rank loads the full model" + (" in 4 bits" if job.is_4bit else "")
    full_state = training + trained + optimizer * job.num_shards
    full_model = training + (trained if job.lora_rank else model)
    return [
        HostMemory("load", loading, before_load + num_ranks * loaded, every_rank),
        HostMemory("train", training, training, "processes, and offloaded or paged state"),
        HostMemory("save", training + num_ranks * staged, full_state, "stock: FULL_STATE_DICT on rank 0"),
        HostMemory(
            "export", training + num_ranks * NUM_BUFFERS * CHUNK_BYTES, full_model, "stock: the full model on rank 0"
        ),
    ]


def _pinned_bytes(num_bytes: int) -> int:
    """Return how much pinned memory a rank allocates to stage a save of `num_bytes`.

    It allocates full chunks, and a last chunk whose size torch rounds up to a power of two.
    """
    num_chunks, rest = divmod(num_bytes, staging.CHUNK_BYTES)
    return num_chunks * staging.CHUNK_BYTES + (1 << (rest - 1).bit_length() if rest else 0)


def _quantizing_bytes(plan: MemoryPlan) -> int:
    """Return the host memory in bytes that a rank needs to quantize its weights one by one."""
    largest = max(parameter.num_elements for parameter in plan.parameters)
    return QUANTIZING_BYTES + largest * plan.job.compute_dtype.itemsize
