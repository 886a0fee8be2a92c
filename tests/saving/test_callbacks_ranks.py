"""What other callbacks write in `on_save` belongs to a checkpoint; what they change later does not.

It does not matter where they stand in the list of callbacks.
"""

import functools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from hf_fsdp_recipes.errors import CheckpointError
from tests.ranks.harness import start_ranks
from tests.saving.runs import (
    BEST,
    describe,
    digests_in,
    make_trainer,
    names_in,
    on,
    rank,
    slow_disk,
    steps_in,
    train,
)


def _checkpoint(trainer):
    return Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")


def _write_all(trainer):
    """Write what users' callbacks write: the adapter, its config, a tokenizer, state, notes."""
    checkpoint = _checkpoint(trainer)
    checkpoint.mkdir(exist_ok=True)
    weights = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in trainer.model.state_dict().items()
        if "lora_" in name
    }
    (checkpoint / f"of-rank-{rank()}.txt").write_text("mine")
    if rank() == 0:
        trainer.model.save_pretrained(checkpoint, state_dict=weights)
        trainer.model.config.save_pretrained(checkpoint)
        trainer.processing_class.save_pretrained(checkpoint)
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        state["log_history"].append({"note": "mine"})
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))


def _write_all_in_on_save(trainer, place):
    """Write in a callback before ours, after ours, or in one that is added during training."""

    def add(state, control):
        if state.global_step == 0 or place != "late":
            on(trainer, "on_save", lambda *_: _write_all(trainer), is_last=place != "first")

    if place == "late":
        on(trainer, "on_step_begin", add)
    else:
        add(trainer.state, trainer.control)


@pytest.mark.parametrize(
    ("world", "place", "callback"),
    [
        ("fsdp", "first", {}),
        ("fsdp", "late", {}),
        ("fsdp", "first", {"asynchronous": False}),
        ("ddp", "last", {}),
        ("one", "late", {}),
    ],
)
def test_what_callbacks_write_in_on_save_belongs_to_the_checkpoint(
    run, tmp_path, world, place, callback
):
    prepare = functools.partial(_write_all_in_on_save, place=place)
    options = {"world": world, "sft": True, "lora": True, "prepare": prepare, "callback": callback}
    results = run(tmp_path, **options)
    assert results[0]["error"] is None and results[0]["warnings"] == []
    assert steps_in(tmp_path) == [2, 4]
    # TRL writes a model card beside them.
    assert names_in(tmp_path) == ["README.md", "checkpoint-2", "checkpoint-4"]
    for step in (2, 4):
        checkpoint = tmp_path / f"checkpoint-{step}"
        written = {"adapter_model.safetensors", "adapter_config.json", "config.json"}
        written |= {f"of-rank-{number}.txt" for number in range(len(results))}
        assert written | {"tokenizer.json"} <= set(names_in(checkpoint))
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        assert state["log_history"][-1] == {"note": "mine"}
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = run(tmp_path, **options)[0]
    assert resumed == results[0] | {"resumed": "checkpoint-2"}


def _push(trainer):
    """Note what is pushed to the Hub."""
    trainer.args.push_to_hub = True

    def note(folder):
        names = names_in(Path(folder))
        trainer.notes.append((folder, "manifest.json" in names, "of-rank-0.txt" in names))

    trainer._push_from_checkpoint = note
    on(trainer, "on_save", lambda state, control: _write_note(trainer))


def _write_note(trainer, name=None):
    checkpoint = _checkpoint(trainer)
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / (name or f"of-rank-{rank()}.txt")).write_text("mine")


def _write_a_manifest(trainer):
    on(trainer, "on_save", lambda state, control: _write_note(trainer, "manifest.json"))


def test_a_callback_that_writes_a_manifest_makes_saves_fail_with_the_reason(run, tmp_path):
    (result,) = run(tmp_path, 1, world="one", prepare=_write_a_manifest)
    assert "a callback wrote manifest.json" in result["error"]
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_the_hub_gets_complete_checkpoints_with_what_callbacks_wrote(run, tmp_path, world):
    (result,) = run(tmp_path, 1, world=world, prepare=_push)
    folders = [str(tmp_path / f"checkpoint-{step}") for step in (2, 4)]
    assert result["notes"] == [(folder, True, True) for folder in folders]


def _save_step_2_twice(trainer):
    """Save step 2 again when the epoch ends, and write another note each time."""
    names = iter(("of-the-first.txt", "of-the-second.txt"))
    on(trainer, "on_save", lambda state, control: _write_note(trainer, next(names)))
    on(trainer, "on_epoch_end", lambda state, control: setattr(control, "should_save", True))


# Two steps of two ranks.
EPOCH = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 12}


@pytest.mark.parametrize("world", ["fsdp", "ddp"])
def test_a_second_save_of_a_step_keeps_what_callbacks_wrote_into_the_first(run, tmp_path, world):
    result = run(tmp_path, world=world, prepare=_save_step_2_twice, **EPOCH)[0]
    assert result["error"] is None and steps_in(tmp_path) == [2]
    assert names_in(tmp_path) == ["checkpoint-2"]
    assert {"of-the-first.txt", "of-the-second.txt"} <= set(names_in(tmp_path / "checkpoint-2"))


def _die_in_the_second_on_save(trainer):
    saves = []

    def write_or_die(state, control):
        saves.append(state.global_step)
        _write_note(trainer, f"of-save-{len(saves)}.txt")
        if len(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    on(trainer, "on_save", write_or_die)
    if trainer.args.num_train_epochs == 1:
        on(trainer, "on_epoch_end", lambda state, control: setattr(control, "should_save", True))


def _find_as_transformers_does(output):
    """Return from which checkpoint a trainer resumes with `resume_from_checkpoint=True`."""
    from transformers.trainer_utils import get_last_checkpoint

    from hf_fsdp_recipes import ShardedCheckpointCallback

    make_trainer(output, [ShardedCheckpointCallback()])
    return Path(get_last_checkpoint(str(output))).name


@pytest.mark.parametrize("world", ["fsdp", "ddp"])
@pytest.mark.parametrize("options", [{}, EPOCH], ids=["of step 4", "of step 2 again"])
def test_a_kill_in_on_save_leaves_the_checkpoint_before_and_no_partial_one(
    worlds, run, tmp_path, world, options
):
    killed = functools.partial(train, tmp_path, prepare=_die_in_the_second_on_save, **options)
    processes, _ = start_ranks(killed, 2, environment=worlds[world])
    for process in processes:
        process.join(60)
    assert processes[0].exitcode == -signal.SIGKILL
    # The first of two checkpoints of one step has this name until the second is complete.
    before = "checkpoint-02" if options else "checkpoint-2"
    assert run(tmp_path, world=world, function=_find_as_transformers_does) == [before] * 2
    # Four steps: the run of one epoch is resumed for a second one.
    more = options and {"num_train_epochs": 2}
    resumed = run(tmp_path, world=world, **options | more)[0]
    assert resumed["resumed"] == before and resumed["error"] is None
    assert steps_in(tmp_path) == [2, 4]
    assert names_in(tmp_path) == [before, "checkpoint-4"]


def _halve_weights(trainer):
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.data.mul_(0.5)


def _halve_weights_after_each_save(trainer):
    """Change the weights in `on_save` and before the next step, as averaging callbacks do."""
    slow_disk()
    on(trainer, "on_save", lambda state, control: _halve_weights(trainer))
    on(trainer, "on_step_begin", lambda state, control: _halve_weights(trainer))
    on(trainer, "on_step_end", lambda *_: trainer.notes.append(describe(trainer)["trained"]))


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_weights_that_callbacks_change_after_a_save_are_saved_as_they_were(run, tmp_path, world):
    (result,) = run(tmp_path, 1, world=world, prepare=_halve_weights_after_each_save)
    assert steps_in(tmp_path) == [2, 4]
    for step in (2, 4):
        assert digests_in(tmp_path / f"checkpoint-{step}") == result["notes"][step - 1]


class Averaging(torch.optim.Optimizer):
    """Evaluates the average of the weights that it trains, like the optimizers of schedulefree."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "trains": True, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["num_steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = parameter.detach().clone()
                    state["trained"] = parameter.detach().clone()
                parameter.sub_(parameter.grad, alpha=group["lr"])
                state["average"].lerp_(parameter, 1 / group["num_steps"])

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for parameter in group["params"] if group["trains"] else ():
                if state := self.state[parameter]:
                    state["trained"].copy_(parameter)
                    parameter.copy_(state["average"])
            group["trains"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            for parameter in () if group["trains"] else group["params"]:
                if state := self.state[parameter]:
                    parameter.copy_(state["trained"])
            group["trains"] = True


def _average(trainer):
    slow_disk()
    trainer.optimizer_cls_and_kwargs = (Averaging, {"lr": 1e-1})
    on(trainer, "on_evaluate", lambda *_: trainer.notes.append(describe(trainer)["trained"]))


def _train_stock_and_ours(output, **options):
    return train(output / "stock", stock=True, **options), train(output / "ours", **options)


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_averages_that_an_optimizer_swaps_in_are_saved_and_resumed_as_by_stock(
    run, tmp_path, world
):
    options = {"prepare": _average, "eval_strategy": "steps", "eval_steps": 2}
    function = _train_stock_and_ours
    ((stock, ours),) = run(tmp_path, 1, world=world, function=function, **options)
    assert ours == stock
    assert steps_in(tmp_path / "ours") == [2, 4]
    for step, noted in zip((2, 4), ours["notes"], strict=True):
        assert digests_in(tmp_path / "ours" / f"checkpoint-{step}") == noted
        assert digests_in(tmp_path / "stock" / f"checkpoint-{step}") == noted
    shutil.rmtree(tmp_path / "ours" / "checkpoint-4")
    (resumed,) = run(tmp_path / "ours", 1, world=world, **options)
    assert resumed == ours | {"resumed": "checkpoint-2", "notes": ours["notes"][1:]}


def test_logs_with_the_speed_of_training_do_not_end_the_deletion_of_checkpoints(run, tmp_path):
    options = {"include_num_input_tokens_seen": "all", "save_steps": 1, "save_total_limit": 2}
    run(tmp_path, 1, **options)
    assert steps_in(tmp_path) == [3, 4]


def _save_without_on_save(trainer):
    """Save as callbacks do that call Trainer's method themselves."""

    def save(state, control):
        if state.global_step in (3, 4):
            trainer._save_checkpoint(trainer.model, None)

    on(trainer, "on_step_end", save)


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_a_save_without_on_save_is_complete_also_if_trainer_saves_the_same_step(
    run, tmp_path, world
):
    result = run(tmp_path, world=world, prepare=_save_without_on_save)[0]
    assert result["error"] is None and steps_in(tmp_path) == [2, 3, 4]
    assert names_in(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]


def _save_step_3_and_fail_in_step_7(trainer):
    _save_without_on_save(trainer)

    def fail(state, control):
        if state.global_step == 6:
            raise CheckpointError("a bad row")

    on(trainer, "on_step_begin", fail)


def test_a_save_without_on_save_is_complete_if_the_run_fails_later(run, tmp_path):
    options = {"max_steps": 8, "save_strategy": "no", "prepare": _save_step_3_and_fail_in_step_7}
    assert run(tmp_path, world="one", **options)[0]["error"] == "a bad row"
    assert steps_in(tmp_path) == [3, 4] and names_in(tmp_path) == ["checkpoint-3", "checkpoint-4"]


def _write_after_saving(trainer):
    """Be a trainer of another class, which writes into the checkpoint and beside it."""

    class Other(type(trainer)):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            _write_note(self)
            beside = Path(self._get_output_dir(trial), f"best-{rank()}.txt")
            beside.write_text(str(self.state.best_global_step))

    trainer.__class__ = Other
    trainer.compute_metrics = lambda _: {"score": -trainer.state.global_step}


def _save_in_another_way(trainer):
    trainer._save_checkpoint = lambda model, trial: None


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_a_trainer_that_saves_in_another_way_is_an_error(run, tmp_path, world):
    for result in run(tmp_path, world=world, prepare=_save_in_another_way):
        assert "without calling Trainer._save_checkpoint" in result["error"]


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_what_a_trainer_of_another_class_writes_after_a_save_stays(run, tmp_path, world):
    results = run(tmp_path, world=world, prepare=_write_after_saving, **BEST)
    assert results[0]["error"] is None and steps_in(tmp_path) == [2, 4]
    for number in range(len(results)):
        assert (tmp_path / f"best-{number}.txt").read_text() == "4"
        assert (tmp_path / "checkpoint-4" / f"of-rank-{number}.txt").is_file()


def _link(trainer):
    outside = Path(trainer.args.output_dir).with_name("outside")
    outside.touch()
    on(trainer, "on_save", lambda *_: (_checkpoint(trainer) / "link").symlink_to(outside))


def test_a_checkpoint_with_a_link_to_the_outside_is_resumed(run, tmp_path):
    run(tmp_path / "run", world="one", prepare=_link)
    assert run(tmp_path / "run", world="one", max_steps=5)[0]["resumed"] == "checkpoint-4"


def test_an_evaluation_before_training_changes_nothing(run, tmp_path):
    (result,) = run(tmp_path, world="one", prepare=_evaluate_first)
    assert result["error"] is None and steps_in(tmp_path) == [2, 4]


def _evaluate_first(trainer):
    on(trainer, "on_train_begin", lambda state, control: trainer.evaluate())


def test_a_callback_can_save_before_the_first_step(run, tmp_path):
    options = {"world": "one", "eval_strategy": "epoch", "prepare": _save_first}
    (result,) = run(tmp_path, **options)
    assert result["error"] is None and steps_in(tmp_path) == [0, 2, 4]


def _save_first(trainer):
    on(trainer, "on_train_begin", lambda *_: trainer._save_checkpoint(trainer.model, None))
