"""Estimates the memory of one rank: on the device, between steps and at the peak of a step, and on the host."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hf_fsdp_recipes.configs.strategy import Strategy
from hf_fsdp_recipes.errors import PlanError
from hf_fsdp_recipes.metrics.flops import ModelFlops, count_flops
from hf_fsdp_recipes.tools.planner.fsdp_simulator import REDUCED_GRADIENTS, simulate_step
from hf_fsdp_recipes.tools.planner.fsdp_units import FsdpUnit, find_last_layer, find_units, module_names
from hf_fsdp_recipes.tools.planner.meta_model import PACKED_ITEM_BYTES, MetaModel, Parameter, build_meta_model
from hf_fsdp_recipes.tools.planner.step_trace import LossFunction, TraceEvent, compute_job_loss, trace_step
from hf_fsdp_recipes.tools.planner.training_job import BLOCK_SCALE_BYTES, NUM_STATES, TrainingJob

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PARAMETERS, OPTIMIZER, STEP = "parameters", "optimizer", "optimizer step"
SCALES, UNPACKED = "4-bit scales", "unpacked weight"
VALUES_PER_SCALE = 64  # number of 4-bit values that share a scale of 4 bytes, or of one byte with nested quantization
SCALES_PER_SCALE = 256  # number of one-byte scales that share one fp32 scale with nested quantization
# Assumed, not measured (docs/planner.md): memory of the GPU context and cuBLAS, of each NCCL communicator, and the share of
# temporary memory that the caching allocator cannot reuse.
GPU_CONTEXT_BYTES = 900_000_000
COMMUNICATOR_BYTES = 600_000_000
GPU_FRAGMENTATION = 0.03


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank, by category."""

    job: TrainingJob
    units: tuple[FsdpUnit, ...]
    flops: ModelFlops | None  # None if the FLOPs cannot be counted
    valley: dict[str, int]  # device bytes by category, between steps
    peak: dict[str, int]  # device bytes by category, when their sum is highest
    allowance_bytes: int  # assumed for the GPU context, NCCL and fragmentation
    host: dict[str, int]  # host bytes by category during training: offloaded shards, paged optimizer state

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters of the model."""
        return [parameter for unit in self.units for parameter in unit.parameters]

    @property
    def num_parameters(self) -> int:
        """Number of elements in all parameters."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def num_trained(self) -> int:
        """Number of elements in the parameters that are trained."""
        return sum(parameter.num_elements for parameter in self.parameters if parameter.requires_grad)

    @property
    def largest_unit(self) -> FsdpUnit:
        """The unit that is largest when gathered."""
        return max(self.units, key=lambda unit: unit.unsharded_bytes)

    @property
    def valley_bytes(self) -> int:
        """Device memory in use between steps, in bytes."""
        return sum(self.valley.values())

    @property
    def peak_bytes(self) -> int:
        """Device bytes at the peak, as torch's allocator counts them."""
        return sum(self.peak.values())

    @property
    def needed_bytes(self) -> int:
        """Device bytes that a run needs: the peak, and an allowance for the GPU context, NCCL and fragmentation."""
        return self.peak_bytes + self.allowance_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough memory; None if its memory is unknown."""
        gpu_bytes = self.job.cluster.gpu_bytes
        return None if gpu_bytes is None else self.needed_bytes <= gpu_bytes


class MemoryPlanner:
    """Plan several ways to train one model. Caches the last model and all traces, because many plans share them."""

    def __init__(self, config: "PreTrainedConfig", compute_loss: LossFunction = compute_job_loss) -> None:
        self._config, self._compute_loss = config, compute_loss
        self._models: dict[tuple[object, ...], MetaModel] = {}
        self._traces: dict[tuple[object, ...], list[TraceEvent]] = {}

    def plan(self, job: TrainingJob) -> MemoryPlan:
        """Plan one way to train the model.

        Raises a PlanError if the model cannot be built, adapted or wrapped as the job asks.
        """
        if job.lora_parameters and job.strategy.version == 1:
            raise PlanError("adapters of fused experts (lora_target_parameters) need FSDP2. Use an fsdp2_* template.")
        model = self._model(job)
        units = self.find_units(model, job)
        resident, host = _resident_bytes(units, job)
        events = self.trace(model, job, units)
        in_step = simulate_step(events, units, job, resident | _quantization_bytes(units, job))
        reduced_bytes = gradient_bytes(units, job)
        # Unfused AdamW needs a temporary value per parameter.
        is_unfused = job.optimizer == "adamw_torch" and not job.strategy.on_cpu
        in_update = resident | {REDUCED_GRADIENTS: reduced_bytes, STEP: reduced_bytes if is_unfused else 0}
        peak = max(in_step, in_update, key=lambda state: sum(state.values()))
        return MemoryPlan(
            job=job,
            units=tuple(units),
            flops=_count_flops(model),
            valley={category: num_bytes for category, num_bytes in resident.items() if num_bytes},
            peak={category: num_bytes for category, num_bytes in peak.items() if num_bytes},
            allowance_bytes=_allowance_bytes(peak, resident, job),
            host=host,
        )

    def find_units(self, model: MetaModel, job: TrainingJob) -> list[FsdpUnit]:
        """Split the model into FSDP units."""
        return find_units(model, job)

    def trace(self, model: MetaModel, job: TrainingJob, units: list[FsdpUnit]) -> list[TraceEvent]:
        """Return the events of one step, from the cache if an earlier job had the same ones."""
        # Always trace full_shard's units too, so that most strategies can share one trace.
        usual_units = find_units(model, job.replace(**asdict(Strategy())))
        watched = tuple(module_names([*usual_units, *units]))
        key = (*_model_key(job), job.attention, job.batch, job.length, job.strategy.on_cpu, watched)
        if key not in self._traces:
            self._traces[key] = trace_step(model, job, watched, find_last_layer(model), self._compute_loss)
        return self._traces[key]

    def _model(self, job: TrainingJob) -> MetaModel:
        key = (*_model_key(job), job.attention == "eager")
        if key not in self._models:
            self._models.clear()  # keep one model only: the modules of a deep model take much memory
            self._models[key] = build_meta_model(self._config, job)
        return self._models[key]


def _model_key(job: TrainingJob) -> tuple[object, ...]:
    return job.compute_dtype, job.gradient_checkpointing, job.lora_rank, job.lora_targets, job.lora_parameters, job.loss


def _count_flops(model: MetaModel) -> ModelFlops | None:
    try:
        return count_flops(model)
    except (AttributeError, ValueError):  # count_flops does not know the architecture
        return None


def _resident_bytes(units: list[FsdpUnit], job: TrainingJob) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that stay allocated between steps, on the device and on the host."""
    shards = {PARAMETERS: sum(unit.shard_bytes for unit in units)}
    states = {OPTIMIZER: round(sum(_state_bytes(unit, job.optimizer) for unit in units))}
    if job.is_offloaded:
        return {}, shards | states | {REDUCED_GRADIENTS: sum(unit.shard_gradient_bytes for unit in units)}
    if job.optimizer.startswith("paged_") and not job.strategy.on_cpu:
        return shards, states  # count this state on the host, where the driver may move its pages
    return shards | states, {}


def _state_bytes(unit: FsdpUnit, optimizer: str) -> float:
    """Return how many bytes of optimizer state one rank holds for its shard of a unit."""
    return NUM_STATES[optimizer] * sum(
        parameter.num_shard_elements * _state_item_bytes(parameter, optimizer) for parameter in unit.trained
    )


def _state_item_bytes(parameter: Parameter, optimizer: str) -> float:
    if "8bit" in optimizer:
        return 1 + BLOCK_SCALE_BYTES
    if "4bit" in optimizer:
        return 0.5 + BLOCK_SCALE_BYTES
    return 4 if "32bit" in optimizer else parameter.sharded_item_bytes


def gradient_bytes(units: list[FsdpUnit], job: TrainingJob) -> int:
    """Return how many bytes one rank's reduced gradients take on its device."""
    return 0 if job.is_offloaded else sum(unit.shard_gradient_bytes for unit in units)


def _quantization_bytes(units: list[FsdpUnit], job: TrainingJob) -> dict[str, int]:
    """Return the bytes that 4-bit weights take besides their shards: the scales of the full model, and one unpacked weight."""
    if not job.is_4bit:
        return {}
    packed = [p.num_elements for unit in units for p in unit.parameters if p.sharded_item_bytes == PACKED_ITEM_BYTES]
    num_scales = sum(packed) // VALUES_PER_SCALE
    scale_bytes = num_scales + num_scales * 4 // SCALES_PER_SCALE if job.has_nested_scales else num_scales * 4
    return {SCALES: scale_bytes, UNPACKED: max(packed, default=0) * job.compute_dtype.itemsize}


def _allowance_bytes(peak: dict[str, int], resident: dict[str, int], job: TrainingJob) -> int:
    if job.strategy.on_cpu:
        return 0
    temporary_bytes = sum(peak.values()) - sum(resident.values())
    return GPU_CONTEXT_BYTES + job.num_communicators * COMMUNICATOR_BYTES + round(GPU_FRAGMENTATION * temporary_bytes)
