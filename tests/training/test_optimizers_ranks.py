"""Optimizers under FSDP: the losses of one rank and an exact resume, or an error that names them before training."""

import os

import pytest
import torch

from hf_fsdp_recipes.configs.optimizers import SHARDABLE
from tests.checkpointing.test_save_ranks import _digest, drop_after
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import build, losses_of

MUON = "muon"  # torch's optimizer; Trainer has no name for it
TEMPLATES = {1: FSDP1, 2: FSDP2}
CASES = [(MUON, 2), *((optimizer, version) for version in SHARDABLE for optimizer in SHARDABLE[version])]
REFUSED = [
    "adafactor",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    "schedule_free_adamw",
    "galore_adamw",
    "lomo",
    "stable_adamw",
]


def _train(model, data, output, optimizer, resume=False):
    from hf_fsdp_recipes import ShardedCheckpointCallback, latest_checkpoint

    keywords = {} if optimizer == MUON else {"optim": optimizer}
    trainer = build(
        str(model), str(data), str(output), callbacks=[ShardedCheckpointCallback()], save_strategy="steps", save_steps=2,
        steps=4, lr_scheduler_type="constant", learning_rate=1e-3,
        gradient_accumulation_steps=4 // int(os.environ["WORLD_SIZE"]), **keywords,
    )  # fmt: skip
    if optimizer == MUON:
        for parameter in trainer.model.parameters():
            parameter.requires_grad_(parameter.ndim == 2)  # Muon updates matrices only
        trainer.optimizer_cls_and_kwargs = (torch.optim.Muon, {"lr": 1e-2})
    trainer.train(resume_from_checkpoint=str(latest_checkpoint(output)) if resume else None)
    return losses_of(trainer), _digest(trainer)


@pytest.mark.parametrize(
    ("optimizer", "version"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_two_ranks_have_the_losses_of_one_and_resume_exactly(optimizer, version, tiny_model, text_file, tmp_path):
    def train(name, world_size, resume=False):
        environment = fsdp_environment(TEMPLATES[version]) if world_size > 1 else None
        arguments = (tiny_model("llama"), text_file, tmp_path / name, optimizer, resume)
        return run_ranks(_train, world_size, *arguments, environment=environment)

    ((alone, _),), two = train("one", 1), train("two", 2)
    # Muon computes its updates in bfloat16, and products of shards are summed in another order.
    assert two[0][0] == pytest.approx(alone, rel=2e-4 if optimizer == MUON else 1e-6)
    assert alone[-1] < alone[0]
    drop_after(tmp_path / "two", 2)
    assert train("two", 2, resume=True) == two


@pytest.mark.parametrize("version", TEMPLATES)
def test_own_scripts_with_other_optimizers_are_refused(version, tiny_model, text_file, tmp_path):
    errors = run_ranks(
        _refusals, 2, tiny_model("llama"), text_file, tmp_path, environment=fsdp_environment(TEMPLATES[version])
    )
    assert errors[0] == errors[1]
    for optimizer, message in zip(REFUSED, errors[0], strict=True):
        assert f"optim: {optimizer} fails to train, save or resume under FSDP{version}. Use " in message
        assert "adamw_torch_fused" in message


def _refusals(model, data, output):
    from transformers.training_args import OptimizerNames

    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.errors import CheckpointError

    trainer = build(str(model), str(data), str(output), callbacks=[ShardedCheckpointCallback()], steps=1)
    messages = []
    for optimizer in REFUSED:
        trainer.args.optim = OptimizerNames(optimizer)
        with pytest.raises(CheckpointError) as caught:
            trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
        messages.append(str(caught.value))
    return messages
