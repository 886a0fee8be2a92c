"""One run owns its output directory: no other run, start or deletion takes a checkpoint from it."""

import functools
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.ranks.harness import start_ranks
from tests.saving.runs import (
    BEST,
    contents_of,
    describe,
    digests_in,
    make_trainer,
    names_in,
    on,
    rank,
    search,
    steps_in,
    train,
    wait_for,
)

# Worlds of one process each.
SINGLE = pytest.mark.parametrize("world", ["fsdp", "one"])


@pytest.fixture
def elsewhere(run, world, tmp_path):
    """Return checkpoint-2 of a finished run in another directory."""
    output = tmp_path / "elsewhere"
    run(output, 1, world=world)
    return str(output / "checkpoint-2")


def _wait_after_step_1(trainer):
    folder = Path(trainer.args.output_dir).parent

    def wait(state, control):
        if state.global_step == 1:
            (folder / "waits").touch()
            wait_for(folder / "goes on")

    on(trainer, "on_step_end", wait)


def _start_and_resume(output, elsewhere):
    """Return the errors of a new run, and of one that is resumed from elsewhere."""
    return [train(output, resume=checkpoint)["error"] for checkpoint in (False, elsewhere)]


@SINGLE
def test_a_second_run_in_a_directory_is_refused_and_the_first_goes_on(
    worlds, run, world, elsewhere, tmp_path
):
    output = tmp_path / "run"
    first = functools.partial(train, output, prepare=_wait_after_step_1)
    processes, results = start_ranks(first, 1, environment=worlds[world])
    wait_for(tmp_path / "waits")
    before = contents_of(output)
    options = {"function": _start_and_resume, "elsewhere": elsewhere}
    (errors,) = run(output, 1, world=world, **options)
    assert errors == [f"another run trains in {output}. End it first."] * 2
    assert contents_of(output) == before
    (tmp_path / "goes on").touch()
    _, kind, result = results.get(timeout=60)
    processes[0].join()
    assert kind == "result" and result["error"] is None
    assert steps_in(output) == [2, 4]
    assert names_in(output) == ["checkpoint-2", "checkpoint-4"]


def _start_again(output, is_same_trainer=False, stock=False, **options):
    """Train, then start at step 0 in the same directory.

    Return the error, whether the directory is as it was, and whether a new model was prepared.
    """
    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.errors import CheckpointError
    from hf_fsdp_recipes.upstream import patches

    patches.enable_cpu_ranks()
    first = make_trainer(output, () if stock else [ShardedCheckpointCallback()], **options)
    first.train()
    before = contents_of(output)
    again = first if is_same_trainer else make_trainer(output, [ShardedCheckpointCallback()])
    error = ""
    try:
        again.train()
    except CheckpointError as found:
        error = str(found)
    is_prepared = again is not first and again.optimizer is not None
    return error, contents_of(output) == before, is_prepared


@pytest.mark.parametrize(
    ("world", "options"),
    [
        ("fsdp", {"is_same_trainer": True}),
        ("fsdp", {"stock": True}),
        ("ddp", {}),
        ("one", {"is_same_trainer": True}),
        ("one", {"is_same_trainer": True, "auto_find_batch_size": True}),
        ("one", {"stock": True}),
    ],
)
def test_a_start_at_step_0_among_checkpoints_is_refused_before_the_model_is_prepared(
    run, tmp_path, world, options
):
    wanted = f"{tmp_path} holds checkpoint-4 of an earlier run. Resume it"
    for error, is_untouched, is_prepared in run(
        tmp_path, world=world, function=_start_again, **options
    ):
        assert error[: len(wanted)] == wanted
        assert is_untouched and not is_prepared


def _resume_from_elsewhere(output, elsewhere):
    """Resume in a directory with checkpoints, and in one without."""
    with_checkpoints = output / "with"
    train(with_checkpoints)
    before = contents_of(with_checkpoints)
    refused = train(with_checkpoints, resume=elsewhere)
    is_untouched = contents_of(with_checkpoints) == before
    return refused, is_untouched, train(output / "without", resume=elsewhere)


@SINGLE
def test_a_run_from_elsewhere_is_resumed_only_in_a_directory_without_checkpoints(
    run, tmp_path, world, elsewhere
):
    options = {"function": _resume_from_elsewhere, "elsewhere": elsewhere}
    ((refused, is_untouched, resumed),) = run(tmp_path, 1, world=world, **options)
    assert f"{tmp_path / 'with'} holds checkpoint-4" in (refused["error"] or "")
    assert is_untouched and refused["optimizer"] == []
    assert resumed["error"] is None and steps_in(tmp_path / "without") == [4]


def _resume_an_earlier_one_through_a_link(output):
    whole = train(output / "run", save_steps=1)
    (output / "link").symlink_to("run")
    checkpoint = str(output / "link" / "checkpoint-2")
    return whole, train(output / "run", resume=checkpoint, save_steps=1)


@SINGLE
def test_later_checkpoints_are_set_aside_when_an_earlier_one_is_resumed(run, tmp_path, world):
    options = {"function": _resume_an_earlier_one_through_a_link}
    ((whole, resumed),) = run(tmp_path, 1, world=world, **options)
    assert resumed["error"] is None and resumed["weights"] == whole["weights"]
    assert steps_in(tmp_path / "run") == [1, 2, 3, 4]
    aside = [name for name in names_in(tmp_path / "run") if name.startswith("_set-aside-")]
    assert sorted(name.rpartition("-")[2] for name in aside) == ["3", "4"]
    for name in aside:
        assert re.fullmatch(r"_set-aside-\d+-checkpoint-\d", name)
        assert sum(name in text for text in resumed["warnings"]) == 1


@SINGLE
def test_a_search_that_is_started_again_is_refused_in_the_directory_of_its_first_trial(
    run, tmp_path, world
):
    output = tmp_path / "search"
    assert run(output, 1, world=world, function=search) == [None]
    assert names_in(output) == ["run-0", "run-1"]
    for trial in output.iterdir():
        assert names_in(trial) == ["checkpoint-2", "checkpoint-4"]
        assert steps_in(trial) == [2, 4]
    before = contents_of(output)
    (error,) = run(output, 1, world=world, function=search)
    assert error.startswith(f"{output / 'run-0'} holds checkpoint-4 of an earlier run")
    assert contents_of(output) == before


def _forbid_to_delete(name):
    """Refuse to rename or remove a directory of this name, as a file system may do."""

    def refuse(event, arguments):
        if event in ("os.rename", "os.rmdir") and Path(arguments[0]).name == name:
            raise PermissionError(13, "Permission denied", str(arguments[0]))

    sys.addaudithook(refuse)


def _keep_step_2_from_being_deleted(trainer):
    scores = {2: 3, 4: 2, 6: 1}
    trainer.compute_metrics = lambda _: {"score": scores[trainer.state.global_step]}

    def note_or_forbid(state, control):
        if state.global_step == 5 and rank() == 0:
            _forbid_to_delete("checkpoint-2")
        if state.global_step == 6:
            trainer.notes.append(describe(trainer)["trained"])

    on(trainer, "on_step_end", note_or_forbid)


@pytest.mark.parametrize("world", ["fsdp", "ddp"])
def test_a_deletion_that_fails_is_a_warning_and_all_ranks_keep_the_same_best_model(
    run, tmp_path, world
):
    output = tmp_path / "run"
    options = BEST | {"max_steps": 6, "save_total_limit": 2}
    callback = {"export_dir": tmp_path / "export"}
    prepare = _keep_step_2_from_being_deleted
    results = run(output, world=world, prepare=prepare, callback=callback, **options)
    for result in results:
        assert result["error"] is None
        assert result["best"] == (1, 6, str(output / "checkpoint-6"))
        assert result["trained"] == results[0]["notes"][0]
    assert digests_in(tmp_path / "export") == results[0]["notes"][0]
    assert steps_in(output) == [2, 4, 6]
    assert len(results[0]["warnings"]) == 1 and "checkpoint-2" in results[0]["warnings"][0]


def _train_with_each_limit(output):
    """Return the names that stock Trainer and our callback leave with each save_total_limit."""
    left = {}
    for limit in (0, -1, 2):
        for is_stock in (True, False):
            directory = output / f"{limit}-{is_stock}"
            train(directory, stock=is_stock, save_total_limit=limit, save_steps=1)
            left[limit, is_stock] = names_in(directory)
    return left


@SINGLE
def test_save_total_limit_keeps_what_stock_keeps(run, tmp_path, world):
    (left,) = run(tmp_path, 1, world=world, function=_train_with_each_limit)
    for limit, num_kept in ((0, 4), (-1, 4), (2, 2)):
        assert len(left[limit, True]) == num_kept
        assert left[limit, False] == left[limit, True], f"save_total_limit {limit}"


def _be_best_at_step_2(trainer):
    scores = {2: 1, 4: 3}
    trainer.compute_metrics = lambda _: {"score": scores[trainer.state.global_step]}


@SINGLE
def test_with_a_limit_of_1_the_best_and_the_latest_checkpoint_are_kept(run, tmp_path, world):
    options = BEST | {"save_total_limit": 1, "prepare": _be_best_at_step_2}
    run(tmp_path, 1, world=world, **options)
    assert steps_in(tmp_path) == [2, 4]


def _adopt(output):
    """Begin with stock Trainer, and go on with and without our callback."""
    options = {"save_total_limit": 2, "save_steps": 1}
    train(output / "stock", stock=True, max_steps=4, **options)
    shutil.copytree(output / "stock", output / "ours")
    left = {}
    for name in ("stock", "ours"):
        checkpoint = str(output / name / "checkpoint-4")
        options |= {"stock": name == "stock", "max_steps": 6, "resume": checkpoint}
        result = train(output / name, **options)
        left[name] = names_in(output / name), result["weights"], result["error"]
    return left


@SINGLE
def test_a_run_that_goes_on_with_the_callback_deletes_stocks_checkpoints_as_stock_does(
    run, tmp_path, world
):
    (left,) = run(tmp_path, 1, world=world, function=_adopt)
    assert left["ours"] == left["stock"]
    assert left["ours"][0] == ["checkpoint-5", "checkpoint-6"]
    assert steps_in(tmp_path / "ours") == [5, 6]


def _run_out_of_memory_with_4_rows(trainer):
    def fail(state, control):
        if trainer._train_batch_size > 3 and state.global_step == 3:
            raise RuntimeError("CUDA out of memory.")

    on(trainer, "on_step_begin", fail)


@SINGLE
def test_a_run_that_finds_its_batch_size_is_resumed_with_the_size_that_it_found(
    run, tmp_path, world
):
    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    (whole,) = run(tmp_path, 1, world=world, prepare=_run_out_of_memory_with_4_rows, **options)
    assert whole["error"] is None and steps_in(tmp_path) == [2, 4]
    # What was trained with 4 rows.
    (aside,) = tmp_path.glob("_set-aside-*-checkpoint-2")
    assert sum(aside.name in text for text in whole["warnings"]) == 1
    shutil.rmtree(tmp_path / "checkpoint-4")
    (resumed,) = run(tmp_path, 1, world=world, **options)
    assert resumed == whole | {"resumed": "checkpoint-2", "warnings": []}


@SINGLE
def test_a_directory_with_the_name_of_a_checkpoint_stops_no_run(run, tmp_path, world):
    (tmp_path / "checkpoint-0").mkdir()
    (tmp_path / "checkpoint-0" / "model.safetensors").touch()
    assert run(tmp_path, 1, world=world)[0]["error"] is None
    assert names_in(tmp_path) == ["checkpoint-0", "checkpoint-2", "checkpoint-4"]


def _write_results_of_later_steps(trainer):
    """Write to a directory with the name of a checkpoint, before that step is saved."""

    def write(state, control):
        results = Path(trainer.args.output_dir, f"checkpoint-{state.global_step + 5}")
        results.mkdir(parents=True)
        (results / "results.txt").write_text("good")

    on(trainer, "on_step_end", write)


@SINGLE
def test_what_callbacks_write_for_later_steps_makes_no_checkpoint_an_old_one(run, tmp_path, world):
    options = {"save_total_limit": 1, "prepare": _write_results_of_later_steps}
    run(tmp_path, 1, world=world, **options)
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").exists()
    assert not (tmp_path / "checkpoint-2").exists()
    assert (tmp_path / "checkpoint-9" / "results.txt").read_text() == "good"


@SINGLE
def test_what_a_killed_run_of_stock_left_of_a_checkpoint_is_no_part_of_the_next_one(
    run, tmp_path, world
):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "adapter_model.safetensors").write_text("half")
    (result,) = run(tmp_path, 1, world=world)
    (aside,) = tmp_path.glob("_set-aside-*-checkpoint-2")
    assert aside.name in result["warnings"][-1]
    assert names_in(aside) == ["adapter_model.safetensors"]
    assert "adapter_model.safetensors" not in names_in(tmp_path / "checkpoint-2")
    assert steps_in(tmp_path) == [2, 4]


@SINGLE
def test_a_best_checkpoint_that_a_kill_left_under_its_other_name_is_kept_and_exported(
    run, tmp_path, world
):
    options = BEST | {"world": world, "prepare": _be_best_at_step_2, "save_total_limit": 1}
    run(tmp_path / "run", 1, **options)
    best = digests_in(tmp_path / "run" / "checkpoint-2")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    # As after a kill while step 2 was saved again.
    (tmp_path / "run" / "checkpoint-2").rename(tmp_path / "run" / "checkpoint-02")
    (result,) = run(tmp_path / "run", 1, callback={"export_dir": tmp_path / "export"}, **options)
    assert result["resumed"] == "checkpoint-02" and result["best"][1] == 2
    assert names_in(tmp_path / "run") == ["checkpoint-02", "checkpoint-4"]
    assert digests_in(tmp_path / "export") == best


def _be_best_at_step_3(trainer):
    """Let steps 3 and 2 be the best ones. Step 3 is not saved."""
    scores = {1: 5, 2: 1, 3: 0, 4: 2, 5: 3, 6: 4}
    trainer.compute_metrics = lambda _: {"score": scores[trainer.state.global_step]}


def _train_stock_and_ours_with_a_limit(output):
    options = BEST | {"eval_steps": 1, "save_total_limit": 2, "lr_scheduler_type": "constant"}
    options["prepare"] = _be_best_at_step_3
    stock = train(output / "stock", stock=True, max_steps=6, **options)
    train(output / "before", max_steps=4, **options)
    (output / "before").rename(output / "ours")  # a person moves it
    return stock, train(output / "ours", max_steps=6, **options)


@SINGLE
def test_the_best_checkpoint_is_kept_if_a_better_step_was_not_saved(run, tmp_path, world):
    options = {"world": world, "function": _train_stock_and_ours_with_a_limit}
    ((stock, ours),) = run(tmp_path, 1, **options)
    assert names_in(tmp_path / "ours") == ["checkpoint-2", "checkpoint-6"]
    assert ours["best"] == (0, 3, str(tmp_path / "ours" / "checkpoint-2"))
    assert ours["trained"] == digests_in(tmp_path / "ours" / "checkpoint-2")
    if world == "one":  # with sharded state, stock Trainer does not find the best checkpoint
        assert names_in(tmp_path / "stock") == names_in(tmp_path / "ours")
        assert stock["best"][:2] == ours["best"][:2] and stock["trained"] == ours["trained"]
