"""On a full disk a run continues, leaves no incomplete checkpoint, tries the export, and ends with a one-sentence error."""

import functools
import os
from pathlib import Path

import pytest

from tests.ranks import refusals
from tests.ranks.harness import run_ranks
from tests.ranks.training import build, losses_of
from tests.recipes.launching import write_recipe
from tests.recipes.test_bad_input_ranks import LORA, SETTINGS

DISK_BYTES = 8 << 20
EXPORT_FITS = 400 << 10  # room for an export, but not for a checkpoint


def _fill(directory, free_bytes):
    """Write a file that leaves `free_bytes` on the file system of `directory`."""
    status = os.statvfs(directory)
    with (Path(directory) / "fill").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_bsize - free_bytes))


def _fill_before_save(step, free_bytes):
    from hf_fsdp_recipes.checkpointing import layout

    start = layout.start

    def fill_then_start(output_dir, of_step):
        if of_step == step:
            _fill(output_dir, free_bytes)
        return start(output_dir, of_step)

    layout.start = fill_then_start


@pytest.fixture
def disk(mount, tmp_path):
    """Return an empty directory on a small file system."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount(directory, DISK_BYTES)
    return directory


@pytest.mark.parametrize(
    ("free_bytes", "changes"),
    [
        (EXPORT_FITS, {}),
        (0, {}),
        pytest.param(EXPORT_FITS, {"asynchronous_save": False}, marks=pytest.mark.slow),
        pytest.param(0, LORA | {"merge_adapter": True}, marks=pytest.mark.slow),
    ],
    ids=["export fits", "nothing fits", "synchronous", "adapter"],
)
def test_recipe_on_a_full_disk(tiny_model, text_file, disk, ranks_environment, tmp_path, free_bytes, changes):
    values = {
        "model_name_or_path": tiny_model("llama"), "dataset_name": text_file, "output_dir": disk / "run", "max_steps": 6,
        "report": True,
    }  # fmt: skip
    argv = write_recipe(tmp_path / "recipe.yaml", SETTINGS | values | changes)
    prepare = functools.partial(_fill_before_save, 4, free_bytes)
    found = refusals.run(argv, tmp_path, ranks_environment({}), prepare)
    output = found[0].output
    assert [one.status for one in found] == [1, 1], output
    assert "Traceback" not in output + found[1].output, output
    (error,) = {error for one in found for error in one.errors}
    assert output.rstrip().splitlines()[-1] == error
    assert not list((disk / "run").glob(".*.incomplete")) and not list((disk / "run").glob(".export*"))
    assert (disk / "run" / "checkpoint-2" / "manifest.json").is_file()
    assert "the checkpoint of step 4 was not written" in output
    if free_bytes:
        assert error.startswith("SaveError: the checkpoint of step 6 was not written"), error
        assert (disk / "run" / "export" / "model.safetensors").is_file()
    else:
        assert error.startswith("ExportError: "), error
        assert "has only 0 free" in error
        assert "metrics are incomplete" in output or "cannot write the report" in output
        assert not (disk / "run" / "export").exists()


def _train_without_fsdp(model, data, output, free_bytes, keywords):
    """Train on a disk that is full from step 3 on; return the error's class and text, and the losses."""
    from transformers import TrainerCallback

    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.errors import RecipeError

    class Fill(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3 and args.process_index == 0:
                _fill(output, free_bytes)

    callbacks = [Fill(), ShardedCheckpointCallback(export_dir=output / "export")]
    settings = {"loader": "stock", "save_strategy": "steps", "save_steps": 2, "steps": 5} | keywords
    trainer = build(str(model), str(data), str(output), callbacks=callbacks, **settings)
    try:
        trainer.train()
    except RecipeError as error:
        return type(error).__name__, str(error), losses_of(trainer)
    return "", "", losses_of(trainer)


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}


@pytest.mark.parametrize(
    ("world_size", "free_bytes", "keywords"),
    [
        (1, EXPORT_FITS, {}),
        (2, 0, BEST),
        pytest.param(1, 0, {}, marks=pytest.mark.slow),
        pytest.param(1, EXPORT_FITS, BEST, marks=pytest.mark.slow),
        pytest.param(2, EXPORT_FITS, {}, marks=pytest.mark.slow),
    ],
)
def test_full_disk_without_fsdp(tiny_model, text_file, disk, world_size, free_bytes, keywords):
    output = disk / "run"
    results = run_ranks(
        _train_without_fsdp, world_size, tiny_model("llama"), text_file, output, free_bytes, keywords,
        environment={"ACCELERATE_USE_CPU": "true"}, timeout_seconds=200,
    )  # fmt: skip
    assert len({result[:2] for result in results}) == 1
    kind, error, losses = results[0]
    assert len(losses) == 5
    assert [path.name for path in output.glob("*checkpoint-*")] == ["checkpoint-2"]
    assert (output / "checkpoint-2" / "manifest.json").is_file()
    if free_bytes:
        assert kind == "SaveError" and (output / "export" / "model.safetensors").is_file()
        assert error.startswith("the checkpoint of step 5 was not written: torch.save could not write a file.")
        assert error.endswith(f"Check free space and permissions of {output}.")
    else:
        assert kind == "ExportError" and "has only 0 free" in error
