"""Finds alternatives to a job: the smallest change that makes it fit, every sharding strategy, and the fastest setup."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hf_fsdp_recipes.configs.strategy import FSDP1_STRATEGIES
from hf_fsdp_recipes.configs.templates import Template
from hf_fsdp_recipes.errors import PlanError
from hf_fsdp_recipes.metrics import progress
from hf_fsdp_recipes.tools.planner.communication import StepTraffic, estimate_traffic
from hf_fsdp_recipes.tools.planner.memory_planner import MemoryPlan, MemoryPlanner
from hf_fsdp_recipes.tools.planner.training_job import TrainingJob

MAX_GPUS = 1024
MAX_BATCH = 64


@dataclass(frozen=True)
class Alternative:
    """Another way to train the model; `label` says what differs."""

    label: str
    plan: MemoryPlan

    @cached_property
    def traffic(self) -> StepTraffic:
        """Bytes that one optimizer step moves, and its communication and compute time."""
        return estimate_traffic(self.plan)

    @property
    def token_cost(self) -> tuple[float, float, int]:
        """Sort key: step seconds per token, then communication seconds per token, then memory."""
        job = self.plan.job
        tokens = job.batch * job.length * job.accumulation
        step_seconds, seconds = (value / tokens for value in (self.traffic.step_seconds, self.traffic.seconds))
        return float(f"{step_seconds:.2g}"), float(f"{seconds:.2g}"), self.plan.needed_bytes

    def describe(self) -> dict[str, object]:
        """Return the alternative as JSON values."""
        job = self.plan.job
        return {
            "change": self.label,
            "template": job.strategy.name,
            "batch": job.batch,
            "gradient_checkpointing": job.gradient_checkpointing,
            "needed_bytes": self.plan.needed_bytes,
            "fits": self.plan.fits,
            "communication_seconds": self.traffic.seconds,
            "compute_seconds": self.traffic.compute_seconds,
        }


def find_changes(planner: MemoryPlanner, plan: MemoryPlan) -> list[Alternative]:
    """If the job fits, return faster settings that fit too; if not, the changes that were tried to make it fit.

    The list is empty if the device's memory is unknown.
    """
    if plan.fits is None:
        return []
    return find_faster_settings(planner, plan.job) if plan.fits else find_smallest_change(planner, plan.job)


def find_faster_settings(planner: MemoryPlanner, job: TrainingJob) -> list[Alternative]:
    """Plan the job without gradient checkpointing, at the same and at twice the micro-batch size; return the plans that fit."""
    if not job.gradient_checkpointing:
        return []
    kept = job.replace(gradient_checkpointing=False)
    options = [("gradient_checkpointing: false", kept)]
    if job.accumulation % 2 == 0:
        batch, accumulation = 2 * job.batch, job.accumulation // 2
        label = f"gradient_checkpointing: false, batch {batch}, accumulation {accumulation}"
        options.append((label, kept.replace(batch=batch, accumulation=accumulation)))
    found = [_try(planner, label, changed) for label, changed in options]
    return [alternative for alternative in found if alternative and alternative.plan.fits]


def find_smallest_change(planner: MemoryPlanner, job: TrainingJob) -> list[Alternative]:
    """Try single changes, the least intrusive first, until the job fits; return all changes that were tried."""
    tried: list[Alternative] = []
    for label, changed in _changes(job):
        if alternative := _try(planner, label, changed):
            tried.append(alternative)
            if alternative.plan.fits:
                break
    return tried


def _try(planner: MemoryPlanner, label: str, job: TrainingJob) -> Alternative | None:
    try:
        return Alternative(label, planner.plan(job))
    except PlanError:
        return None  # impossible for this model, for example LoRA without linear layers


def _changes(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """Yield changes that save memory, as (label, job), from those that cost nothing to those that change what is trained."""
    if job.accumulation > 1 and not job.sync_each_batch:
        yield "reduce gradients after each micro-batch (sync_each_batch: true)", job.replace(sync_each_batch=True)
    if job.loss != "fused":
        yield "fused loss (TRL's SFTTrainer, or Liger)", job.replace(loss="fused")
    if job.attention == "eager":
        yield "sdpa attention instead of eager", job.replace(attention="sdpa")
    if not job.gradient_checkpointing:
        yield "gradient checkpointing", job.replace(gradient_checkpointing=True)
    batch = job.batch
    while batch := batch // 2:
        yield f"batch {batch} per rank instead of {job.batch}", job.replace(batch=batch)
    if job.strategy.sharding != "full_shard" and job.cluster.num_gpus > 1:
        yield "full_shard", with_sharding(job, "full_shard")
    if not job.is_4bit and "8bit" not in job.optimizer and job.optimizer != "sgd":
        yield "8-bit optimizer (adamw_8bit)", job.replace(optimizer="adamw_8bit")
    if not job.strategy.is_offloaded and not job.strategy.on_cpu:
        yield "parameters and optimizer offloaded to the host", _with_strategy(job, is_offloaded=True)
    if job.strategy.sharding != "no_shard" and not job.strategy.is_hybrid:
        num_gpus = 2 * job.cluster.num_gpus
        while num_gpus <= MAX_GPUS:
            yield f"{num_gpus} GPUs instead of {job.cluster.num_gpus}", job.replace(num_gpus=num_gpus)
            num_gpus *= 2
    if not job.lora_rank:
        yield "LoRA of rank 16 on all linear layers", job.replace(lora_rank=16)
        yield "LoRA of rank 16 on 4-bit weights", job.replace(lora_rank=16, is_4bit=True)
    elif not job.is_4bit:
        yield "4-bit base weights", job.replace(is_4bit=True)


def with_sharding(job: TrainingJob, sharding: str) -> TrainingJob:
    """Return the job with another sharding strategy and the name of the matching template.

    Raises a PlanError if the cluster cannot use the strategy.
    """
    return _with_strategy(job, sharding=sharding, version=1 if sharding == "no_shard" else job.strategy.version)


def _with_strategy(job: TrainingJob, **fields: Any) -> TrainingJob:
    """Return the job with changed strategy fields and the name of the matching template."""
    job = job.replace(**fields)
    settings: dict[str, Any] = {
        key: getattr(job.strategy, key) for key in ("version", "is_offloaded", "min_num_params")
    }
    return job.replace(name=Template(**settings | {"strategy": job.strategy.sharding}).name)


def compare_strategies(planner: MemoryPlanner, job: TrainingJob) -> list[Alternative]:
    """Plan every sharding strategy that the cluster allows, and sort them: those that fit first, then the fastest."""
    allowed = [name for name in FSDP1_STRATEGIES if job.cluster.num_nodes > 1 or not name.startswith("hybrid")]
    found = [
        _try(planner, sharding, with_sharding(job, sharding))
        for sharding in progress.each(allowed, f"plan, batch {job.batch}", "strategy")
    ]
    return sorted(filter(None, found), key=lambda each: (each.plan.fits is False, each.token_cost))


def suggest(planner: MemoryPlanner, job: TrainingJob) -> Alternative | None:
    """Find the template and batch that fit and train the most tokens per second; None if nothing fits.

    Tries all strategies, with and without gradient checkpointing, and doubles the batch while throughput rises. If
    nothing fits at batch 1, tries an 8-bit optimizer and offloading.
    """
    job = job.replace(is_offloaded=False, min_num_params=None)
    fitting = [
        alternative
        for gradient_checkpointing in (False, True)
        for alternative in _try_batches(planner, job.replace(gradient_checkpointing=gradient_checkpointing))
    ]
    if not fitting:
        smallest = with_sharding(job.replace(gradient_checkpointing=True, batch=1), "full_shard")
        found = [
            _try(planner, "8-bit optimizer", smallest.replace(optimizer="adamw_8bit")),
            _try(planner, "offload", _with_strategy(smallest, is_offloaded=True)),
        ]
        fitting = [alternative for alternative in found if alternative and alternative.plan.fits]
    return min(fitting, key=lambda alternative: alternative.token_cost, default=None)


def _try_batches(planner: MemoryPlanner, job: TrainingJob) -> Iterator[Alternative]:
    """Plan all strategies at batch 1, 2, 4 and so on while throughput rises, and yield the plans that fit."""
    batch, best = 1, float("inf")
    while batch <= MAX_BATCH:
        fitting = [one for one in compare_strategies(planner, job.replace(batch=batch)) if one.plan.fits]
        yield from fitting
        fastest = min((one.token_cost[0] for one in fitting), default=best)
        if fastest >= best:
            return
        batch, best = 2 * batch, fastest
