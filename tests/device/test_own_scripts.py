"""Users' own scripts on the device: a loop without a Trainer, and adapters that are computed from the base weights."""

import os
import shutil

import pytest
from safetensors.torch import load_file

from tests.device.ranks import CPU, DEVICE, TEMPLATES
from tests.ranks.harness import FSDP2, fsdp_environment, template_environment
from tests.ranks.training import LORA, build
from tests.recipes.launching import run_recipe

LOOP_STEPS, FIRST_CHECKPOINT = 6, 3


def test_own_loop_on_the_device_resumes_to_the_same_export(ranks, tiny_model, text_file, tmp_path):
    environment = template_environment(TEMPLATES / "fsdp2_full_shard.yaml") | DEVICE
    options = ["--model", tiny_model("llama"), "--data", text_file, "--max_steps", LOOP_STEPS]
    options += ["--save_steps", FIRST_CHECKPOINT]
    for name in ("whole", "resumed"):
        if name == "resumed":
            checkpoint = f"checkpoint-{FIRST_CHECKPOINT}"
            shutil.copytree(tmp_path / "whole" / checkpoint, tmp_path / name / checkpoint)
        arguments = [*options, "--output_dir", tmp_path / name]
        ranks.run(run_recipe, 2, arguments, "examples/own_loop.py", environment=environment)
    trained, resumed = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("whole", "resumed"))
    assert trained.keys() == resumed.keys()
    assert all(tensor.equal(resumed[name]) for name, tensor in trained.items())


def _train_pissa(model, data, output):
    """Train an adapter that PEFT computes from the base weights, and export it merged; return device type and losses."""
    from hf_fsdp_recipes import export_model

    lora = LORA | {"init_lora_weights": "pissa"}
    use_cpu = os.environ["ACCELERATE_USE_CPU"] == "true"
    trainer = build(str(model), str(data), str(output), steps=3, lora=lora, use_cpu=use_cpu)
    trainer.train()
    export_model(trainer.model, output / "merged", merge_adapter=True)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer.accelerator.device.type, losses


def test_pissa_on_the_device_trains_as_on_cpu_ranks(ranks, tiny_model, text_file, tmp_path):
    found = {}
    for name, place in (("cpu", CPU), ("device", DEVICE)):
        environment = fsdp_environment(FSDP2) | place
        run = ranks.run(_train_pissa, 2, tiny_model("llama"), text_file, tmp_path / name, environment=environment)
        found[name] = run[0]
    assert found["cpu"][0] == "cpu" != found["device"][0]
    assert found["device"][1] == pytest.approx(found["cpu"][1], rel=1e-5)
    expected, merged = (load_file(tmp_path / name / "merged" / "model.safetensors") for name in found)
    assert max((merged[name] - tensor).abs().max().item() for name, tensor in expected.items()) < 1e-4
