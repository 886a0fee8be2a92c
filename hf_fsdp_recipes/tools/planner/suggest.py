"""What to do with a plan: the smallest change that makes it fit, the strategies side by side, the best of them.

Tries real plans, one change at a time or a grid of them; knows no rule of thumb.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_fsdp_recipes.errors import PlanError
from hf_fsdp_recipes.metrics import progress
from hf_fsdp_recipes.tools.planner.communication import Traffic, traffic
from hf_fsdp_recipes.tools.planner.job import Job
from hf_fsdp_recipes.tools.planner.rank_memory import Plan, Planner, change

MAX_GPUS = 1024
MAX_BATCH = 64
SHARDINGS = ("full_shard", "hybrid_shard", "shard_grad_op", "hybrid_shard_zero2", "no_shard")


@dataclass(frozen=True)
class Alternative:
    """Another way to train, and what it needs.

    Attributes:
        label: what differs, in words.
        plan: its plan.
        traffic: what its step moves.
    """

    label: str
    plan: Plan
    traffic: Traffic


def smallest_changes(planner: Planner, plan: Plan) -> list[Alternative]:
    """Try single changes, the least intrusive first, until one fits; return all that were tried.

    The last one fits, or none does.
    """
    tried: list[Alternative] = []
    for label, job in _changes(plan.job):
        alternative = _alternative(planner, label, job)
        if alternative is None:
            continue
        tried.append(alternative)
        if alternative.plan.fits:
            break
    return tried


def _alternative(planner: Planner, label: str, job: Job) -> Alternative | None:
    try:
        plan = planner.plan(job)
    except PlanError:
        return None  # this model does not take it: no linear layers for an adapter, say
    return Alternative(label, plan, traffic(plan, planner.config))


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield changes from those that cost nothing to those that change the run."""
    if job.accumulation > 1 and not job.sync_each_batch:
        yield "reduce gradients after each micro-batch (sync_each_batch: true)", change(job, sync_each_batch=True)
    if job.loss != "fused":
        yield "a fused loss (TRL's SFTTrainer, or Liger)", change(job, loss="fused")
    if job.attention == "eager":
        yield "sdpa attention instead of eager", change(job, attention="sdpa")
    if not job.checkpointing:
        yield "gradient checkpointing", change(job, checkpointing=True)
    batch = job.batch // 2
    while batch >= 1:
        yield f"a batch of {batch} a rank instead of {job.batch}", change(job, batch=batch)
        batch //= 2
    if job.strategy.sharding != "full_shard" and job.machine.num_gpus > 1:
        yield "full_shard", with_sharding(job, "full_shard")
    if not job.is_4bit and "8bit" not in job.optimizer and job.optimizer != "sgd":
        yield "an 8-bit optimizer (adamw_8bit)", change(job, optimizer="adamw_8bit")
    if not job.strategy.is_offloaded and not job.on_cpu:
        yield (
            "offloading parameters and optimizer to the host",
            change(job, is_offloaded=True, name=f"{job.strategy.name}_offload"),
        )
    yield from _more_gpus(job)
    if not job.lora_rank:
        yield "LoRA of rank 16 on all linear layers", change(job, lora_rank=16)
        yield "the same over 4-bit weights", change(job, lora_rank=16, is_4bit=True)
    elif not job.is_4bit:
        yield "4-bit base weights", change(job, is_4bit=True)


def _more_gpus(job: Job) -> Iterator[tuple[str, Job]]:
    if job.strategy.sharding == "no_shard":
        return
    num_gpus = 2 * job.machine.num_gpus
    while num_gpus <= MAX_GPUS and not job.strategy.is_hybrid:
        yield f"{num_gpus} GPUs instead of {job.machine.num_gpus}", change(job, num_gpus=num_gpus)
        num_gpus *= 2


def with_sharding(job: Job, sharding: str) -> Job:
    """Return the job with another strategy, under the name of its template.

    Raises:
        PlanError: that strategy cannot be on this machine.
    """
    version = 1 if sharding == "no_shard" else job.strategy.version
    name = "no_shard" if sharding == "no_shard" else f"fsdp{version}_{sharding}"
    offload = job.strategy.is_offloaded
    return change(job, sharding=sharding, version=version, name=name + ("_offload" if offload else ""))


def compare_shardings(planner: Planner, job: Job) -> list[Alternative]:
    """Plan every strategy that this machine allows, the quickest that fits first."""
    found = []
    for sharding in progress.each(SHARDINGS, f"plan, batch {job.batch}", "strategy"):
        if sharding.startswith("hybrid") and job.machine.num_nodes < 2:
            continue
        alternative = _alternative(planner, sharding, with_sharding(job, sharding))
        if alternative is not None:
            found.append(alternative)
    return sorted(found, key=_preference)


def _preference(alternative: Alternative) -> tuple[bool, float, float, int]:
    """Prefer what fits, then the shorter step, then less on the wire, then less memory."""
    step, plan = alternative.traffic, alternative.plan
    return plan.fits is False, round(step.step_seconds, 2), round(step.seconds, 2), plan.needed_bytes


def suggest(planner: Planner, job: Job) -> Alternative | None:
    """Find the template and batch with the most tokens a second that fit; None if nothing does.

    Tries all strategies with and without checkpointing, batches doubled while that helps; only where nothing fits at
    a batch of 1, offloading and an 8-bit optimizer.
    """
    plain = change(job, is_offloaded=False, min_num_params=None)
    found = [
        one for checkpointing in (False, True) for one in _batches(planner, change(plain, checkpointing=checkpointing))
    ]
    if not found:
        smaller = change(plain, checkpointing=True, batch=1)
        wishes = {"optimizer": "adamw_8bit"}, {"is_offloaded": True}
        for wish in wishes:
            label = next(iter(wish))
            found += filter(None, [_alternative(planner, label, with_sharding(change(smaller, **wish), "full_shard"))])
        found = [one for one in found if one.plan.fits]
    return min(found, key=_seconds_a_token, default=None)


def _batches(planner: Planner, job: Job) -> Iterator[Alternative]:
    """Yield what fits, with the batch doubled for as long as that makes a token quicker."""
    batch, best = 1, float("inf")
    while batch <= MAX_BATCH:
        fitting = [one for one in compare_shardings(planner, change(job, batch=batch)) if one.plan.fits]
        yield from fitting
        quickest = min((_seconds_a_token(one)[0] for one in fitting), default=best)
        if quickest >= best:
            return
        batch, best = 2 * batch, quickest


def _seconds_a_token(alternative: Alternative) -> tuple[float, float, int]:
    job = alternative.plan.job
    tokens = job.batch * job.length * job.accumulation
    return (
        float(f"{alternative.traffic.step_seconds / tokens:.2g}"),
        float(f"{alternative.traffic.seconds / tokens:.2g}"),
        alternative.plan.needed_bytes,
    )


def as_dict(alternative: Alternative) -> dict[str, Any]:
    """Return an alternative as plain values."""
    plan, step = alternative.plan, alternative.traffic
    return {
        "change": alternative.label,
        "template": plan.job.strategy.name,
        "batch": plan.job.batch,
        "gradient_checkpointing": plan.job.checkpointing,
        "needed_bytes": plan.needed_bytes,
        "fits": plan.fits,
        "communication_seconds": step.seconds,
        "compute_seconds": step.compute_seconds,
    }
