"""The command line: starts at once, finds files by name, splits arguments, and reports errors.

An error is one line.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_fsdp_recipes import cli
from hf_fsdp_recipes.saving.hashing import read_facts
from hf_fsdp_recipes.tools import launch
from hf_fsdp_recipes.tools.files import find_file, shipped_directory, shipped_files

run = CliRunner().invoke
COMMANDS = {
    "sft",
    "recipes",
    "config",
    "plan",
    "preflight",
    "rehearse",
    "sweep",
    "checkpoints",
    "export",
    "generate",
}


def hf_fsdp(*arguments, directory=None):
    command = [sys.executable, "-m", "hf_fsdp_recipes.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_help_names_every_command_within_half_a_second_of_processor_time_and_without_torch():
    code = "import resource, sys; from hf_fsdp_recipes.cli import app"
    code += "; app(['--help'], standalone_mode=False)"
    code += "; print('torch' in sys.modules, resource.getrusage(resource.RUSAGE_SELF).ru_utime)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *shown, last = done.stdout.splitlines()
    has_torch, seconds = last.split()
    assert has_torch == "False" and float(seconds) < 0.5
    assert all(
        any(f" {name} " in line for line in shown) for name in COMMANDS | {"report", "quickstart"}
    )


def test_an_error_is_one_line_on_stderr_and_status_1(tmp_path):
    done = hf_fsdp("checkpoints", tmp_path)
    assert (
        done.returncode == 1
        and done.stderr.startswith("ToolError: ")
        and len(done.stderr.splitlines()) == 1
    )


@pytest.mark.parametrize("name", ["qwen3_8b_lra", "no/such.yaml", ".", "a\0b", ""])
def test_a_recipe_or_template_that_is_not_there_is_one_error(name):
    for arguments in (
        ("recipes", "show", name),
        ("config", "check", name),
        ("sft", "--accelerate_config", name),
    ):
        result = run(cli.app, arguments)
        assert type(
            result.exception
        ).__name__ == "ToolError" and "neither a file nor a shipped" in str(result.exception)


def test_a_file_in_the_current_directory_comes_before_a_shipped_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shipped = shipped_directory("recipe") / "quickstart.yaml"
    for name in ("quickstart", "quickstart.yaml", "recipes/quickstart.yaml", str(shipped)):
        assert find_file("recipe", name) == shipped
    Path("quickstart.yaml").touch()
    assert find_file("recipe", "quickstart") == Path("quickstart.yaml")


def test_recipes_are_listed_name_a_template_and_are_copied_with_the_files_that_they_name(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    for line, file in zip(
        run(cli.app, ["recipes", "list"]).output.splitlines(), shipped_files("recipe"), strict=True
    ):
        name, *purpose = line.split()
        template = re.search(r"hf-fsdp sft --accelerate_config (\w+) ", file.read_text())[1]
        assert name == file.stem and find_file("template", template) and purpose[-1].endswith(".")
    assert run(cli.app, ["recipes", "copy", "quickstart"]).exit_code == 0
    copied = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert copied == {"quickstart.yaml", "data/quickstart.jsonl", "launch.slurm"}
    assert (
        run(cli.app, ["recipes", "copy", "smollm2_135m_lora"]).exit_code == 0
    )  # launch.slurm is there already
    Path("launch.slurm").write_text("my own")
    again = run(cli.app, ["recipes", "copy", "smollm2_135m_full"])
    assert "kept launch.slurm" in again.output and "wrote smollm2_135m_full.yaml" in again.output
    assert Path("launch.slurm").read_text() == "my own"


def test_only_recipes_are_copied_and_nothing_is_written_outside_of_the_directory(
    monkeypatch, tmp_path
):
    shared = tmp_path / "shared"
    (shared / "recipes").mkdir(parents=True)
    (shared / "rows.jsonl").touch()
    (shared / "recipes" / "own.jsonl").touch()
    recipe = shared / "recipes" / "mine.yaml"
    recipe.write_text("dataset_name: ../rows.jsonl\ntokenizer_name: own.jsonl\n")
    (tmp_path / "a" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "here")
    assert run(cli.app, ["recipes", "copy", "../../shared/recipes/mine.yaml"]).exit_code == 0
    copied = {file.name for file in (tmp_path / "a").rglob("*") if file.is_file()}
    assert copied == {"mine.yaml", "own.jsonl", "launch.slurm"}
    refused = run(cli.app, ["recipes", "copy", "sft.py"])
    assert refused.exit_code == 1 and not Path("sft.py").exists()


def test_arguments_go_to_the_launcher_or_to_the_script_in_any_order(monkeypatch):
    from hf_fsdp_recipes.upstream import accelerate_internals

    found = []
    monkeypatch.setattr(accelerate_internals, "launch_command", found.append)
    monkeypatch.setattr(os, "environ", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"})
    for_launcher = ["--num_processes", "2", "--main_process_port=0", "-q", "--tee", "3"]
    for_script = [
        "--max_steps",
        "-1",
        "--gradient_accumulation_steps=4",
        "--lora_target_modules",
        "a",
        "b",
        "--debug",
        "overflow",
    ]
    given = [*for_script[:2], *for_launcher[:2], *for_script[2:], *for_launcher[2:]]
    result = run(cli.app, ["sft", "--accelerate-config", "cpu", "--config", "quickstart", *given])
    assert result.exit_code == 0, result.exception
    [parsed] = found
    assert (parsed.num_processes, parsed.main_process_port, parsed.tee, parsed.quiet) == (
        2,
        0,
        "3",
        True,
    )
    assert not parsed.gradient_accumulation_steps and not parsed.debug
    recipes = shipped_directory("recipe")
    assert parsed.training_script == str(recipes / "sft.py")
    assert parsed.training_script_args == [
        "--config",
        str(recipes / "quickstart.yaml"),
        *for_script,
    ]
    assert (
        os.environ["ACCELERATE_USE_CPU"] == "true"
        and os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "5"
    )
    assert "SIGUSR1" in os.environ["PET_SIGNALS_TO_HANDLE"]


def test_a_template_that_accelerate_refuses_is_one_error(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / "two.yaml").write_text("distributed_type: FSDP\nnum_processes: two\n")
    refused = run(cli.app, ["sft", "--accelerate-config", str(tmp_path / "two.yaml")])
    assert type(refused.exception).__name__ == "ToolError" and "two.yaml or an option" in str(
        refused.exception
    )


@pytest.mark.parametrize(("num_devices", "options"), [(0, []), (2, ["--num_processes", "3"])])
def test_ranks_without_accelerators_are_refused_unless_they_are_cpu_ranks(
    monkeypatch, num_devices, options
):
    import torch

    from hf_fsdp_recipes.upstream import accelerate_internals

    launched = []
    monkeypatch.setattr(accelerate_internals, "launch_command", launched.append)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
    for template in ("full_shard", "ddp", "cpu"):
        monkeypatch.setattr(os, "environ", os.environ | {"ACCELERATE_USE_CPU": "false"})
        result = run(cli.app, ["sft", "--accelerate-config", template, *options])
        if template == "cpu":
            assert result.exit_code == 0 and len(launched) == 1
        else:
            assert f"and this node has {num_devices}. " in str(result.exception) and not launched
    for enough in (["--num_processes", "2"], ["--num_processes", "8", "--num_machines", "4"]):
        if num_devices == 2:
            assert run(cli.app, ["sft", "--accelerate-config", "ddp", *enough]).exit_code == 0


def test_the_launcher_and_the_recipe_share_only_the_options_that_are_listed():
    from accelerate.commands.launch import launch_command_parser
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    from hf_fsdp_recipes.training.arguments import RecipeArguments

    parser = TrlParser(
        (ScriptArguments, SFTConfig, ModelConfig, RecipeArguments, DatasetMixtureConfig)
    )
    both = {action.dest for action in parser._actions} & {
        action.dest for action in launch_command_parser()._actions
    }
    assert both == launch.SHARED_OPTIONS | {"help"}


def test_checkpoints_are_listed_and_verify_finds_damage(tmp_path):
    for step in (5, 10, 12):
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "trainer_state.json").write_text("{}")
        (checkpoint / "a.bin").write_bytes(b"weights")
        facts = {"a.bin": read_facts(checkpoint / "a.bin")}
        (checkpoint / "manifest.json").write_text(
            json.dumps({"run": "x", "world_size": 2, "files": facts})
        )
    (tmp_path / "checkpoint-10" / "a.bin").write_bytes(b"Weights")
    (tmp_path / "checkpoint-12" / "a.bin").unlink()
    (tmp_path / "checkpoint-15").mkdir()
    rows = [
        line.split(maxsplit=3)
        for line in run(cli.app, ["checkpoints", str(tmp_path)]).output.splitlines()
    ]
    assert [row[0] for row in rows] == ["step", "5", "10", "12", "15"]
    assert [row[2] for row in rows[1:]] == ["2", "2", "2", "?"]
    assert [row[3] for row in rows[1:4]] == ["complete", "complete", "a.bin is missing or cut off"]
    assert "trainer_state.json is unusable" in rows[4][3]
    verified = run(cli.app, ["checkpoints", str(tmp_path), "--verify"]).output.splitlines()
    assert verified[1].endswith("complete")
    assert (
        f"a.bin is damaged. If it was changed on purpose: hf-fsdp checkpoints {tmp_path}"
        in verified[2]
    )
    accepted = run(cli.app, ["checkpoints", str(tmp_path), "--accept", "10", "--verify"]).output
    assert accepted.splitlines()[0] == "accepted: a.bin, trainer_state.json"
    assert accepted.splitlines()[3].endswith("complete")


def test_an_export_generates_and_a_missing_one_is_one_error(tiny_model, tmp_path):
    arguments = [
        "generate",
        str(tiny_model("llama")),
        "--prompt",
        "The big fox",
        "--max-new-tokens",
        "5",
    ]
    plain, chat = run(cli.app, arguments), run(cli.app, [*arguments, "--chat"])
    assert plain.exit_code == chat.exit_code == 0 and plain.output and plain.output != chat.output
    missing = run(cli.app, ["generate", str(tmp_path / "none"), "--prompt", "a"])
    assert "is no directory with exported weights" in str(missing.exception)
