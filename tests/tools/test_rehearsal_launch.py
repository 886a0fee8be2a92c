"""Rehearsals find errors that a real job would hit only in its first or last minute."""

import contextlib

import pytest
import yaml
from trl import ScriptArguments

from hf_fsdp_recipes.configs.shipped_files import read_recipe
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.tools.rehearsal import stand_ins, steps
from hf_fsdp_recipes.tools.rehearsal.steps import rehearse
from hf_fsdp_recipes.tools.rehearsal.tiny_recipe import read_settings
from hf_fsdp_recipes.tools.subprocess_runner import find_error
from tests.conftest import make_tokenizer
from tests.recipes import small

DEFAULT = (
    "smollm2_135m_lora",
    "qwen3_8b_qlora",
    "llama2_70b_chat_full",
)  # for make rehearse; make rehearse-all runs the others too
BIG = small.ROOT / "recipes" / "llama2_70b_chat_full.yaml"


def local_files(recipe, tmp_path):
    """Return overrides that replace model and dataset on the Hub by a local config, tokenizer and rows."""
    settings = read_recipe(recipe)
    directory = tmp_path / "full-size"
    small.full_size_config(settings.get("model_name_or_path", "HuggingFaceTB/SmolLM2-135M-Instruct")).save_pretrained(
        directory
    )
    make_tokenizer(directory)
    overrides = ["--output_dir", str(tmp_path / "run"), "--save_total_limit", "1"]
    overrides += ["--dataset_name", str(small.write_rows(settings["dataset_name"], tmp_path / "rows"))]
    if "dataset_config" in settings:
        overrides += ["--dataset_config", "null"]
    return [*overrides, f"--{'tokenizer_name' if 'config_name' in settings else 'model_name_or_path'}", str(directory)]


@pytest.fixture(autouse=True)
def _large_disk(monkeypatch):
    """Pretend that the disk is large enough for the checkpoints of a 70B model."""
    import shutil

    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=10**15))


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            one, id=one.stem, marks=pytest.mark.rehearsal if one.stem in DEFAULT else pytest.mark.rehearsal_of_all
        )
        for one in small.recipes()
    ],
)
@pytest.mark.timeout(900)
def test_shipped_recipe_passes_its_rehearsal(recipe, tmp_path, capsys):
    overrides = [*local_files(recipe, tmp_path), "--push_to_hub", "false"]
    passed = rehearse(recipe, str(small.template_of(recipe)), overrides)
    printed = capsys.readouterr().out
    assert passed, printed
    for step in ("load, train", "resume", "finish", "export", "generate"):
        assert f"ok     {step}" in printed
    assert "signaled to stop, it wrote checkpoint-" in printed


@pytest.mark.rehearsal
@pytest.mark.timeout(900)
def test_recipe_passes_its_rehearsal_without_the_hub(tmp_path, capsys):
    recipe = small.ROOT / "recipes" / "qwen3_8b_lora.yaml"
    passed = rehearse(recipe, str(small.template_of(recipe)), ["--output_dir", str(tmp_path / "run")])
    printed = capsys.readouterr().out
    assert passed, printed
    assert "real job: The config of Qwen/Qwen3-8B cannot be read" in printed


@pytest.mark.parametrize("name", ["qwen3_8b_lora", "llama2_70b_chat_full", "llama2_7b_alpaca_full", "c4_150m_pretrain"])
def test_static_steps_pass_without_the_hub(name, tmp_path):
    recipe = small.ROOT / "recipes" / f"{name}.yaml"
    rehearsal = steps.Rehearsal(recipe, small.template_of(recipe), ["--output_dir", "run"], tmp_path, lambda: None)
    said = [step(rehearsal) for title, step in steps.STEPS[:6] if title != "hub"]
    assert "a tokenizer of bytes instead of" in said[3] and "96 made-up rows with the columns of" in said[3]
    assert said[4].startswith("kept 96 of 96 rows") or "rows are streamed" in said[4]


def test_wrong_dataset_is_not_made_up(tmp_path):
    script = ScriptArguments(dataset_name="someone/no-such-dataset")
    with pytest.raises(RecipeError, match="someone/no-such-dataset cannot be read"):
        stand_ins.read_rows(script, 4)


def failing(overrides, capsys, template="fsdp2_full_shard"):
    assert not rehearse(BIG, template, overrides)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert len(lines) == 1
    return lines[0]


def test_error_of_a_run_is_found_in_its_log():
    rank = (
        "[rank1]: Traceback (most recent call last):\n[rank1]:     raise CheckpointError(\n"
        "[rank1]: torch.utils.checkpoint.CheckpointError: other values\n[rank1]: more of it\n"
    )
    launcher = (
        "torch.distributed.DistNetworkError: the port is taken\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    assert find_error(rank) == find_error(launcher + rank) == "torch.utils.checkpoint.CheckpointError: other values"
    assert find_error(launcher) == "torch.distributed.DistNetworkError: the port is taken"
    assert find_error(rank + launcher + "DataError: no such column\n") == "DataError: no such column"


def test_overrides_are_read_as_yaml(tmp_path):
    (tmp_path / "recipe.yaml").write_text("seed: 1\nuse_peft: false\n")
    overrides = ["--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--dataset_config", "null", "--seed=3"]
    assert read_settings(tmp_path / "recipe.yaml", overrides) == {
        "seed": 3,
        "use_peft": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "dataset_config": None,
    }


def test_signaled_run_without_a_checkpoint_fails(tmp_path, monkeypatch):
    class IgnoresSignals:
        exit_status = 0

        def signal_ranks(self, *_):
            pass

    rehearsal = steps.Rehearsal(BIG, BIG, [], tmp_path, lambda: None)
    monkeypatch.setattr(steps.Rehearsal, "checkpoints", lambda self: ["checkpoint-2"])
    monkeypatch.setattr(steps.Rehearsal, "launch", lambda self, *_: contextlib.nullcontext(IgnoresSignals()))
    monkeypatch.setattr(steps.Rehearsal, "wait", lambda self, *_: None)
    with pytest.raises(RecipeError, match="signaled to stop but wrote no checkpoint; the newest is checkpoint-2"):
        steps.resume_and_stop(rehearsal)


def test_wrong_wrap_class_is_caught(tmp_path, capsys):
    template = tmp_path / "template.yaml"
    config = yaml.safe_load((small.ROOT / "accelerate_configs" / "fsdp2_full_shard.yaml").read_text())
    config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = "GPT2Block"
    template.write_text(yaml.safe_dump(config))
    line = failing([*local_files(BIG, tmp_path), "--push_to_hub", "false"], capsys, str(template))
    assert line.startswith("FAILED template") and "GPT2Block" in line and "LlamaDecoderLayer" in line


def test_optimizer_that_cannot_be_sharded_is_caught(tmp_path, capsys):
    line = failing([*local_files(BIG, tmp_path), "--push_to_hub", "false", "--optim", "ademamix"], capsys)
    assert line.startswith("FAILED template") and "ademamix fails to train, save or resume under FSDP2" in line


def test_missing_hub_token_is_caught(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    line = failing(local_files(BIG, tmp_path), capsys)
    assert line.startswith("FAILED hub") and "no Hub token" in line


def test_missing_column_is_caught(tmp_path, capsys):
    overrides = [*local_files(BIG, tmp_path), "--push_to_hub", "false", "--dataset_text_field", "contents"]
    line = failing(overrides, capsys)
    assert line.startswith("FAILED data") and "columns ['content']" in line


def test_missing_chat_template_is_caught(tmp_path, capsys):
    overrides = [*local_files(BIG, tmp_path), "--push_to_hub", "false", "--chat_template_path", "null"]
    (tmp_path / "full-size" / "chat_template.jinja").unlink(missing_ok=True)
    rows = small.write_rows("HuggingFaceTB/smoltalk", tmp_path / "chat")
    line = failing([*overrides, "--dataset_name", str(rows)], capsys)
    assert line.startswith("FAILED data") and "no chat template" in line


def test_output_that_is_too_small_is_caught(tmp_path, capsys, monkeypatch):
    import shutil

    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=10**12))
    line = failing([*local_files(BIG, tmp_path), "--push_to_hub", "false"], capsys)
    assert line.startswith("FAILED output") and "1.0 TB free" in line and "827" in line


def test_output_that_cannot_be_written_is_caught(tmp_path, capsys):
    overrides = [*local_files(BIG, tmp_path), "--push_to_hub", "false", "--output_dir", "/proc/runs"]
    line = failing(overrides, capsys)
    assert line.startswith("FAILED output") and "cannot be written" in line
