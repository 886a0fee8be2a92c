"""Weights that are sharded over three ranks reach the devices, whatever their dtypes."""

import pytest

from tests.device.ranks import DEVICE
from tests.ranks.harness import FSDP2, fsdp_environment
from tests.ranks.training import build


def load_shards(model, data, output, loader):
    """Train with learning rate 0; return each full parameter as a list."""
    from hf_fsdp_recipes.loading import distribute

    distribute.BUCKET_BYTES = 4096
    trainer = build(
        str(model), str(data), str(output), loader=loader, steps=1, use_cpu=False, learning_rate=0.0,
        load_arguments={"verify": "full"},
    )  # fmt: skip
    trainer.train()
    return {name: value.full_tensor().cpu().tolist() for name, value in trainer.model.named_parameters()}


@pytest.mark.parametrize("loader", ["rank0", "direct"])
def test_every_value_arrives_on_three_devices(ranks, tiny_model, text_file, tmp_path, loader):
    from safetensors.torch import load_file

    model = tiny_model("llama", "bfloat16")
    environment = fsdp_environment(FSDP2) | DEVICE
    for found in ranks.run(load_shards, 3, model, text_file, tmp_path, loader, environment=environment):
        for name, tensor in load_file(model / "model.safetensors").items():
            assert found[name] == tensor.float().tolist(), name
