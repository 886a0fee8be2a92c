"""Every template, shipped or not, trains real steps on CPU ranks and matches the losses of one rank."""

import json

import pytest

from hf_fsdp_recipes.configs import templates
from tests.ranks.harness import run_ranks, template_environment
from tests.recipes.launching import cpu_variant, run, run_recipe

GLOBAL_BATCH = 4
STEPS = 3
LAUNCHED_ALWAYS = ("fsdp2_full_shard",)
SIMILAR = (
    "fsdp2_full_shard",
    "fsdp2_hybrid_shard_zero2",
    "fsdp2_shard_grad_op",
    "fsdp1_full_shard_gaudi",
)  # similar to templates that always train or are launched


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
    config, _, _ = cpu_variant(rendered(templates.find_template("fsdp2_full_shard"), directory), directory / "one.yaml")
    config.write_text(config.read_text().replace("num_processes: 2", "num_processes: 1"))
    argv = arguments(tiny_model("llama"), text_file, directory / "out", 1)
    run_ranks(run_recipe, 1, argv, environment=template_environment(config))
    return losses(directory / "out")


def rendered(template, directory):
    file = directory / f"{template.name}.yaml"
    file.write_text(templates.render(template))
    return file


def parametrized(is_slow):
    """Return all templates as parameters; mark those that `is_slow` selects as slow."""
    marked = [(one, [pytest.mark.slow] if is_slow(one) else []) for one in templates.all_templates()]
    return pytest.mark.parametrize("template", [pytest.param(one, id=one.name, marks=marks) for one, marks in marked])


@parametrized(is_slow=lambda template: template not in templates.shipped_templates() or template.name in SIMILAR)
def test_template_matches_the_losses_of_one_rank(template, tiny_model, text_file, tmp_path, one_rank_losses):
    """Train on forked ranks with the variables that Accelerate's launcher derives from the file."""
    config, num_ranks, num_nodes = cpu_variant(rendered(template, tmp_path), tmp_path / "template.yaml")
    variables = template_environment(config) | {"LOCAL_WORLD_SIZE": str(num_ranks // num_nodes)}
    output = tmp_path / "out"
    run_ranks(
        run_recipe, num_ranks, arguments(tiny_model("llama"), text_file, output, num_ranks), environment=variables
    )
    check_run(output, num_ranks, one_rank_losses)


@parametrized(is_slow=lambda template: template.name not in LAUNCHED_ALWAYS)
def test_template_works_with_the_stock_launcher(template, tiny_model, text_file, tmp_path, one_rank_losses):
    config, num_ranks, num_nodes = cpu_variant(rendered(template, tmp_path), tmp_path / "template.yaml")
    output = tmp_path / "out"
    result = run(config, arguments(tiny_model("llama"), text_file, output, num_ranks), num_nodes=num_nodes)
    assert result.returncode == 0, result.stdout
    check_run(output, num_ranks, one_rank_losses)


def check_run(output, num_ranks, one_rank_losses):
    assert losses(output) == pytest.approx(one_rank_losses, rel=1e-4)
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    measured = [entry["host_bytes"] for entry in metrics if "host_bytes" in entry]
    assert len(measured[-1]) == num_ranks  # the ranks formed one group
    assert (output / "export" / "model.safetensors").is_file()
