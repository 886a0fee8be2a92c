"""Accumulated batches: gradients are reduced once per optimizer step, and the losses equal those of the large batch."""

from collections import Counter

import pytest

from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import build, losses_of

# The collectives that reduce gradients in torch 2.13: for FSDP2, FSDP1, and copies of the model.
REDUCTIONS = ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")
NUM_STEPS = 4
BOTH = pytest.mark.parametrize("fsdp", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)], ids=["fsdp2", "fsdp1"])


class CountedBackward:
    """Counts backward passes and the reductions inside them; reductions elsewhere are of losses and token counts."""

    def __init__(self, upstream):
        import torch.distributed as dist

        self.upstream, self.is_running, self.counts = upstream, False, Counter()
        for name in REDUCTIONS:
            setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, collective):
        def reduce(*arguments, **keywords):
            self.counts["reductions"] += self.is_running
            return collective(*arguments, **keywords)

        return reduce

    def __call__(self, *arguments, **keywords):
        self.counts["passes"] += 1
        self.is_running = True
        self.upstream(*arguments, **keywords)
        self.is_running = False


def _train(model, data, output, accumulated, rows_a_rank, sync_each_batch):
    """Return the losses, the number of backward passes and the number of reductions in them."""
    trainer = build(
        str(model), str(data), str(output), steps=NUM_STEPS, per_device_train_batch_size=rows_a_rank,
        gradient_accumulation_steps=accumulated,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": sync_each_batch}},
    )  # fmt: skip
    trainer.accelerator.backward = backward = CountedBackward(trainer.accelerator.backward)
    trainer.train()
    return losses_of(trainer), backward.counts["passes"], backward.counts["reductions"]


@pytest.fixture
def train(tiny_model, text_file, tmp_path):
    def run(fsdp, world_size, accumulated, rows_a_rank, sync_each_batch=False):
        arguments = (tiny_model("llama"), text_file, tmp_path / "run", accumulated, rows_a_rank, sync_each_batch)
        results = run_ranks(_train, world_size, *arguments, environment=fsdp_environment(fsdp))
        assert len({result[1:] for result in results}) == 1  # every rank counts the same
        return results[0]

    return run


@BOTH
def test_accumulation_reduces_gradients_once_per_optimizer_step_with_the_losses_of_the_large_batch(train, fsdp):
    large_batch, passes, reductions = train(fsdp, 2, 1, 2)
    assert (passes, reductions > 0, reductions % NUM_STEPS) == (NUM_STEPS, True, 0)
    accumulated, passes, reductions_of_two = train(fsdp, 2, 2, 1)
    assert (passes, reductions_of_two) == (2 * NUM_STEPS, reductions)
    *_, every_time = train(fsdp, 2, 2, 1, sync_each_batch=True)
    assert every_time == 2 * reductions  # so extra reductions are counted
    one_rank, passes, _ = train(fsdp, 1, 4, 1)
    assert passes == 4 * NUM_STEPS
    assert len(one_rank) == NUM_STEPS and one_rank[-1] < one_rank[0] - 0.1  # loss falls: equal losses are equal updates
    assert accumulated == pytest.approx(one_rank, abs=1e-5)
    assert large_batch == pytest.approx(one_rank, abs=1e-5)
