"""Names and paths of recipes, and which arguments go to Accelerate's launcher."""

import os

import pytest
import yaml

from hf_fsdp_recipes.configs.shipped_files import PATH_FIELDS, find_file, read_recipe, shipped_directory
from hf_fsdp_recipes.errors import PlanError, RecipeError, TemplateError
from hf_fsdp_recipes.tools.launcher import copies, launch
from hf_fsdp_recipes.training.arguments import parse_arguments

MODEL = {"model_name_or_path": "some/model", "output_dir": "run"}


def test_launcher_and_scripts_share_only_the_options_that_are_listed():
    from trl import (
        DatasetMixtureConfig,
        DPOConfig,
        GRPOConfig,
        ModelConfig,
        RewardConfig,
        ScriptArguments,
        SFTConfig,
        TrlParser,
    )  # fmt: skip

    from hf_fsdp_recipes.training.arguments import RecipeArguments

    launcher = {action.dest for action in launch.launch_command_parser()._actions}
    for config in (SFTConfig, DPOConfig, RewardConfig, GRPOConfig):
        parser = TrlParser((ScriptArguments, config, ModelConfig, RecipeArguments, DatasetMixtureConfig))
        script = {action.dest for action in parser._actions}
        assert launcher & script == launch.SHARED_OPTIONS | {"help"}


def test_arguments_go_to_the_launcher_or_the_script_in_any_order(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(launch, "launch_command", found.append)
    monkeypatch.setattr(os, "environ", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"})
    given = [
        "--max_steps",
        "-1",
        "--num_processes",
        "2",
        "--gradient_accumulation_steps=4",
        "--special_tokens",
        "a",
        "b",
    ]
    given += ["--main_process_port=0", "-q", "--lr_scheduler_kwargs", '{"a": 1}', "--tee", "3", "--debug", "overflow"]
    (tmp_path / "t.yaml").write_text("use_cpu: true\n")
    launch.launch_script(tmp_path / "x.py", tmp_path / "t.yaml", given)
    assert os.environ["ACCELERATE_USE_CPU"] == "true"
    [parsed] = found
    assert parsed.config_file == str(tmp_path / "t.yaml") and parsed.training_script == str(tmp_path / "x.py")
    assert (parsed.num_processes, parsed.main_process_port, parsed.tee, parsed.quiet) == (2, 0, "3", True)
    assert not parsed.gradient_accumulation_steps and not parsed.debug
    expected = ["--max_steps", "-1", "--gradient_accumulation_steps=4", "--special_tokens", "a", "b"]
    assert parsed.training_script_args == [*expected, "--lr_scheduler_kwargs", '{"a": 1}', "--debug", "overflow"]
    assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "5" and "SIGUSR1" in os.environ["PET_SIGNALS_TO_HANDLE"]


def test_a_file_in_the_current_directory_comes_before_a_shipped_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shipped = shipped_directory("recipes") / "quickstart.yaml"
    for name in ("quickstart", "quickstart.yaml", "recipes/quickstart.yaml", str(shipped)):
        assert find_file("recipes", name) == shipped
    copies.copy_recipe("quickstart", tmp_path)
    assert find_file("recipes", "quickstart").resolve() == tmp_path / "quickstart.yaml"
    assert (tmp_path / "data" / "quickstart.jsonl").is_file()


@pytest.mark.parametrize("name", ["qwen3_8b_lra", "no/such.yaml", ".", "a" * 300, "a\0b"])
def test_a_recipe_that_is_not_there_is_one_error_of_the_caller(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    for folder, error_class in (("recipes", RecipeError), ("accelerate_configs", TemplateError)):
        with pytest.raises(error_class, match="neither a file nor a shipped"):
            find_file(folder, name)
    with pytest.raises(PlanError, match="choose a name from `hf-fsdp recipes list`"):
        read_recipe(name, PlanError)


def test_a_path_in_a_recipe_is_in_the_current_directory_or_beside_the_recipe(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    folder.mkdir()
    for file in ("here.jsonl", "mine/here.jsonl", "mine/beside.jsonl"):
        (tmp_path / file).write_text('{"text": "a"}\n')
    names = {"here.jsonl": "here.jsonl", "beside.jsonl": "mine/beside.jsonl", "hub/name": "hub/name", "": ""}
    for name, path in names.items():
        (folder / "r.yaml").write_text(yaml.safe_dump(dict.fromkeys(PATH_FIELDS, name) | {"run_name": "beside.jsonl"}))
        read = read_recipe("mine/r.yaml")
        assert read == dict.fromkeys(PATH_FIELDS, path) | {"run_name": "beside.jsonl"}


def test_parsed_arguments_have_the_paths_that_were_found(monkeypatch, tmp_path):
    (tmp_path / "beside.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    file, beside = tmp_path / "r.yaml", str(tmp_path / "beside.jsonl")
    file.write_text(yaml.safe_dump(MODEL | {"dataset_name": "beside.jsonl", "chat_template_path": "t.jinja"}))
    arguments = parse_arguments(["--config", str(file)])
    assert (arguments.script.dataset_name, arguments.training.chat_template_path) == (beside, str(tmp_path / "t.jinja"))
    assert parse_arguments(["--config", str(file), "--dataset-name", "x.jsonl"]).script.dataset_name == "x.jsonl"
    file.write_text(yaml.safe_dump(MODEL | {"datasets": [{"path": "some/rows"}, {"path": "beside.jsonl"}]}))
    assert [part.path for part in parse_arguments(["--config", str(file)]).mixture.datasets] == ["some/rows", beside]


def test_a_shipped_recipe_is_parsed_by_name_from_anywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = parse_arguments(["--config", "smollm2_135m_lora"])
    assert arguments.script.dataset_name == str(shipped_directory("recipes") / "data" / "sharded_training_faq.jsonl")


def test_no_processes_are_refused_before_the_launch():
    from hf_fsdp_recipes.tools.launcher.launch import launch_script

    template = shipped_directory("accelerate_configs") / "fsdp2_cpu.yaml"
    with pytest.raises(RecipeError, match=r"num_processes is 0\. Set it to the number of GPUs"):
        launch_script(shipped_directory("recipes") / "sft.py", template, ["--num_processes", "0"])
