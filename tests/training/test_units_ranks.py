"""A gradient that FSDP2 would not sum over the ranks is noted before the first update."""

import pytest

from tests.ranks.harness import FSDP2, fsdp_environment, printed_by, run_ranks
from tests.ranks.training import build


def _train_with_penalty(model_dir, data, output, is_frozen):
    """Add a loss that gathers a layer's weight itself; return what is printed."""
    trainer = build(str(model_dir), str(data), str(output), steps=2)
    compute_loss = trainer.compute_loss

    def with_penalty(model, *inputs, **keywords):
        weight = model.model.layers[0].mlp.up_proj.weight
        return compute_loss(model, *inputs, **keywords) + weight.full_tensor().square().sum()

    trainer.compute_loss = with_penalty
    if is_frozen:
        trainer.model.requires_grad_(False)
        trainer.model.get_output_embeddings().requires_grad_(True)
    return printed_by(trainer.train)


def test_a_weight_that_a_loss_gathers_itself_is_noted_once(tiny_model, text_file, tmp_path):
    arguments = (tiny_model("llama"), text_file, tmp_path / "run", False)
    environment = fsdp_environment(FSDP2)
    first, second = run_ranks(_train_with_penalty, 2, *arguments, environment=environment)
    assert first.count("layers.0.mlp.up_proj.weight is used outside of the forward pass") == 1
    assert "note:" not in second


@pytest.mark.parametrize(("world_size", "is_frozen"), [(1, False), (2, True)])
def test_one_rank_and_frozen_weights_need_no_note(
    world_size, is_frozen, tiny_model, text_file, tmp_path
):
    arguments = (tiny_model("llama"), text_file, tmp_path / "run", is_frozen)
    environment = fsdp_environment(FSDP2)
    printed = run_ranks(_train_with_penalty, world_size, *arguments, environment=environment)
    assert not any("note:" in text for text in printed)
