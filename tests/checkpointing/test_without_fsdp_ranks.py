"""Checkpoints that Trainer writes without FSDP: complete by a manifest, verified on resume, kept apart from other runs."""

import shutil

import pytest
from transformers import TrainerCallback

from hf_fsdp_recipes import ShardedCheckpointCallback
from tests.ranks.harness import run_ranks
from tests.ranks.lock_holder import locked_by_another, wait_briefly
from tests.ranks.training import build, losses_of

ENVIRONMENT = {"ACCELERATE_USE_CPU": "true"}
DEFAULTS = {"loader": "stock", "save_strategy": "steps", "save_steps": 2, "steps": 5}


def _run(model, data, output, resume=None, **keywords):
    options = {name: keywords.pop(name) for name in ("previous_run", "export_dir") if name in keywords}
    callbacks = [ShardedCheckpointCallback(**options)]
    trainer = build(str(model), str(data), str(output), callbacks=callbacks, **(DEFAULTS | keywords))
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


def _refused(*arguments, **keywords):
    from hf_fsdp_recipes.errors import RecipeError

    try:
        _run(*arguments, **keywords)
    except RecipeError as error:
        return str(error)
    return None


def _lives(model, data, output):
    """Train, start a second run, then resume incomplete and damaged copies of the run; return what happened."""
    from hf_fsdp_recipes import distributed, latest_checkpoint
    from hf_fsdp_recipes.checkpointing import layout

    def copy(name):
        distributed.run_on_main(lambda: shutil.copytree(output, output.parent / name) and None)
        return output.parent / name

    found = {"whole": losses_of(_run(model, data, output, save_total_limit=2))}
    found["kept"] = [(one.step, one.fault) for one in layout.list_checkpoints(output)]
    found["second run"] = _refused(model, data, output)
    torn = copy("torn")
    if distributed.is_main():
        (torn / "checkpoint-5" / layout.MANIFEST).unlink()
    distributed.barrier()
    newest = latest_checkpoint(torn)
    found["newest"] = newest.name
    found["resumed"] = losses_of(_run(model, data, torn, resume=newest))
    found["finished"] = losses_of(_run(model, data, torn, resume=latest_checkpoint(torn)))
    damaged = copy("damaged")
    if distributed.is_main():
        weights = damaged / "checkpoint-4" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-3] ^= 1
        weights.write_bytes(content)
    distributed.barrier()
    found["damaged"] = _refused(model, data, damaged, resume=damaged / "checkpoint-4")
    return found


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_checkpoints_without_fsdp_are_complete_or_absent(tiny_model, text_file, tmp_path, world_size):
    model, output = tiny_model("llama"), tmp_path / "run"
    results = run_ranks(_lives, world_size, model, text_file, output, environment=ENVIRONMENT)
    assert all(found == results[0] for found in results)
    (found, *_) = results
    assert found["kept"] == [(4, None), (5, None)]
    assert "holds checkpoint-4 of another run. Resume it with resume_from_checkpoint=auto" in found["second run"]
    assert found["newest"] == "checkpoint-4"
    assert found["resumed"] == found["finished"] == found["whole"]
    assert "model.safetensors has changed: its checksum differs" in found["damaged"]
    assert sorted(path.name for path in (tmp_path / "torn").glob("checkpoint-*")) == [
        "checkpoint-4", "checkpoint-5", "checkpoint-5.set-aside-0"
    ]  # fmt: skip


def test_checkpoint_of_another_model_is_refused(tiny_model, changed_model, text_file, tmp_path):
    model = tiny_model("llama")
    run_ranks(_refused, 1, model, text_file, tmp_path, environment=ENVIRONMENT)
    for layers, text in {
        1: "has 13 tensors that this run's model lacks",
        3: "lacks 13 tensors of this run's model",
    }.items():
        (error,) = run_ranks(
            _refused, 1, changed_model(num_hidden_layers=layers), text_file, tmp_path, tmp_path / "checkpoint-4",
            environment=ENVIRONMENT,
        )  # fmt: skip
        assert text in error


def _train_twice(model, data, output):
    """Train with a limit of one checkpoint, then again without a limit; return the checkpoints of the second run."""
    trainer = _run(model, data, output, steps=4, save_total_limit=1)
    trainer.args.save_total_limit = None
    trainer.train()
    return sorted(path.name for path in output.glob("checkpoint-*") if "aside" not in path.name)


def test_limit_that_was_removed_between_two_runs_deletes_nothing(tiny_model, text_file, tmp_path):
    (names,) = run_ranks(_train_twice, 1, tiny_model("llama"), text_file, tmp_path, environment=ENVIRONMENT)
    assert names == ["checkpoint-2", "checkpoint-4"]


def _change_optimizer(model, data, output, optims):
    """Resume a run with other optimizers; return the errors."""
    _run(model, data, output, steps=2, optim="adamw_torch")
    return [_refused(model, data, output, resume=output / "checkpoint-2", optim=optim, steps=3) for optim in optims]


def test_checkpoint_of_another_optimizer_is_refused(tiny_model, text_file, tmp_path):
    (errors,) = run_ranks(
        _change_optimizer, 1, tiny_model("llama"), text_file, tmp_path, ("sgd", "adafactor", "adamw_8bit", "adamw_torch_fused"),
        environment=ENVIRONMENT,
    )  # fmt: skip
    assert f"{tmp_path}/checkpoint-2 was trained with adamw_torch, which has the settings amsgrad, betas" in errors[0]
    assert "but this run's SGD has dampening, momentum, nesterov instead. Set optim as in that run" in errors[0]
    assert "Adafactor" in errors[1] and "this run's ShardedAdamW has alpha" in errors[2]
    assert errors[3] is None


WITHOUT_SAVES = {
    "no saves": {"save_strategy": "no"},
    "no optimizer": {"save_only_model": True},
}


def _start_elsewhere(model, data, outputs, keywords):
    wait_briefly()
    return [_refused(model, data, output, **keywords) for output in outputs]


@pytest.mark.parametrize("keywords", WITHOUT_SAVES.values(), ids=WITHOUT_SAVES)
def test_run_without_checkpoints_keeps_to_its_own_directory(tiny_model, text_file, tmp_path, keywords):
    arguments = tiny_model("llama"), text_file
    run_ranks(_run_once, 1, *arguments, tmp_path / "used", environment=ENVIRONMENT)
    outputs = [tmp_path / name for name in ("used", "held", "free")]
    with locked_by_another(tmp_path / "held", tmp_path):
        (found,) = run_ranks(_start_elsewhere, 1, *arguments, outputs, keywords, environment=ENVIRONMENT)
    used, held, free = found
    assert "holds checkpoint-2 of another run" in used
    assert f"{tmp_path}/held is in use by another run (process" in held
    assert free is None


def _run_once(*arguments):
    _run(*arguments)


def _stock(model, data, output):
    """Train with a stock Trainer, then start a run with the callback in its directory."""
    trainer = build(str(model), str(data), str(output), **(DEFAULTS | {"steps": 8}))
    trainer.train()
    refused = _refused(model, data, output)
    _run(model, data, output, previous_run="archive", save_total_limit=1)
    return refused


def test_checkpoints_of_a_stock_trainer_belong_to_another_run(tiny_model, text_file, tmp_path):
    (refused,) = run_ranks(_stock, 1, tiny_model("llama"), text_file, tmp_path, environment=ENVIRONMENT)
    assert "of another run. Resume it with resume_from_checkpoint=/" in refused  # `auto` needs a manifest
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-5"]
    assert len(list((tmp_path / "previous-1").glob("checkpoint-*"))) == 4


def test_checkpoint_without_optimizer_is_not_resumed_by_auto(tiny_model, text_file, tmp_path):
    from hf_fsdp_recipes import latest_checkpoint

    run_ranks(_refused_without_optimizer, 1, tiny_model("llama"), text_file, tmp_path, environment=ENVIRONMENT)
    assert (tmp_path / "checkpoint-5" / "model.safetensors").is_file()
    assert latest_checkpoint(tmp_path) is None


def _refused_without_optimizer(model, data, output):
    assert _refused(model, data, output, save_only_model=True) is None


def _diverge(model, data, output):
    import torch

    from hf_fsdp_recipes.errors import DivergenceError

    class Poison(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = float("nan")

    trainer = build(
        str(model), str(data), str(output), **DEFAULTS,
        callbacks=[Poison(), ShardedCheckpointCallback(export_dir=output / "export")],
    )  # fmt: skip
    try:
        trainer.train()
    except DivergenceError as error:
        return str(error)
    return None


def test_diverged_weights_are_not_exported_without_fsdp(tiny_model, text_file, tmp_path):
    (error,) = run_ranks(_diverge, 1, tiny_model("llama"), text_file, tmp_path, environment=ENVIRONMENT)
    assert "the weights contain NaN or infinity" in error
    assert not (tmp_path / "export").exists()
