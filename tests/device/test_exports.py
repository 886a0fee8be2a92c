"""`hf-fsdp export` and `hf-fsdp generate` on a machine that has the device."""

import pytest
from safetensors.torch import load_file

from tests.device.ranks import DEVICE


def command_line(*arguments):
    """Run the hf-fsdp command; return its output and the device's peak memory in bytes."""
    import torch
    from typer.testing import CliRunner

    from hf_fsdp_recipes.cli import app

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout, torch.accelerator.max_memory_allocated()


@pytest.mark.parametrize("name", ["full", "lora", "fsdp1"])
def test_export_of_a_checkpoint_equals_the_export_of_the_run(runs, tmp_path, name):
    run = runs.get(name)
    options = ["--base-model", run.settings["model_name_or_path"]] if name == "lora" else []
    checkpoint = run.output / "checkpoint-6"
    [(_, device_bytes)] = runs.ranks.run(
        command_line, 1, "export", checkpoint, tmp_path / "export", *options, environment=DEVICE
    )
    file = "adapter_model.safetensors" if name == "lora" else "model.safetensors"
    ours, theirs = load_file(tmp_path / "export" / file), load_file(run.output / "export" / file)
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in theirs)
    assert device_bytes == 0


@pytest.mark.parametrize("name", ["full", "lora", "qlora"])
def test_verification_loads_nothing_on_the_device(runs, name):
    events = runs.get(name).events
    during = [event for event in events if any(":_compare:" in frame for frame in event.project)]
    assert [event for event in events if ":check_logits:" in " ".join(event.project)]  # the trained model's logits
    assert during == []


def test_text_is_generated_on_the_device(runs, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The big fox")
    texts = []
    for export in ("export", "export_merged"):
        arguments = ["generate", runs.get("lora").output / export, "--prompt-file", prompt]
        [(text, device_bytes)] = runs.ranks.run(
            command_line, 1, *arguments, "--max-new-tokens", "8", environment=DEVICE
        )
        assert device_bytes > 0
        texts.append(text)
    assert texts[0] == texts[1]
    assert "The big fox" in texts[0]
