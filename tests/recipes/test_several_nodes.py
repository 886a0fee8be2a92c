"""Two nodes have the same losses as one node with the same rows per step.

The nodes are two launchers on this machine.
"""

import pytest
import yaml

from tests.ranks.harness import read_losses
from tests.recipes.launching import CPU, SETTINGS, run, write_recipe


@pytest.mark.slow
def test_two_launchers_have_the_losses_of_one_with_the_same_global_batch(
    tiny_model, text_file, tmp_path
):
    losses = {}
    for num_nodes, num_ranks, accumulated in ((1, 1, 4), (2, 2, 2)):
        template, output = tmp_path / f"template-{num_nodes}.yaml", tmp_path / f"run-{num_nodes}"
        counts = {"num_machines": num_nodes, "num_processes": num_ranks}
        template.write_text(yaml.safe_dump(yaml.safe_load(CPU.read_text()) | counts))
        recipe = SETTINGS | {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": accumulated,
        }
        recipe |= {
            "model_name_or_path": tiny_model("llama"),
            "dataset_name": text_file,
            "output_dir": output,
        }
        result = run(template, write_recipe(tmp_path / "recipe.yaml", recipe), num_nodes=num_nodes)
        assert result.returncode == 0, result.stdout
        losses[num_nodes] = read_losses(output)
    assert len(losses[1]) == SETTINGS["max_steps"] and losses[1][-1] < losses[1][0] - 0.1
    assert losses[2] == pytest.approx(losses[1], abs=1e-5)
