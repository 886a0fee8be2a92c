"""Estimates a step's peak memory: replays the events that `step_trace` recorded and adds FSDP's own allocations.

Each FSDP version has a class that simulates how it gathers, frees and reduces units.
"""

from collections.abc import Iterable, Sequence

from hf_fsdp_recipes.tools.planner.fsdp_units import ROOT, FsdpUnit
from hf_fsdp_recipes.tools.planner.step_trace import TraceEvent
from hf_fsdp_recipes.tools.planner.training_job import TrainingJob

GATHERED, UNSHARDED_GRADIENTS, REDUCED_GRADIENTS = "gathered units", "whole gradients", "gradients"


class MemoryTimeline:
    """Bytes in each memory category: the current ones, and those at the moment when their sum was highest."""

    def __init__(self, resident_bytes: dict[str, int]) -> None:
        self.current_bytes = dict(resident_bytes)
        self.bytes_at_peak = dict(resident_bytes)

    def add(self, category: str, num_bytes: int) -> None:
        """Add allocated bytes to a category; a negative number frees them."""
        self.current_bytes[category] = self.current_bytes.get(category, 0) + num_bytes
        self._update_peak(self.current_bytes)

    def apply(self, event: TraceEvent) -> None:
        """Record the peak since the previous event, then the memory in use at this event."""
        self._update_peak(self.current_bytes | event.peak_bytes)
        self.current_bytes |= event.live_bytes

    def _update_peak(self, state: dict[str, int]) -> None:
        if sum(state.values()) > sum(self.bytes_at_peak.values()):
            self.bytes_at_peak = dict(state)


class Fsdp2Simulator:
    """FSDP2: per-parameter sharding.

    An all-gather fills one buffer, which is then copied to the parameters. In forward, the buffer lives until the next
    all-gather is done. In backward, FSDP prefetches the unit that preceded the current one in forward. A reduce-scatter
    copies the gradients to an input buffer that lives until the next reduce-scatter.

    Source: torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_param_group.py`, `_fsdp_collectives.py`.
    """

    def __init__(self, units: Sequence[FsdpUnit], job: TrainingJob, timeline: MemoryTimeline) -> None:
        self._units, self._job, self._timeline = units, job, timeline
        self._unit_of_module = {name: unit for unit in units for name in unit.modules}
        self._unit_of_parameter = {parameter.name: unit for unit in units for parameter in unit.parameters}
        self._root = self._unit_of_module.get(ROOT)
        self._unsharded: set[FsdpUnit] = set()
        self._prefetched: set[FsdpUnit] = set()
        self._forward_order: list[FsdpUnit] = []
        self._entered_modules: dict[FsdpUnit, list[str]] = {}
        self._reduced: set[FsdpUnit] = set()
        self._gather_buffer_bytes = self._reduce_buffer_bytes = 0
        self._is_backward = False
        # Without a reduction after each micro-batch, unsharded gradients of the full model accumulate.
        self._accumulates = job.accumulation > 1 and not job.sync_each_batch
        # Accumulated gradients have the dtype in which they will be reduced (`reduce_dtype`).
        factor = job.reduction_factor if self._accumulates else 0
        self._gradient_bytes = {unit: round(unit.unsharded_gradient_bytes * factor) for unit in units}
        timeline.add(UNSHARDED_GRADIENTS, sum(self._gradient_bytes.values()))

    def run(self, events: Iterable[TraceEvent]) -> None:
        """Replay the events of one step, and add the memory that FSDP allocates and frees to the timeline."""
        if self._root is not None:
            self._pre_forward(self._root, ROOT)
        for event in events:
            self._timeline.apply(event)
            unit = self._unit_of_module.get(event.name)
            if event.kind == "gradient":
                self._gradient(self._unit_of_parameter[event.name], event.name)
            elif event.kind == "forward_done":
                self._forward_done()
            elif event.kind == "step_done":
                self._step_done()
            elif unit is not None and event.kind == "pre_backward":
                self._pre_backward(unit)
            elif unit is not None and event.kind == "post_backward":
                self._post_backward(unit, event.name)
            # Forward events during backward come from recomputed layers. These are already gathered, so nothing changes.
            elif unit is not None and not self._is_backward:
                (self._pre_forward if event.kind == "pre_forward" else self._post_forward)(unit, event.name)

    def _unsharded_bytes(self, unit: FsdpUnit) -> int:
        return unit.unsharded_bytes

    def _buffer_bytes(self, unit: FsdpUnit) -> int:
        return self._unsharded_bytes(unit) if self._job.num_shards > 1 else 0

    def _pre_forward(self, unit: FsdpUnit, name: str) -> None:
        self._entered_modules.setdefault(unit, []).append(name)
        if unit in self._unsharded:
            return
        self._timeline.add(GATHERED, self._buffer_bytes(unit))
        self._timeline.add(GATHERED, -self._gather_buffer_bytes)
        self._gather_buffer_bytes = self._buffer_bytes(unit)
        self._unshard(unit)

    def _post_forward(self, unit: FsdpUnit, name: str) -> None:
        if set(self._entered_modules.get(unit, [])) != set(unit.modules):
            return
        if unit not in self._forward_order:
            self._forward_order.append(unit)
        if unit.reshards_after_forward:
            self._reshard(unit)

    def _unshard(self, unit: FsdpUnit) -> None:
        self._unsharded.add(unit)
        self._timeline.add(GATHERED, self._unsharded_bytes(unit))

    def _reshard(self, unit: FsdpUnit) -> None:
        if unit in self._unsharded:
            self._unsharded.remove(unit)
            self._timeline.add(GATHERED, -self._unsharded_bytes(unit))

    def _forward_done(self) -> None:
        self._timeline.add(GATHERED, -self._gather_buffer_bytes)
        self._gather_buffer_bytes, self._is_backward = 0, True
        if self._root is not None and self._root.parameters and self._forward_order:
            self._prefetch(self._forward_order[-1])
        for unit in self._units:
            if unit not in self._entered_modules and unit not in self._unsharded:
                # TRL's fused loss bypasses the head's forward. If the head is a separate unit, the loss gathers it
                # with full_tensor and keeps it. Source: trl 1.16 `trainer/utils.py`, `_fused_forward`.
                self._unshard(unit)

    def _pre_backward(self, unit: FsdpUnit) -> None:
        if unit not in self._unsharded and unit not in self._reduced:
            if unit not in self._prefetched:
                self._timeline.add(GATHERED, self._buffer_bytes(unit))
            self._prefetched.discard(unit)
            self._unshard(unit)
            self._timeline.add(GATHERED, -self._buffer_bytes(unit))
        if unit in self._forward_order:
            position = self._forward_order.index(unit)
            if position > 0:
                self._prefetch(self._forward_order[position - 1])

    def _prefetch(self, unit: FsdpUnit) -> None:
        if unit not in self._unsharded | self._prefetched | self._reduced:
            self._prefetched.add(unit)
            self._timeline.add(GATHERED, self._buffer_bytes(unit))

    def _gradient(self, unit: FsdpUnit, name: str) -> None:
        if not self._accumulates:
            parameter = next(parameter for parameter in unit.parameters if parameter.name == name)
            num_bytes = round(parameter.num_elements * parameter.unsharded_item_bytes)
            self._gradient_bytes[unit] += num_bytes
            self._timeline.add(UNSHARDED_GRADIENTS, num_bytes)

    def _post_backward(self, unit: FsdpUnit, name: str) -> None:
        if name == self._entered_modules[unit][0]:
            self._reduce(unit)

    def _reduce(self, unit: FsdpUnit) -> None:
        """Free the gathered parameters of a unit and reduce its gradients."""
        if unit in self._reduced:
            return
        self._reduced.add(unit)
        self._reshard(unit)
        if not unit.trained:
            return
        self._timeline.add(UNSHARDED_GRADIENTS, -self._reduce_buffer_bytes)
        self._reduce_buffer_bytes = self._bytes_to_reduce(unit)
        self._timeline.add(UNSHARDED_GRADIENTS, self._reduce_buffer_bytes)
        self._free_gradients(unit)
        self._add_reduced(unit)

    def _bytes_to_reduce(self, unit: FsdpUnit) -> int:
        factor = 1 if self._accumulates else self._job.reduction_factor
        return round(self._gradient_bytes[unit] * factor)

    def _free_gradients(self, unit: FsdpUnit) -> None:
        self._timeline.add(UNSHARDED_GRADIENTS, -self._gradient_bytes[unit])
        self._gradient_bytes[unit] = 0

    def _add_reduced(self, unit: FsdpUnit) -> None:
        self._timeline.add(REDUCED_GRADIENTS, unit.shard_gradient_bytes)
        if self._job.is_offloaded:
            self._timeline.add(REDUCED_GRADIENTS, -unit.shard_gradient_bytes)

    def _step_done(self) -> None:
        for unit in self._units:
            self._reduce(unit)
        self._timeline.add(UNSHARDED_GRADIENTS, -self._reduce_buffer_bytes)
        self._reduce_buffer_bytes = 0


class Fsdp1Simulator(Fsdp2Simulator):
    """FSDP1: the parameters of each unit are flattened into one tensor.

    An all-gather fills the unit's single buffer. Backward prefetches the unit that preceded the current one in forward.
    As soon as the last gradient of a unit is computed, its gradients are flattened into one tensor and reduced.

    Source: torch 2.13 `distributed/fsdp/_runtime_utils.py`, `_flat_param.py`.
    """

    def __init__(self, units: Sequence[FsdpUnit], job: TrainingJob, timeline: MemoryTimeline) -> None:
        super().__init__(units, job, timeline)
        self._missing_gradients = {unit: {parameter.name for parameter in unit.trained} for unit in units}

    def _unsharded_bytes(self, unit: FsdpUnit) -> int:
        staging_bytes = unit.shard_bytes if self._job.is_offloaded else 0
        is_cast = any(p.unsharded_item_bytes != p.sharded_item_bytes for p in unit.parameters)
        if self._job.num_shards == 1 and not is_cast:
            return staging_bytes  # forward and backward use the stored parameters
        return unit.unsharded_bytes + staging_bytes

    def _buffer_bytes(self, unit: FsdpUnit) -> int:
        return 0

    def _prefetch(self, unit: FsdpUnit) -> None:
        if unit not in self._unsharded and unit not in self._reduced:
            self._unshard(unit)

    def _gradient(self, unit: FsdpUnit, name: str) -> None:
        super()._gradient(unit, name)
        self._missing_gradients[unit].discard(name)
        if not self._missing_gradients[unit] and unit.modules != (ROOT,):
            self._reduce(unit)

    def _post_backward(self, unit: FsdpUnit, name: str) -> None:
        if not unit.trained:
            self._reduce(unit)

    def _reduce(self, unit: FsdpUnit) -> None:
        if unit in self._reduced:
            return
        self._reduced.add(unit)
        flat_bytes = 0 if self._accumulates else self._bytes_to_reduce(unit)
        self._timeline.add(UNSHARDED_GRADIENTS, flat_bytes)
        self._timeline.add(UNSHARDED_GRADIENTS, -flat_bytes)
        self._reshard(unit)
        if unit.trained:
            self._add_reduced(unit)
            self._free_gradients(unit)


def simulate_step(
    events: Iterable[TraceEvent], units: Sequence[FsdpUnit], job: TrainingJob, resident_bytes: dict[str, int]
) -> dict[str, int]:
    """Return the bytes of each category at the peak of a step; `resident_bytes` stay allocated throughout."""
    timeline = MemoryTimeline(resident_bytes)
    simulator = (Fsdp2Simulator if job.strategy.version == 2 else Fsdp1Simulator)(units, job, timeline)
    simulator.run(events)
    return timeline.bytes_at_peak
