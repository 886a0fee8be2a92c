"""Bytes a rank, by part: between steps (the valley), at the highest point of a step (the peak), and on the host.

Joins the blueprint, the units, the traced step and the schedule. One `Planner` a model: what does not change
between two ways to train it is built once.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from hf_fsdp_recipes.tools.planner import meta_model, trace, units
from hf_fsdp_recipes.tools.planner.fsdp_simulator import REDUCED_GRADIENTS, replay
from hf_fsdp_recipes.tools.planner.job import BLOCK_SCALE_BYTES, STATE_TENSORS, Job
from hf_fsdp_recipes.tools.planner.strategy import Strategy
from hf_fsdp_recipes.tools.planner.units import Unit

PARAMETERS, OPTIMIZER, STEP, SCALES = "parameters", "optimizer", "optimizer step", "4-bit scales"
# Not modelled op by op: the context, NCCL and cuBLAS of a GPU, and what the caching allocator cannot reuse of what
# comes and goes. Assumed, not measured; see docs/planner.md.
GPU_CONTEXT_BYTES = 1_500_000_000
GPU_FRAGMENTATION = 0.03


@dataclass(frozen=True)
class Plan:
    """What a rank needs on its device, and what each part is for.

    Attributes:
        job: what was planned for.
        num_parameters, num_trained: of the whole model.
        valley: bytes by part between steps.
        peak: bytes by part when their sum is highest.
        allowance_bytes: for what is not modelled: context and fragmentation.
        units: what FSDP gathers at once.
        host: bytes on the host a rank holds while training: offloaded shards and paged states.
        largest_unit: name and gathered bytes of the largest unit.
    """

    job: Job
    num_parameters: int
    num_trained: int
    valley: dict[str, int]
    peak: dict[str, int]
    allowance_bytes: int
    units: tuple[Unit, ...]
    host: dict[str, int]
    largest_unit: tuple[str, int]

    @property
    def valley_bytes(self) -> int:
        """Bytes between steps."""
        return sum(self.valley.values())

    @property
    def peak_bytes(self) -> int:
        """Bytes at the highest point, as the framework counts them."""
        return sum(self.peak.values())

    @property
    def needed_bytes(self) -> int:
        """Bytes that the device must have."""
        return self.peak_bytes + self.allowance_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the device has them; None where nothing is known of it."""
        return None if self.job.machine.gpu_bytes is None else self.needed_bytes <= self.job.machine.gpu_bytes


class Planner:
    """Plan one model in several ways, and trace each step once."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._models: dict[Any, Any] = {}
        self._traces: dict[Any, list[trace.Moment]] = {}

    def plan(self, job: Job) -> Plan:
        """Plan one way to train the model.

        Raises:
            PlanError: it cannot be built or cut like that.
        """
        model = self._model(job)
        cut = units.find_units(model, job)
        moments = self._moments(model, job, cut)
        resident, host = _resident(cut, job)
        kept = _kept(moments, cut, job)
        ledger = replay(moments, cut, job, {**resident, **_scales(model, job)}, kept)
        valley = {**resident, **kept}
        step = {**resident, **kept, REDUCED_GRADIENTS: _reduced_bytes(cut, job), STEP: _step_bytes(cut, job)}
        peak = max(ledger.at_peak, step, key=lambda parts: sum(parts.values()))
        largest = units.largest(cut, job.shard_ranks, job.strategy.version)
        return Plan(
            job=job,
            num_parameters=sum(weight.num_elements for unit in cut for weight in unit.weights),
            num_trained=sum(weight.num_elements for unit in cut for weight in unit.weights if weight.is_trained),
            valley={part: num_bytes for part, num_bytes in valley.items() if num_bytes},
            peak={part: num_bytes for part, num_bytes in peak.items() if num_bytes},
            allowance_bytes=_allowance(peak, resident, job),
            units=tuple(cut),
            host=host,
            largest_unit=(largest.name, largest.whole_bytes(job.shard_ranks, job.strategy.version)),
        )

    def _model(self, job: Job) -> Any:
        key = (*_built_with(job), job.attention == "eager", job.loss == "fused")
        if key not in self._models:
            self._models.clear()  # one at a time: deep models have many modules
            self._models[key] = meta_model.build(self.config, job)
        return self._models[key]

    def _moments(self, model: Any, job: Job, cut: list[Unit]) -> list[trace.Moment]:
        # What full sharding by layer watches is always watched, so that most strategies share one trace.
        usual = units.find_units(model, change(job, **asdict(Strategy())))
        watched = tuple(units.names_to_watch([*usual, *cut]))
        key = (*_built_with(job), job.attention, job.loss, job.batch, job.length, job.on_cpu, watched)
        if key not in self._traces:
            self._traces[key] = trace.trace_step(model, job, watched, units.last_layer(model))
        return self._traces[key]


def _built_with(job: Job) -> tuple[Any, ...]:
    return job.compute_dtype, job.checkpointing, job.lora_rank, job.lora_targets


def _resident(cut: list[Unit], job: Job) -> tuple[dict[str, int], dict[str, int]]:
    """Return what is always there, on the device and on the host."""
    version, num_ranks = job.strategy.version, job.shard_ranks
    stored = sum(unit.stored_bytes(num_ranks, version) for unit in cut)
    state = round(sum(_state_bytes(unit, job) for unit in cut))
    if job.is_offloaded:
        reduced = sum(unit.reduced_bytes(num_ranks, version) for unit in cut)
        return {}, {PARAMETERS: stored, OPTIMIZER: state, REDUCED_GRADIENTS: reduced}
    if job.optimizer.startswith("paged_") and not job.on_cpu:
        return {PARAMETERS: stored}, {OPTIMIZER: state}
    return {PARAMETERS: stored, OPTIMIZER: state}, {}


def _state_bytes(unit: Unit, job: Job) -> float:
    """Return the optimizer state of one rank's part of a unit, in bytes."""
    num_ranks = job.shard_ranks
    total = 0.0
    for weight in unit.weights:
        if weight.is_trained:
            elements = weight.padded_elements(num_ranks) if job.strategy.version == 2 else weight.num_elements
            total += (
                elements / num_ranks * STATE_TENSORS[job.optimizer] * _bytes_a_state(weight.stored_bytes, job.optimizer)
            )
    return total


def _bytes_a_state(stored_bytes: float, optimizer: str) -> float:
    if "8bit" in optimizer:
        return 1 + BLOCK_SCALE_BYTES
    if "4bit" in optimizer:
        return 0.5 + BLOCK_SCALE_BYTES
    return 4 if "32bit" in optimizer else stored_bytes


def _step_bytes(cut: list[Unit], job: Job) -> int:
    """Return what the optimizer allocates while it steps: AdamW without fusing, one number for each it updates."""
    if job.optimizer != "adamw_torch" or job.on_cpu or job.is_offloaded:
        return 0
    return _reduced_bytes(cut, job)


def _reduced_bytes(cut: list[Unit], job: Job) -> int:
    if job.is_offloaded:
        return 0
    return sum(unit.reduced_bytes(job.shard_ranks, job.strategy.version) for unit in cut)


def _kept(moments: list[trace.Moment], cut: list[Unit], job: Job) -> dict[str, int]:
    """Return what a plain loop keeps from one step to the next: its outputs, and its gradients."""
    if job.loop == "trainer":
        return {}
    return {"kept outputs": sum(moments[-1].live_bytes.values()), REDUCED_GRADIENTS: _reduced_bytes(cut, job)}


def _scales(model: Any, job: Job) -> dict[str, int]:
    """Return what 4-bit weights need beside their shards: scales, whole on each rank, and one weight unpacked."""
    if not job.is_4bit:
        return {}
    packed = [weight for weight in meta_model.weights(model, job) if weight.stored_bytes == meta_model.BITS4_BYTES]
    num_scales = sum(weight.num_elements for weight in packed) // meta_model.BLOCK_OF_4BIT
    scales = num_scales + num_scales * 4 // meta_model.BLOCK_OF_SCALES if job.has_nested_scales else num_scales * 4
    unpacked = max((weight.num_elements for weight in packed), default=0) * job.compute_dtype.itemsize
    return {SCALES: scales, "unpacked weight": unpacked}


def _allowance(peak: dict[str, int], resident: dict[str, int], job: Job) -> int:
    if job.on_cpu:
        return 0
    return GPU_CONTEXT_BYTES + round(GPU_FRAGMENTATION * (sum(peak.values()) - sum(resident.values())))


def change(job: Job, **fields: Any) -> Job:
    """Return the job with some fields changed, those of its strategy and machine included."""
    for owner in ("strategy", "machine"):
        inner = {k: fields.pop(k) for k in list(fields) if k in getattr(job, owner).__dataclass_fields__}
        if inner:
            fields[owner] = replace(fields.get(owner, getattr(job, owner)), **inner)
    return replace(job, **fields)
