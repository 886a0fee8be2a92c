"""Two nodes (two launchers on this machine) have the same losses as one node with the same rows per step."""

import pytest
import yaml

from tests.ranks.harness import read_losses
from tests.recipes.launching import ROOT, run

SETTINGS = {
    "max_steps": 4, "per_device_train_batch_size": 1, "logging_steps": 1, "learning_rate": 1.0e-2, "max_length": 64,
    "save_strategy": "no", "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


@pytest.mark.slow
def test_two_launchers_have_the_losses_of_one_with_the_same_global_batch(tiny_model, text_file, tmp_path):
    losses = {}
    for num_nodes, num_ranks, accumulated in ((1, 1, 4), (2, 2, 2)):
        config = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2_cpu.yaml").read_text())
        template, recipe = tmp_path / f"template-{num_nodes}.yaml", tmp_path / f"recipe-{num_nodes}.yaml"
        template.write_text(yaml.safe_dump(config | {"num_machines": num_nodes, "num_processes": num_ranks}))
        output = tmp_path / f"run-{num_nodes}"
        names = {"model_name_or_path": tiny_model("llama"), "dataset_name": text_file, "output_dir": output}
        named = {key: str(value) for key, value in names.items()}
        recipe.write_text(yaml.safe_dump(SETTINGS | named | {"gradient_accumulation_steps": accumulated}))
        result = run(template, ["--config", recipe], num_nodes=num_nodes)
        assert result.returncode == 0, result.stdout
        losses[num_nodes] = read_losses(output)
    assert len(losses[1]) == SETTINGS["max_steps"] and losses[1][-1] < losses[1][0] - 0.1
    assert losses[2] == pytest.approx(losses[1], abs=1e-5)
