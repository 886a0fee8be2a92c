"""A signal on one rank, or the launcher's death, makes all ranks save the same step and stop."""

import functools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.ranks.harness import context, free_port
from tests.saving.runs import BEST, names_in, on, rank, steps_in, train, wait_for

SLOW = pytest.mark.slow
ONE_BY_ONE = {"per_device_eval_batch_size": 1}  # so an evaluation has several steps


def _train_and_signal(output, number, options):
    def send(state, control):
        if rank() == 1 and state.global_step == 3:
            os.kill(os.getpid(), number)

    train(
        output,
        prepare=lambda trainer: on(trainer, "on_step_begin", send),
        max_steps=50,
        save_strategy="no",
        **options,
    )


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, {"gradient_accumulation_steps": 2}),
        pytest.param(signal.SIGUSR1, {"sft": True, "lora": True}, marks=SLOW),
        # in the last step of an epoch, whose end would evaluate and save too
        pytest.param(
            signal.SIGTERM, {"per_device_train_batch_size": 6, "eval_strategy": "epoch"}, marks=SLOW
        ),
    ],
)
def test_a_signal_on_one_rank_saves_the_same_step_on_all_and_exits_with_85(
    run, tmp_path, number, options
):
    errors = run(
        tmp_path, function=_train_and_signal, expect_failure=True, number=number, options=options
    )
    assert errors == [("SystemExit", "85")] * 2
    (step,) = steps_in(tmp_path)
    assert step < 6
    assert run(tmp_path, max_steps=step + 1, **options)[0]["resumed"] == f"checkpoint-{step}"


def _signal_in_evaluation(trainer):
    """Send a signal in the first prediction step. Count the prediction steps in a file."""
    file = Path(f"{trainer.args.output_dir}-predicted-{rank()}")

    def send(state, control):
        if rank() == trainer.args.world_size - 1 and not file.exists():
            os.kill(os.getpid(), signal.SIGTERM)
        with file.open("a") as stream:
            stream.write(f"{state.global_step} ")

    on(trainer, "on_prediction_step", send)


@pytest.mark.parametrize("world", ["fsdp", "ddp", "one"])
def test_a_signal_in_an_evaluation_stops_it_and_the_run_is_resumed_exactly(run, tmp_path, world):
    options = {"world": world, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    options |= {"per_device_eval_batch_size": 1, "max_steps": 3}
    whole = run(tmp_path / "whole", **options)
    stopped = options | {"prepare": _signal_in_evaluation, "expect_failure": True}
    errors = run(tmp_path / "run", **stopped)
    assert errors == [("SystemExit", "85")] * len(whole)
    for number in range(len(whole)):  # of at least four prediction steps
        assert len((tmp_path / f"run-predicted-{number}").read_text().split()) < 4
    assert steps_in(tmp_path / "run") == [2] and names_in(tmp_path / "run") == ["checkpoint-2"]
    resumed = run(tmp_path / "run", **options)
    assert resumed[0]["resumed"] == "checkpoint-2"
    assert resumed[0]["weights"] == whole[0]["weights"]


def _launch_two_ranks(environment, output):
    """Fork two ranks, as a launcher does, and wait to be killed."""
    os.environ |= {
        **environment,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ["MASTER_PORT"] = str(free_port())
    os.environ["TORCHELASTIC_RUN_ID"] = "as of torchrun"
    for number in range(2):
        if os.fork() == 0:
            os.setsid()
            os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            try:
                train(output, prepare=_report_steps, max_steps=4000, save_strategy="no")
            except BaseException as error:
                os.symlink(repr(error), output.with_name(f"error-{number}"))  # in one step
            os._exit(0)
    time.sleep(600)


def _report_steps(trainer):
    on(trainer, "on_step_end", lambda *_: Path(f"{trainer.args.output_dir}-started").touch())


def test_when_the_launcher_dies_all_ranks_save_the_same_step_and_exit_with_85(fsdp, tmp_path):
    launcher = context.Process(target=_launch_two_ranks, args=(fsdp, tmp_path / "run"))
    launcher.start()
    wait_for(tmp_path / "run-started")
    launcher.kill()
    for number in range(2):
        wait_for(tmp_path / f"error-{number}")
        assert os.readlink(tmp_path / f"error-{number}") == "SystemExit(85)"
    assert len(steps_in(tmp_path / "run")) == 1


def _send(trainer=None):
    """Send SIGTERM to the last rank."""
    if rank() == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        os.kill(os.getpid(), signal.SIGTERM)


def _signal_in_step_3(trainer):
    on(trainer, "on_step_begin", lambda state, control: state.global_step == 2 and _send())


def _signal_in_step_3_and_evaluate_in_on_save(trainer):
    on(trainer, "on_save", lambda state, control: trainer.evaluate())
    _signal_in_step_3(trainer)


def _signal_in_the_evaluation_in_on_save(trainer):
    on(trainer, "on_save", lambda state, control: trainer.evaluate())
    on(trainer, "on_prediction_step", lambda state, control: state.global_step == 2 and _send())


def _signal_in_an_evaluation(trainer):
    on(trainer, "on_prediction_step", lambda state, control: state.global_step == 2 and _send())


def _signal_twice(trainer):
    _signal_in_step_3(trainer)
    on(trainer, "on_save", lambda state, control: state.global_step == 3 and _send())


def _signal_in_an_evaluation_and_evaluate_at_the_end(trainer):
    _signal_in_an_evaluation(trainer)
    on(trainer, "on_train_end", lambda state, control: trainer.evaluate())


def _signal_workers_too(trainer):
    multiprocessing.current_process()._config["daemon"] = False  # to be allowed to have workers
    multiprocessing.set_start_method("fork", force=True)  # as on Linux, unlike in these tests

    def send(state, control):
        if state.global_step == 2:
            workers = psutil.Process().children()
            assert len(workers) == 2
            for process in [*workers, psutil.Process()]:
                process.send_signal(signal.SIGUSR1)

    on(trainer, "on_step_begin", send)


ONE_BATCH = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 100}


@pytest.mark.parametrize(
    ("prepare", "options"),
    [
        (_signal_in_step_3_and_evaluate_in_on_save, {}),
        (_signal_in_the_evaluation_in_on_save, {}),
        (_signal_in_an_evaluation, ONE_BATCH),
        (_signal_in_an_evaluation_and_evaluate_at_the_end, ONE_BATCH),
        (_signal_twice, {}),
        (_signal_workers_too, {"dataloader_num_workers": 2}),
    ],
)
@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_a_signal_at_an_odd_moment_saves_step_3_and_exits_with_85(
    run, tmp_path, world, prepare, options
):
    options = {"world": world, "max_steps": 6, **options}
    errors = run(tmp_path / "run", prepare=prepare, expect_failure=True, **options)
    assert errors == [("SystemExit", "85")] * {"fsdp": 2, "one": 1}[world]
    assert steps_in(tmp_path / "run") == [2, 3]
    assert names_in(tmp_path / "run") == ["checkpoint-2", "checkpoint-3"]


def _evaluate_and_signal_at_the_end(trainer):
    signal.signal(signal.SIGTERM, lambda number, frame: trainer.notes.append("former handler"))
    trainer.compute_metrics = lambda _: {"score": trainer.state.global_step}

    best = []

    def evaluate(state, control):
        best.append(state.best_global_step)
        trainer.evaluate()

    on(trainer, "on_train_end", evaluate)
    on(trainer, "on_prediction_step", lambda state, control: best and _send())


def test_a_signal_after_the_best_model_is_loaded_saves_no_other_step(run, tmp_path):
    options = BEST | {"save_strategy": "best", "prepare": _evaluate_and_signal_at_the_end}
    (result,) = run(tmp_path, world="one", **options)
    assert result["best"][1] == 2 and result["notes"] == ["former handler"]
    assert steps_in(tmp_path) == [2]


def _improve_until_step_4(trainer):
    """Let step 4 have the best model, and the rate depend on the metric, which is sampled."""
    scores = {2: 3, 4: 1, 6: 2, 8: 4}

    def compute_metrics(_):
        return {"score": scores[trainer.state.global_step], "sampled": float(torch.rand(()))}

    trainer.compute_metrics = compute_metrics
    on(
        trainer,
        "on_evaluate",
        lambda state, control: trainer.notes.append((state.global_step, state.best_global_step)),
    )


def _improve_and_signal(trainer, event, step):
    _improve_until_step_4(trainer)
    on(trainer, event, lambda state, control: state.global_step == step and _send())


PLATEAU = BEST | {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0},
}


@pytest.mark.parametrize("world", ["fsdp", "one"])
@pytest.mark.parametrize(
    ("event", "step"), [("on_prediction_step", 4), ("on_step_begin", 3), ("on_step_begin", 5)]
)
def test_an_evaluation_that_a_signal_ends_is_made_up_for(run, tmp_path, world, event, step):
    options = PLATEAU | {"world": world, "max_steps": 6, "per_device_eval_batch_size": 1}
    whole = run(tmp_path / "whole", prepare=_improve_until_step_4, **options)
    signal_then = functools.partial(_improve_and_signal, event=event, step=step)
    stopped = run(tmp_path / "run", prepare=signal_then, expect_failure=True, **options)
    assert stopped == [("SystemExit", "85")] * len(whole)
    resumed = run(tmp_path / "run", prepare=_improve_until_step_4, **options)
    for result, expected in zip(resumed, whole, strict=True):
        for key in ("weights", "losses", "optimizer"):
            assert result[key] == expected[key]
        assert result["best"][:2] == expected["best"][:2] == (1, 4)
        assert result["notes"] == expected["notes"][-len(result["notes"]) :]
        assert (4, 2) in result["notes"] or step == 5


def _score_by_step(trainer):
    trainer.compute_metrics = lambda _: {"score": trainer.state.global_step}


def _evaluate_in_step_3(trainer, event):
    _score_by_step(trainer)
    on(trainer, event, lambda state, _: state.global_step == 2 and trainer.evaluate())


def _evaluate_in_step_3_and_signal(trainer, event):
    """Send a signal when a callback evaluates in step 3, after Trainer itself has evaluated."""
    _evaluate_in_step_3(trainer, event)
    evaluations = []
    on(trainer, "on_evaluate", lambda *_: evaluations.append(1))
    on(trainer, "on_prediction_step", lambda *_: len(evaluations) == 1 and _send())


@pytest.mark.parametrize("event", ["on_substep_end", "on_step_begin"])
def test_a_signal_in_an_evaluation_of_a_callback_ends_the_run_after_the_step(run, tmp_path, event):
    options = PLATEAU | {"world": "one", "gradient_accumulation_steps": 2}
    evaluate = functools.partial(_evaluate_in_step_3, event=event)
    (whole,) = run(tmp_path / "whole", prepare=evaluate, **options)
    signal_then = functools.partial(_evaluate_in_step_3_and_signal, event=event)
    stopped = run(tmp_path / "run", prepare=signal_then, expect_failure=True, **options)
    assert stopped == [("SystemExit", "85")] and steps_in(tmp_path / "run") == [2, 3]
    (resumed,) = run(tmp_path / "run", prepare=evaluate, **options)
    assert resumed["weights"] == whole["weights"]


def _evaluate_again(trainer, has_signal):
    """Let a callback evaluate again after Trainer's evaluation at step 2. Send a signal then."""
    begun = []

    def evaluate(state, control):
        if state.global_step == 2 and not begun:
            begun.append(True)
            trainer.evaluate()
            begun.append(True)

    on(trainer, "on_evaluate", evaluate)
    on(trainer, "on_prediction_step", lambda *_: has_signal and len(begun) == 1 and _send())


def test_a_signal_in_an_evaluation_begun_by_another_does_not_end_it(run, tmp_path):
    options = {"world": "one", "eval_strategy": "steps", "eval_steps": 2} | ONE_BY_ONE
    whole = functools.partial(_evaluate_again, has_signal=False)
    (expected,) = run(tmp_path / "whole", prepare=whole, **options)
    stopped = functools.partial(_evaluate_again, has_signal=True)
    errors = run(tmp_path / "run", prepare=stopped, expect_failure=True, **options)
    assert errors == [("SystemExit", "85")] and steps_in(tmp_path / "run") == [2, 3]
    (resumed,) = run(tmp_path / "run", **options)
    assert resumed["weights"] == expected["weights"]


def _evaluate_averages(trainer, has_signal):
    """Evaluate averaged weights, as callbacks do, and send a signal in the evaluation of step 4."""
    averages = {}

    def update(state, control):
        for name, value in _trained(trainer):
            averages.setdefault(name, value.clone()).lerp_(value, 0.5)
        if control.should_evaluate:
            swap()

    def swap(*_):
        for name, value in _trained(trainer):
            average = averages[name].clone()
            averages[name].copy_(value)
            value.copy_(average)

    on(trainer, "on_step_end", update)
    on(trainer, "on_evaluate", swap)
    if has_signal:
        on(trainer, "on_prediction_step", lambda state, _: state.global_step == 4 and _send())


def _trained(trainer):
    for module in trainer.model.modules():
        if hasattr(module, "reshard"):  # FSDP leaves the root's weights gathered
            module.reshard()
    for name, parameter in trainer.model.named_parameters():
        local = parameter.data
        yield name, local.to_local() if hasattr(local, "to_local") else local


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_a_signal_while_averages_are_evaluated_saves_the_trained_weights(run, tmp_path, world):
    options = {"world": world, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 6}
    options |= ONE_BY_ONE
    without = functools.partial(_evaluate_averages, has_signal=False)
    whole = run(tmp_path / "whole", prepare=without, **options)
    stopped = functools.partial(_evaluate_averages, has_signal=True)
    errors = run(tmp_path / "run", prepare=stopped, expect_failure=True, **options)
    assert errors == [("SystemExit", "85")] * len(whole)
    for result, expected in zip(
        run(tmp_path / "run", prepare=without, **options), whole, strict=True
    ):
        assert (result["weights"], result["losses"]) == (expected["weights"], expected["losses"])


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_an_epoch_that_a_signal_cuts_short_is_not_evaluated(run, tmp_path, world):
    options = PLATEAU | {"world": world, "eval_strategy": "epoch", "save_strategy": "epoch"}
    num_rows = {"fsdp": 6, "one": 12}[world]  # four steps an epoch
    options |= {"per_device_train_batch_size": num_rows, "max_steps": 12}
    whole = run(tmp_path / "whole", prepare=_score_by_step, **options)
    stopped = run(
        tmp_path / "run", prepare=_score_and_signal_in_step_6, expect_failure=True, **options
    )
    assert stopped == [("SystemExit", "85")] * len(whole)
    assert steps_in(tmp_path / "run") == [4, 6]
    resumed = run(tmp_path / "run", prepare=_score_by_step, **options)
    for result, expected in zip(resumed, whole, strict=True):
        assert result["resumed"] == "checkpoint-6" and result["best"][:2] == expected["best"][:2]
        assert result["weights"] == expected["weights"]


def _score_and_signal_in_step_6(trainer):
    _score_by_step(trainer)
    on(trainer, "on_step_begin", lambda state, _: state.global_step == 5 and _send())


@pytest.mark.parametrize(
    ("world", "other"),
    [("ddp", {}), ("one", {}), ("one", {"save_steps": 3}), ("one", {"save_strategy": "epoch"})],
)
def test_a_signal_saves_all_state_even_if_other_saves_hold_the_model_only(
    run, tmp_path, world, other
):
    options = {"world": world, "save_only_model": True} | other
    whole = run(tmp_path / "whole", **options)
    signal_then = functools.partial(_improve_and_signal, event="on_step_begin", step=2)
    run(tmp_path / "run", prepare=signal_then, expect_failure=True, **options)
    resumed = run(tmp_path / "run", **options)
    assert [result["resumed"] for result in resumed] == ["checkpoint-3"] * len(whole)
    assert [result["weights"] for result in resumed] == [result["weights"] for result in whole]


def _score_4_and_6_and_signal(trainer, step=None, is_custom=False):
    """Let step 6 be better than step 4. Send a signal in a step."""
    scores = {4: 2, 6: 1, 8: 3}
    trainer.compute_metrics = lambda _: {"score": scores[trainer.state.global_step]}
    if is_custom:
        trainer.evaluate = functools.partial(_evaluate_without_events, trainer, scores)
    if step is not None:
        on(trainer, "on_step_begin", lambda state, _: state.global_step == step - 1 and _send())


def _evaluate_without_events(trainer, scores, *_, **__):
    """Do what a user's own `evaluate` does."""
    metrics = {"eval_score": scores[trainer.state.global_step]}
    events = (trainer.args, trainer.state, trainer.control)
    trainer.control = trainer.callback_handler.on_evaluate(*events, metrics)
    return metrics


@pytest.mark.parametrize("is_custom", [False, True], ids=["", "evaluate of the user"])
@pytest.mark.parametrize(("step", "max_steps"), [(6, 6), (4, 8)], ids=["last step", "epoch's end"])
def test_the_evaluation_after_a_signal_in_an_epochs_last_step_counts(
    run, tmp_path, step, max_steps, is_custom
):
    options = BEST | {"world": "one", "eval_strategy": "epoch", "save_strategy": "epoch"}
    options |= {"per_device_train_batch_size": 12, "max_steps": max_steps}  # 4 steps an epoch
    scored = functools.partial(_score_4_and_6_and_signal, is_custom=is_custom)
    (whole,) = run(tmp_path / "whole", prepare=scored, **options)
    assert whole["best"][1] == {6: 6, 8: 4}[max_steps]
    signal_then = functools.partial(scored, step=step)
    stopped = run(tmp_path / "run", prepare=signal_then, expect_failure=True, **options)
    assert stopped == [("SystemExit", "85")]
    (resumed,) = run(tmp_path / "run", prepare=scored, **options)
    assert resumed["resumed"] == f"checkpoint-{step}"
    assert resumed["best"][:2] == whole["best"][:2] and resumed["weights"] == whole["weights"]


def _fail_to_save_step_6(trainer):
    scores = {4: 1, 6: 0, 8: 4}
    trainer.compute_metrics = lambda _: {"score": scores[trainer.state.global_step]}

    def fail(state, control):
        if state.global_step == 6:
            Path(trainer.args.output_dir, "checkpoint-6", "manifest.json").touch()

    on(trainer, "on_save", fail)


def test_a_failed_save_leaves_the_best_of_an_evaluation_that_was_made_up_for(run, tmp_path):
    options = BEST | {"world": "one", "max_steps": 8, "per_device_eval_batch_size": 1}
    signal_then = functools.partial(_improve_and_signal, event="on_prediction_step", step=4)
    run(tmp_path, prepare=signal_then, expect_failure=True, **options)
    (resumed,) = run(tmp_path, prepare=_fail_to_save_step_6, **options)
    assert resumed["error"] is None and resumed["best"][1] == 4


def test_an_evaluation_is_not_made_up_for_if_the_run_evaluates_no_more(run, tmp_path):
    options = {"world": "one", "max_steps": 6, "per_device_eval_batch_size": 1}
    signal_then = functools.partial(_improve_and_signal, event="on_prediction_step", step=4)
    evaluating = {"eval_strategy": "steps", "eval_steps": 2, "expect_failure": True}
    run(tmp_path, prepare=signal_then, **options, **evaluating)
    (resumed,) = run(tmp_path, **options)
    assert resumed["resumed"] == "checkpoint-4" and resumed["step"] == 6


def test_a_handler_that_other_code_has_replaced_is_not_restored(run, tmp_path):
    (kept,) = run(tmp_path, world="one", function=_replace_a_handler)
    assert kept


def _replace_a_handler(output):
    def own(number, frame):
        pass

    train(
        output,
        prepare=lambda trainer: on(
            trainer, "on_step_end", lambda *_: signal.signal(signal.SIGTERM, own)
        ),
    )
    return signal.getsignal(signal.SIGTERM) == own
