"""CPU ranks on a machine that has the device: they train, save and resume without it."""

import subprocess
import sys

import pytest
import torch

from tests.device.cases import LORA, SETTINGS
from tests.device.ranks import CPU, DEVICE, TEMPLATES, device_environment, template_environment, variant, write_recipe
from tests.recipes.launching import ROOT, environment, run_recipe


def run_and_measure(arguments):
    """Run the recipe; return the device's type and its peak memory in bytes."""
    run_recipe(arguments)
    return torch.accelerator.current_accelerator().type, torch.accelerator.max_memory_allocated()


@pytest.mark.parametrize(
    ("template", "num_ranks"), [("fsdp2_cpu", 2), ("fsdp1_full_shard", 2), ("fsdp2_hybrid_shard", 4)]
)
def test_cpu_ranks_do_not_use_the_device(ranks, tiny_model, text_file, tmp_path, template, num_ranks):
    settings = SETTINGS | LORA | {"max_steps": 2, "merge_adapter": True, "output_dir": tmp_path / "run"}
    settings |= {"model_name_or_path": tiny_model("llama"), "dataset_name": text_file}
    variables = template_environment(variant(template, tmp_path)) | CPU
    for arguments in (
        write_recipe(settings),
        write_recipe(settings | {"max_steps": 3, "resume_from_checkpoint": "auto"}),
    ):
        measured = ranks.run(run_and_measure, num_ranks, arguments, environment=variables)
        assert measured == [("npu", 0)] * num_ranks
    # If the device's entry is missing, Trainer logs an error on each rank.
    states = torch.load(tmp_path / "run" / "checkpoint-2" / "rng_state_1.pth", weights_only=False)
    assert states["npu"] == []
    assert (tmp_path / "run" / "export_merged" / "model.safetensors").exists()


@pytest.mark.slow
def test_quickstart_on_a_machine_with_a_device(package, tiny_model, tmp_path):
    options = [
        "--model",
        tiny_model("llama_tied"),
        "--output_dir",
        tmp_path / "run",
        "--max_steps",
        36,
        "--save_steps",
        12,
    ]
    variables = environment(**device_environment(package))
    variables.pop("ACCELERATE_USE_CPU")  # the script sets it
    command = [sys.executable, "recipes/quickstart.py", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from step" in done.stdout


def dry_run(arguments):
    import contextlib
    import io

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_recipe([*arguments, "--dry_run"])
    return printed.getvalue()


def test_dry_run_plans_for_the_memory_of_the_device(ranks, tiny_model, text_file, tmp_path):
    settings = SETTINGS | {"output_dir": tmp_path / "run", "dataset_name": text_file}
    arguments = write_recipe(settings | {"model_name_or_path": tiny_model("llama")})
    variables = template_environment(TEMPLATES / "fsdp2_full_shard.yaml")
    [text, _] = ranks.run(dry_run, 2, arguments, environment=variables | DEVICE)
    assert "this launch on 2 GPUs" in text
    assert "of 1.1 GB" in text  # DEVICE_MIB
    variables = template_environment(TEMPLATES / "fsdp2_cpu.yaml")
    [text, _] = ranks.run(dry_run, 2, arguments, environment=variables | CPU)
    assert "this launch on 2 CPU ranks" in text
    assert "of 1.1 GB" not in text
