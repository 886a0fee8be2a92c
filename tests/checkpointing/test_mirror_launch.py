"""The launched recipe with a mirror: ranks exit in spite of the mirror's threads; a wrong bucket gives one short error."""

import pytest

from tests.checkpointing.object_storage import BUCKET
from tests.recipes.launching import run
from tests.recipes.test_sft import CPU, recipe


@pytest.mark.slow
def test_launched_run_uploads_and_exits(tiny_model, text_file, tmp_path, storage):
    settings = {"model_name_or_path": tiny_model("llama"), "dataset_name": text_file, "max_steps": 2}
    result = run(CPU, ["--config", recipe(tmp_path, checkpoint_mirror=f"s3://{BUCKET}/run", **settings)])
    assert result.returncode == 0, result.stdout
    assert storage.complete("run/") == ["checkpoint-2"] and f"mirrored: export to s3://{BUCKET}/run" in result.stdout
    result = run(CPU, ["--config", recipe(tmp_path, checkpoint_mirror="s3://nowhere/run", **settings)])
    assert result.returncode == 1
    assert "CheckpointError: checkpoint_mirror s3://nowhere/run cannot be written: " in result.stdout
    assert "Traceback" not in result.stdout.partition("CheckpointError")[0]
