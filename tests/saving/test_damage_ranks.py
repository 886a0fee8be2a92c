"""A damaged or forged checkpoint is skipped before anything is loaded, and no code from it runs."""

import contextlib
import json
import pickle
import random
import shutil

import pytest

from tests.saving.damage import ATTACKS, PART, damage, forge


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
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(output, caplog, change):
    from hf_fsdp_recipes import latest_checkpoint

    change(output / "checkpoint-4")
    assert latest_checkpoint(output) == str(output / "checkpoint-2")
    assert [record.getMessage().partition(" is skipped: ")[0] for record in caplog.records] == [
        f"{output}/checkpoint-4"
    ]


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
