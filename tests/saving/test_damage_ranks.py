"""A damaged or forged checkpoint is skipped before anything is loaded, and no code from it runs."""

import contextlib
import functools
import json
import os
import pickle
import random
import re
import shutil

import pytest
from typer.testing import CliRunner

from hf_fsdp_recipes import cli, latest_checkpoint
from hf_fsdp_recipes.errors import RecipeError
from tests.saving.damage import ATTACKS, PART, damage, forge
from tests.saving.runs import contents_of, steps_in


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory):
    """Return the output directory of a finished run with checkpoint-2 and checkpoint-4."""
    output = tmp_path_factory.mktemp("finished") / "run"
    run(output)
    return output


@pytest.fixture
def output(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def _damage(name, way):
    return lambda checkpoint: damage(checkpoint / name, way, random.Random(0))


def _edit_manifest(change, is_hashed=False):
    def edit(checkpoint):
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        if not is_hashed:
            manifest.pop("xxh3")
        change(manifest)
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))

    return edit


def _replace_by_pipe(name):
    def replace(checkpoint):
        (checkpoint / name).unlink(missing_ok=True)
        os.mkfifo(checkpoint / name)

    return replace


def _replace_by_device(checkpoint):
    (checkpoint / "scheduler.pt").unlink()
    (checkpoint / "scheduler.pt").symlink_to("/dev/zero")


def _list_a_file_outside(checkpoint, is_absolute=False):
    """List a file that lies elsewhere, with its true size and hash."""
    from hf_fsdp_recipes.saving.hashing import read_facts

    outside = checkpoint.parent / "outside.txt"
    outside.write_text("of a person")
    name = str(outside) if is_absolute else "../outside.txt"
    _edit_manifest(lambda m: m["files"].update({name: read_facts(outside)}))(checkpoint)


DAMAGE = {
    "a flipped bit": _damage("pytorch_model_fsdp_0/__1_0.distcp", "flip"),
    "a truncated file": _damage("optimizer_0/__0_0.distcp", "truncate"),
    "another rank's shard": _damage("optimizer_0/__0_0.distcp", "replace"),
    "a missing random state": _damage("rng_state_1.pth", "delete"),
    "a missing folder": lambda checkpoint: shutil.rmtree(checkpoint / "optimizer_0"),
    "no manifest": _damage("manifest.json", "delete"),
    "half a manifest": _damage("manifest.json", "truncate"),
    "a manifest of another kind": lambda checkpoint: (checkpoint / "manifest.json").write_text(
        "[1]"
    ),
    "another global batch": _edit_manifest(
        lambda manifest: manifest.update(global_batch_size=8), is_hashed=True
    ),
    "a manifest without sizes": _edit_manifest(
        lambda m: [facts.pop("bytes") for facts in m["files"].values()]
    ),
    "a file name that no file has": _edit_manifest(
        lambda m: m["files"].update({"\0": {"bytes": 0, "xxh3": ""}})
    ),
    "a name outside of it": _list_a_file_outside,
    "an absolute name": functools.partial(_list_a_file_outside, is_absolute=True),
    "a pipe": _replace_by_pipe("scheduler.pt"),
    "a pipe for a manifest": _replace_by_pipe("manifest.json"),
    "a pipe that torch would read": _replace_by_pipe("optimizer_0/__1.metadata"),
    "a device": _replace_by_device,
}


@pytest.mark.timeout(20)  # a pipe or a device could be read for ever
@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(output, caplog, change):
    from hf_fsdp_recipes import latest_checkpoint

    change(output / "checkpoint-4")
    assert latest_checkpoint(output) == str(output / "checkpoint-2")
    assert [record.getMessage().partition(" is skipped: ")[0] for record in caplog.records] == [
        f"{output}/checkpoint-4"
    ]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("arguments", [[], ["--verify"]])
@pytest.mark.parametrize("name", ["scheduler.pt", "manifest.json", "optimizer_0/__1.metadata"])
def test_the_list_of_checkpoints_shows_a_pipe_as_damage(output, name, arguments):
    _replace_by_pipe(name)(output / "checkpoint-4")
    listed = CliRunner().invoke(cli.app, ["checkpoints", str(output), *arguments])
    assert listed.exit_code == 0
    lines = {line.split()[0]: line.split()[-1] for line in listed.output.splitlines()}
    assert lines["2"] == "complete"
    if arguments or name != "optimizer_0/__1.metadata":
        assert lines["4"] != "complete"


def _edit_state(checkpoint):
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps(state | {"save_steps": 7}))


def _add_note(checkpoint):
    (checkpoint / "note.txt").write_text("of a person")
    _edit_state(checkpoint)


CHANGES = {
    "an edited state": _edit_state,
    "an added file": _add_note,
    "a removed file": lambda checkpoint: (checkpoint / "config.json").unlink(),
    "no manifest": _damage("manifest.json", "delete"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_person_changed_is_accepted_by_the_command_that_the_warning_names(
    run, output, caplog, change
):
    from hf_fsdp_recipes import latest_checkpoint

    checkpoint = output / "checkpoint-4"
    before = json.loads((checkpoint / "manifest.json").read_text())
    change(checkpoint)
    kept = ["step"]
    if (checkpoint / "manifest.json").exists():
        kept += ["run", "world_size", "global_batch_size"]
    assert latest_checkpoint(output) == str(output / "checkpoint-2")
    arguments = re.search(r"hf-fsdp (checkpoints \S+ --accept \S+)", caplog.text)[1].split()
    accepted = CliRunner().invoke(cli.app, arguments)
    assert accepted.exit_code == 0, accepted.output
    is_warned = "and with it the number of rows of a step" in caplog.text
    assert is_warned == (len(kept) == 1)
    assert latest_checkpoint(output) == str(checkpoint)
    assert steps_in(output) == [2, 4]
    after = json.loads((checkpoint / "manifest.json").read_text())
    assert [after[key] for key in kept] == [before[key] for key in kept]
    assert run(output, max_steps=5)[0]["resumed"] == "checkpoint-4"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["scheduler.pt", "optimizer_0/__1.metadata"])
def test_a_pipe_is_not_accepted(output, name):
    checkpoint = output / "checkpoint-4"
    _replace_by_pipe(name)(checkpoint)
    before = (checkpoint / "manifest.json").read_bytes()
    refused = CliRunner().invoke(cli.app, ["checkpoints", str(output), "--accept", "4"])
    assert isinstance(refused.exception, RecipeError)
    assert (checkpoint / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("step", [3, 5, 6])
def test_what_is_no_complete_checkpoint_is_not_accepted(output, step):
    (output / "checkpoint-5").mkdir()  # a callback wrote to it
    (output / "checkpoint-5" / "results.txt").write_text("good")
    shutil.copytree(output / "checkpoint-4", output / "_saving" / "checkpoint-6")
    (output / "checkpoint-6").symlink_to("_saving/checkpoint-6")  # it is being saved
    before = contents_of(output)
    refused = CliRunner().invoke(cli.app, ["checkpoints", str(output), "--accept", str(step)])
    assert isinstance(refused.exception, RecipeError)
    assert f"checkpoint-{step}" in str(refused.exception)
    assert contents_of(output) == before


def test_a_forged_checkpoint_that_is_accepted_is_still_skipped_and_runs_no_code(output, tmp_path):
    from hf_fsdp_recipes import latest_checkpoint

    forge("entry", output / "checkpoint-4", tmp_path / "canary")
    CliRunner().invoke(cli.app, ["checkpoints", str(output), "--accept", "4"])
    assert latest_checkpoint(output) == str(output / "checkpoint-2")
    assert not (tmp_path / "canary").exists()


def test_a_manifest_without_step_is_enough_to_resume(output):
    from hf_fsdp_recipes import latest_checkpoint

    _edit_manifest(lambda manifest: [manifest.pop(key) for key in ("step", "world_size", "run")])(
        output / "checkpoint-4"
    )
    assert latest_checkpoint(output) == str(output / "checkpoint-4")


@pytest.mark.parametrize("way", [way for way in ATTACKS if way != "random state"])
def test_a_forged_checkpoint_is_skipped_and_runs_no_code(output, tmp_path, way):
    import torch.distributed.checkpoint as dcp

    from hf_fsdp_recipes import latest_checkpoint

    forge(way, output / "checkpoint-4", tmp_path / "canary")
    assert latest_checkpoint(output) == str(output / "checkpoint-2")
    assert not (tmp_path / "canary").exists()
    # The attack is real: torch DCP runs the code.
    names = pickle.loads(
        (output / "checkpoint-2" / PART / ".metadata").read_bytes()
    ).state_dict_metadata
    rate = next(name for name in names if name.endswith("lr"))
    with contextlib.suppress(Exception, dcp.CheckpointException):
        dcp.load({rate: 0.0}, checkpoint_id=output / "checkpoint-4" / PART, no_dist=True)
    assert (tmp_path / "canary").is_dir()


def test_a_resume_from_a_forged_random_state_fails_without_running_its_code(run, output, tmp_path):
    shutil.rmtree(output / "checkpoint-4")
    forge("random state", output / "checkpoint-2", tmp_path / "canary")
    errors = run(output, expect_failure=True)
    assert errors[0][0] == "UnpicklingError" and not (tmp_path / "canary").exists()


def test_a_copy_of_an_unfinished_checkpoint_without_shards_is_skipped(run, tmp_path):
    run(tmp_path, world="one")
    (tmp_path / "checkpoint-4" / "manifest.json").unlink()
    with (tmp_path / "checkpoint-4" / "trainer_state.json").open("r+") as state:
        state.truncate(10)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
