"""Memory through one step: what FSDP gathers, frees and reduces around the moments of a traced step.

One class a version; each says which buffers it holds when. Numbers only: nothing is sharded or run.
"""

from collections.abc import Iterable, Sequence

from hf_fsdp_recipes.tools.planner.job import Job
from hf_fsdp_recipes.tools.planner.trace import Moment
from hf_fsdp_recipes.tools.planner.units import ROOT, Unit

GATHERED, WHOLE_GRADIENTS, REDUCED_GRADIENTS = "gathered units", "whole gradients", "gradients"


class Ledger:
    """Bytes by part, and what they were when their sum was highest."""

    def __init__(self, resident: dict[str, int]) -> None:
        self.now = dict(resident)
        self.at_peak = dict(resident)
        self.peak_bytes = sum(resident.values())

    def add(self, part: str, num_bytes: int) -> None:
        """Add bytes to a part, or take them away."""
        self.now[part] = self.now.get(part, 0) + num_bytes
        self._look(self.now)

    def look(self, beside: dict[str, int]) -> None:
        """Take in what was alive beside, at its own peak."""
        if sum(beside.values()) + sum(n for part, n in self.now.items() if part not in beside) > self.peak_bytes:
            self._look({**self.now, **beside})

    def _look(self, state: dict[str, int]) -> None:
        total = sum(state.values())
        if total > self.peak_bytes:
            self.peak_bytes, self.at_peak = total, dict(state)


class Fsdp2:
    """Per-parameter sharding.

    A gather makes one buffer for the collective and one copy that is computed with. In forward the buffer stays
    until the next gather is done; in backward the one before is gathered ahead. A reduction copies the gradients into
    a buffer that stays until the next reduction.

    Source: torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_param_group.py`, `_fsdp_collectives.py`.
    """

    def __init__(self, units: Sequence[Unit], job: Job, ledger: Ledger) -> None:
        self._job, self._ledger, self._num_ranks = job, ledger, job.shard_ranks
        self._by_module = {name: unit for unit in units for name in unit.modules}
        self._by_weight = {weight.name: unit for unit in units for weight in unit.weights}
        self._units = units
        self._whole: set[Unit] = set()
        self._ahead: set[Unit] = set()
        self._order: list[Unit] = []
        self._entered: dict[Unit, list[str]] = {}
        self._reduced: set[Unit] = set()
        self._held_buffer = self._held_reduction = 0
        self._is_backward = False
        # Without a reduction after each micro-batch, the gradients of those before are whole and all there.
        self._is_accumulating = job.accumulation > 1 and not job.sync_each_batch
        self._gradients = {unit: unit.gradient_bytes() if self._is_accumulating else 0 for unit in units}
        ledger.add(WHOLE_GRADIENTS, sum(self._gradients.values()))

    def take(self, moment: Moment) -> None:
        """React to one moment of the step."""
        self._ledger.look(moment.peak_bytes)
        self._ledger.now.update(moment.live_bytes)
        unit = self._by_module.get(moment.name)
        if moment.kind == "gradient":
            self._gradient(self._by_weight[moment.name], moment.name)
        elif moment.kind == "loss":
            self._end_forward()
        elif moment.kind == "end":
            self._end()
        elif unit is not None:
            getattr(self, f"_{moment.kind}")(unit, moment.name)

    def begin(self) -> None:
        """Gather what the root holds itself."""
        root = self._by_module.get(ROOT)
        if root is not None:
            self._enter(root, ROOT)

    def _whole_bytes(self, unit: Unit) -> int:
        return unit.whole_bytes(self._num_ranks, 2)

    def _buffer_bytes(self, unit: Unit) -> int:
        return self._whole_bytes(unit) if self._num_ranks > 1 else 0

    def _enter(self, unit: Unit, name: str) -> None:
        if self._is_backward:
            return  # recomputed: gathered already
        self._entered.setdefault(unit, []).append(name)
        if unit in self._whole:
            return
        self._ledger.add(GATHERED, self._buffer_bytes(unit))
        self._ledger.add(GATHERED, -self._held_buffer)
        self._ledger.add(GATHERED, self._whole_bytes(unit))
        self._held_buffer = self._buffer_bytes(unit)
        self._whole.add(unit)

    def _exit(self, unit: Unit, name: str) -> None:
        if self._is_backward or set(self._entered.get(unit, [])) != set(unit.modules):
            return
        if unit not in self._order:
            self._order.append(unit)
        if unit.reshards:
            self._free(unit)

    def _free(self, unit: Unit) -> None:
        if unit in self._whole:
            self._whole.remove(unit)
            self._ledger.add(GATHERED, -self._whole_bytes(unit))

    def _end_forward(self) -> None:
        self._ledger.add(GATHERED, -self._held_buffer)
        self._held_buffer, self._is_backward = 0, True
        root = self._by_module.get(ROOT)
        if root is not None and root.weights and self._order:
            self._gather_ahead(self._order[-1])
        for unit in self._units:
            if unit not in self._entered and unit not in self._whole:
                self._gather_by_hand(unit)

    def _gather_by_hand(self, unit: Unit) -> None:
        """Gather a unit whose forward never ran: TRL's fused loss gathers a head that is alone, and keeps it.

        Source: trl 1.16 `trainer/utils.py`, `_fused_forward`, `full_tensor`.
        """
        self._whole.add(unit)
        self._ledger.add(GATHERED, self._whole_bytes(unit))

    def _backward_enter(self, unit: Unit, name: str) -> None:
        if unit not in self._whole and unit not in self._reduced:
            if unit not in self._ahead:
                self._ledger.add(GATHERED, self._buffer_bytes(unit))
            self._ahead.discard(unit)
            self._ledger.add(GATHERED, self._whole_bytes(unit))
            self._ledger.add(GATHERED, -self._buffer_bytes(unit))
            self._whole.add(unit)
        if unit in self._order:
            position = self._order.index(unit)
            if position > 0:
                self._gather_ahead(self._order[position - 1])

    def _gather_ahead(self, unit: Unit) -> None:
        if unit not in self._whole and unit not in self._ahead and unit not in self._reduced:
            self._ahead.add(unit)
            self._ledger.add(GATHERED, self._buffer_bytes(unit))

    def _gradient(self, unit: Unit, name: str) -> None:
        if not self._is_accumulating:
            weight = next(weight for weight in unit.weights if weight.name == name)
            num_bytes = round(weight.num_elements * weight.whole_bytes)
            self._gradients[unit] += num_bytes
            self._ledger.add(WHOLE_GRADIENTS, num_bytes)

    def _backward_exit(self, unit: Unit, name: str) -> None:
        if name == self._entered[unit][0]:
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        """Free the unit and reduce its gradients."""
        if unit in self._reduced:
            return
        self._reduced.add(unit)
        self._free(unit)
        if not unit.is_trained:
            return
        self._ledger.add(WHOLE_GRADIENTS, -self._held_reduction)
        self._held_reduction = self._gradients[unit]
        self._ledger.add(WHOLE_GRADIENTS, self._held_reduction)
        self._ledger.add(WHOLE_GRADIENTS, -self._gradients[unit])
        self._gradients[unit] = 0
        self._keep_reduced(unit.reduced_bytes(self._num_ranks, 2))

    def _keep_reduced(self, num_bytes: int) -> None:
        self._ledger.add(REDUCED_GRADIENTS, num_bytes)
        if self._job.is_offloaded:
            self._ledger.add(REDUCED_GRADIENTS, -num_bytes)

    def _end(self) -> None:
        for unit in self._units:
            self._finish(unit)
        self._ledger.add(WHOLE_GRADIENTS, -self._held_reduction)
        self._held_reduction = 0


class Fsdp1(Fsdp2):
    """Flattened units.

    A gather fills the unit's one buffer, the one before is gathered ahead in backward, and a unit is reduced when the
    last of its gradients is there: they are put together into a flat one first.

    Source: torch 2.13 `distributed/fsdp/_runtime_utils.py`, `_flat_param.py`.
    """

    def __init__(self, units: Sequence[Unit], job: Job, ledger: Ledger) -> None:
        super().__init__(units, job, ledger)
        self._missing = {unit: {w.name for w in unit.weights if w.is_trained} for unit in units}

    def _whole_bytes(self, unit: Unit) -> int:
        is_copied = any(weight.whole_bytes != weight.stored_bytes for weight in unit.weights)
        if self._num_ranks == 1 and not is_copied:
            return unit.stored_bytes(1, 1) if self._job.is_offloaded else 0  # computed with as stored
        staged = unit.stored_bytes(self._num_ranks, 1) if self._job.is_offloaded else 0
        return unit.whole_bytes(self._num_ranks, 1) + staged

    def _buffer_bytes(self, unit: Unit) -> int:
        return 0

    def _gather_ahead(self, unit: Unit) -> None:
        if unit not in self._whole and unit not in self._reduced:
            self._whole.add(unit)
            self._ledger.add(GATHERED, self._whole_bytes(unit))

    def _gradient(self, unit: Unit, name: str) -> None:
        super()._gradient(unit, name)
        self._missing[unit].discard(name)
        if not self._missing[unit] and unit.modules != (ROOT,):
            self._finish(unit)

    def _backward_exit(self, unit: Unit, name: str) -> None:
        if not unit.is_trained:
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        if unit in self._reduced:
            return
        self._reduced.add(unit)
        num_bytes = 0 if self._is_accumulating else self._gradients[unit]
        self._ledger.add(WHOLE_GRADIENTS, num_bytes)
        self._ledger.add(WHOLE_GRADIENTS, -num_bytes)
        self._free(unit)
        if unit.is_trained:
            self._keep_reduced(unit.reduced_bytes(self._num_ranks, 1))
            self._ledger.add(WHOLE_GRADIENTS, -self._gradients[unit])
            self._gradients[unit] = 0


def replay(
    moments: Iterable[Moment], units: Sequence[Unit], job: Job, resident: dict[str, int], kept: dict[str, int]
) -> Ledger:
    """Go through a step with a template's rules.

    Args:
        moments: from `trace_step`.
        units: from `find_units`.
        job: strategy, version and ranks.
        resident: bytes that are there all the time, by part.
        kept: bytes of the step before that are there until forward is done, by part.
    """
    ledger = Ledger({**resident, **kept})
    rules = (Fsdp2 if job.strategy.version == 2 else Fsdp1)(units, job, ledger)
    rules.begin()
    for moment in moments:
        if moment.kind == "loss":
            ledger.look(moment.peak_bytes)
            for part, num_bytes in kept.items():
                ledger.add(part, -num_bytes)
        rules.take(moment)
    return ledger
