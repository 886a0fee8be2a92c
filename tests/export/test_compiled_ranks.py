"""A compiled model is exported like one that is not compiled."""

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import build

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def _export(model_dir, data, output, lora, is_compiled):
    from hf_fsdp_recipes import ShardedCheckpointCallback

    compiling = {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = build(
        str(model_dir),
        str(data),
        str(output),
        steps=2,
        lora=lora,
        save_strategy="steps",
        save_steps=2,
        callbacks=[ShardedCheckpointCallback(export_dir=output / "export")],
        **(compiling if is_compiled else {}),
    )
    trainer.train()


@pytest.mark.parametrize(
    "lora",
    [
        LORA | {"modules_to_save": ["lm_head"]},
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param(LORA, marks=pytest.mark.slow),
    ],
)
def test_compiling_changes_no_export(lora, tiny_model, text_file, tmp_path):
    exports = []
    for name, is_compiled in (("plain", False), ("compiled", True)):
        arguments = (tiny_model("llama"), text_file, tmp_path / name, lora, is_compiled)
        run_ranks(_export, 2, *arguments, environment=fsdp_environment(FSDP2))
        [file] = (tmp_path / name / "export").glob("*.safetensors")
        exports.append(load_file(file))
        description = "adapter_config.json" if lora else "config.json"
        assert (tmp_path / name / "checkpoint-2" / description).is_file()
    assert exports[0]
    torch.testing.assert_close(exports[1], exports[0], rtol=1e-3, atol=1e-5)
