"""Every shipped template is launched for real steps on CPU ranks, and trains what one rank trains."""

import json

import pytest

from hf_fsdp_recipes.launch import templates
from tests.recipes.launching import cpu_variant, run

GLOBAL_BATCH = 4
STEPS = 3


def losses(output_dir):
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]


def arguments(model, data, output, num_ranks):
    return [
        "--model_name_or_path", model, "--dataset_name", data, "--output_dir", output, "--max_steps", STEPS,
        "--per_device_train_batch_size", GLOBAL_BATCH // num_ranks, "--logging_steps", 1, "--save_strategy", "no",
        "--learning_rate", "1e-2", "--max_length", 64, "--report_to", "none", "--gradient_checkpointing", "false",
        "--disable_tqdm", "true",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def one_rank_losses(tiny_model, text_file, tmp_path_factory):
    directory = tmp_path_factory.mktemp("one-rank")
    config, _, _ = cpu_variant(templates.template_directory() / "fsdp2_full_shard.yaml", directory / "one.yaml")
    config.write_text(config.read_text().replace("num_processes: 2", "num_processes: 1"))
    result = run(config, arguments(tiny_model("llama"), text_file, directory / "out", 1))
    assert result.returncode == 0, result.stdout
    return losses(directory / "out")


@pytest.mark.parametrize("template", templates.all_templates(), ids=lambda t: t.name)
def test_template_trains_what_one_rank_trains(template, tiny_model, text_file, tmp_path, one_rank_losses):
    shipped = templates.template_directory() / f"{template.name}.yaml"
    config, num_ranks, num_nodes = cpu_variant(shipped, tmp_path / shipped.name)
    output = tmp_path / "out"
    result = run(config, arguments(tiny_model("llama"), text_file, output, num_ranks), num_nodes=num_nodes)
    assert result.returncode == 0, result.stdout
    assert losses(output) == pytest.approx(one_rank_losses, rel=1e-4)
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics[-1]["host_bytes"]) == num_ranks  # so many ranks trained together, not each for itself
    assert (output / "export" / "model.safetensors").is_file()
