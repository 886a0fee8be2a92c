"""The end of a recipe, if the last save fails, the run is already finished, or another run uses the same directory."""

import os
import shutil

import pytest

from hf_fsdp_recipes.checkpointing.lock import LOCK_FILE
from tests.ranks import harness, refusals
from tests.ranks.lock_holder import locked_by_another, wait_briefly
from tests.recipes.launching import write_recipe
from tests.recipes.test_bad_input_ranks import LORA, SETTINGS


@pytest.fixture
def recipe(tiny_model, text_file, tmp_path):
    """Return a function that writes a recipe of a run in `tmp_path/run` and returns its command line."""

    def write(**changes):
        values = SETTINGS | {"model_name_or_path": tiny_model("llama"), "dataset_name": text_file} | changes
        return write_recipe(tmp_path / "recipe.yaml", values | {"output_dir": tmp_path / "run"})

    return write


def _changes(before, after):
    """Return the names of files that differ, except for the lock file."""
    names = {os.path.basename(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return names - {LOCK_FILE}


def _fail_last_save():
    from hf_fsdp_recipes.checkpointing import layout

    commit = layout.commit

    def fail(incomplete, final, *rest):
        if final.name == "checkpoint-4":
            raise OSError(28, "No space left on device")
        return commit(incomplete, final, *rest)

    layout.commit = fail


def test_recipe_whose_last_save_fails_exports_and_ends_with_status_1(recipe, ranks_environment, tmp_path):
    found = refusals.run(recipe(max_steps=4), tmp_path, ranks_environment({}), _fail_last_save)
    assert [one.status for one in found] == [1, 1]
    (error,) = {error for one in found for error in one.errors}
    assert error.startswith("SaveError: the checkpoint of step 4 was not written")
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "checkpoint-2" / "manifest.json").is_file()
    assert not list((tmp_path / "run").glob(".checkpoint-*"))


def _leave_directory_on_rank_1():
    if os.environ["RANK"] == "1":
        os.chdir("/")


def test_base_of_a_4bit_merge_that_a_rank_cannot_read_is_known_before_training(
    tiny_model, recipe, ranks_environment, tmp_path
):
    shutil.copytree(tiny_model("llama_wide"), tmp_path / "base")
    argv = [*recipe(**LORA, load_in_4bit=True, merge_adapter=True), "--model_name_or_path", "base"]
    found = refusals.run(argv, tmp_path, ranks_environment({}), _leave_directory_on_rank_1)
    says = "merge_adapter with 4-bit weights reads the base model on every node, but base is not a local directory"
    assert refusals.find_faults(found, [says], [tmp_path]) == []


def test_finished_recipe_has_nothing_to_do(recipe, ranks_environment, tmp_path):
    argv = recipe(**LORA, merge_adapter=True)
    assert [one.status for one in refusals.run(argv, tmp_path, ranks_environment({}))] == [0, 0]
    before = refusals.describe_tree(tmp_path / "run")
    found = refusals.run([*argv, "--resume_from_checkpoint", "auto"], tmp_path, ranks_environment({}))
    assert [one.status for one in found] == [0, 0]
    assert "finished: the run ended at step 2 of 2, so there is nothing to do" in found[0].output
    assert not _changes(before, refusals.describe_tree(tmp_path / "run"))


BEST = {
    "save_total_limit": 1, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4,
    "save_steps": 2, "validation_split_percentage": 10, "metric_for_best_model": "eval_loss", "learning_rate": 0.5,
}  # fmt: skip
FSDP1 = {"fsdp_config": harness.FSDP1 | {"fsdp_reshard_after_forward": None, "fsdp_sync_module_states": False}}


@pytest.mark.parametrize(
    ("changes", "template"),
    [
        (BEST, {}),
        pytest.param({}, FSDP1, marks=pytest.mark.slow),
        pytest.param(LORA | {"merge_adapter": True}, {}, marks=pytest.mark.slow),
    ],
    ids=["best model", "FSDP1", "adapter"],
)
def test_finished_recipe_writes_a_missing_export_again(recipe, ranks_environment, tmp_path, changes, template):
    argv, output = recipe(**changes), tmp_path / "run"
    environment = ranks_environment(template)
    first = refusals.run(argv, tmp_path, environment)
    assert [one.status for one in first] == [0, 0], first[0].output
    before = refusals.describe_tree(output)
    for export in output.glob("export*"):
        shutil.rmtree(export)
    found = refusals.run([*argv, "--resume_from_checkpoint", "auto"], tmp_path, environment)
    assert [one.status for one in found] == [0, 0], found[0].output
    assert "so there is nothing to do" in found[0].output and "'loss'" not in found[0].output
    assert f"exported: {output}/export" in found[0].output
    assert not {name for name in _changes(before, refusals.describe_tree(output)) if name != "export_manifest.json"}


def test_another_runs_files_are_archived_only_when_nothing_can_refuse_the_run(recipe, ranks_environment, tmp_path):
    output = tmp_path / "run"
    environment = ranks_environment({})
    assert [one.status for one in refusals.run(recipe(report=True), tmp_path, environment)] == [0, 0]
    (output / "export" / "notes.txt").write_text("added by the user")
    before = refusals.describe_tree(output)
    bad = recipe(previous_run="archive", use_peft=True, lora_target_modules="no_such_module")
    found = refusals.run(bad, tmp_path, environment)
    assert [one.status for one in found] == [1, 1] and "no_such_module" in found[0].output
    assert not _changes(before, refusals.describe_tree(output))
    found = refusals.run(recipe(previous_run="archive", report=True), tmp_path, environment)
    assert [one.status for one in found] == [0, 0], found[0].output
    after = refusals.describe_tree(output / "previous-1")
    assert {name: before[name] for name in after} == after
    assert {"checkpoint-2/manifest.json", "metrics.jsonl", "report.md", "export/notes.txt"} <= after.keys()
    assert (output / "export" / "model.safetensors").is_file() and not (output / "export" / "notes.txt").exists()


def test_second_run_leaves_the_files_of_a_living_one(recipe, ranks_environment, tmp_path):
    argv = recipe(report=True)
    assert [one.status for one in refusals.run(argv, tmp_path, ranks_environment({}))] == [0, 0]
    before = refusals.describe_tree(tmp_path / "run")
    with locked_by_another(tmp_path / "run", tmp_path):
        found = refusals.run(argv, tmp_path, ranks_environment({}), wait_briefly)
    assert not refusals.find_faults(found, ["is in use by another run", "process"], [tmp_path])
    assert not _changes(before, refusals.describe_tree(tmp_path / "run"))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_run_in_another_precision_than_its_template_passes_verification(recipe, ranks_environment, tmp_path, precision):
    found = refusals.run(recipe(**{precision: True}), tmp_path, ranks_environment({}))
    assert [one.status for one in found] == [0, 0], found[0].output
    assert "verified: the export's logits differ" in found[0].output
