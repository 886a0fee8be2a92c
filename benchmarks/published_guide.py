"""Plans the runs of the distributed training guide's FSDP chapter, to compare the planner's figures with the guide's.

tests/tools/test_planner.py checks the comparison and docs/planner.md prints it. Unlike Trainer's runs, the guide's runs use
torch's own size-based wrapping, keep everything in bf16, upcast logits to fp32 (transformers 4.4x), and keep the outputs and
gradients of a step until the next forward is done, in a plain loop.
"""

import dataclasses
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from hf_fsdp_recipes.configs.strategy import Strategy
from hf_fsdp_recipes.tools.planner.fsdp_simulator import REDUCED_GRADIENTS
from hf_fsdp_recipes.tools.planner.fsdp_units import FsdpUnit, build_units, group_by_policy
from hf_fsdp_recipes.tools.planner.memory_planner import MemoryPlan, MemoryPlanner, gradient_bytes
from hf_fsdp_recipes.tools.planner.step_trace import TraceEvent, make_mask
from hf_fsdp_recipes.tools.planner.training_job import Cluster, TrainingJob


def guide_job(**fields: Any) -> TrainingJob:
    """Return one of the guide's runs on 8 x A100 80GB."""
    job = TrainingJob(
        Strategy("guide", version=1, min_num_params=100_000_000),
        cluster=Cluster(8, 8, 80 * 10**9),
        dtype=torch.bfloat16,
        mixed_precision=None,
        gradient_checkpointing=False,
        loss="model",
        attention="sdpa_padded",  # transformers repeated key and value heads at the time
    )
    return job.replace(**fields)


class GuidePlanner(MemoryPlanner):
    def __init__(self, config: Any) -> None:
        super().__init__(config, self._upcast_loss)
        self._kept_bytes: dict[str, int] = {}

    def plan(self, job: TrainingJob) -> MemoryPlan:
        plan = super().plan(job)
        return dataclasses.replace(plan, valley=plan.valley | self._kept_bytes)

    def find_units(self, model: Any, job: TrainingJob) -> list[FsdpUnit]:
        policy = partial(size_based_auto_wrap_policy, min_num_params=job.strategy.min_num_params)
        return build_units(group_by_policy(model, policy, job.strategy.reshards_after_forward), model, job)

    def trace(self, model: Any, job: TrainingJob, units: list[FsdpUnit]) -> list[TraceEvent]:
        """Return the events; those of the forward pass also count the memory that the loop keeps."""
        events = super().trace(model, job, units)
        outputs_bytes = sum(events[-1].live_bytes.values())
        self._kept_bytes = {"kept outputs": outputs_bytes, REDUCED_GRADIENTS: gradient_bytes(units, job)}
        done = next(index for index, event in enumerate(events) if event.kind == "forward_done")
        in_forward = [
            dataclasses.replace(
                event, live_bytes=event.live_bytes | self._kept_bytes, peak_bytes=event.peak_bytes | self._kept_bytes
            )
            for event in events[: done + 1]
        ]
        freed = events[done].live_bytes | dict.fromkeys(self._kept_bytes, 0)
        return [*in_forward[:-1], dataclasses.replace(in_forward[-1], live_bytes=freed), *events[done + 1 :]]

    def _upcast_loss(self, model: Any, rows: torch.Tensor, job: TrainingJob) -> torch.Tensor:
        mask = make_mask(model, rows, job)
        self._outputs = model(input_ids=rows, attention_mask=mask, use_cache=False).logits.float()
        shifted = self._outputs[:, :-1].contiguous().view(-1, self._outputs.shape[-1])
        return torch.nn.functional.cross_entropy(shifted, rows[:, 1:].reshape(-1))
