"""Metrics that stay on the device until they are logged equal SFTTrainer's metrics, digit for digit."""

import pytest

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import build

KEYS = (
    "loss",
    "entropy",
    "mean_token_accuracy",
    "num_tokens",
    "aux_loss",
    "eval_loss",
    "eval_entropy",
    "eval_num_tokens",
)


def logged(model, data, output, is_stock, settings):
    """Train four steps and evaluate; return what was logged."""
    from trl import SFTTrainer

    from hf_fsdp_recipes.training.device_metrics import DeviceMetricsTrainer

    trainer = build(str(model), str(data), str(output), steps=4, **settings)
    trainer.__class__ = SFTTrainer if is_stock else DeviceMetricsTrainer
    trainer.train()
    return [{key: entry[key] for key in KEYS if key in entry} for entry in trainer.state.log_history]


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_metrics_equal_those_of_sfttrainer(kind, tiny_model, text_file, tmp_path):
    settings = {"logging_steps": 2, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 4}
    stock, ours = (
        run_ranks(
            logged, 2, tiny_model(kind), text_file, tmp_path / str(is_stock), is_stock, settings,
            environment=fsdp_environment(FSDP2),
        )
        for is_stock in (True, False)
    )  # fmt: skip
    assert ours == stock
    assert stock[0][0]["num_tokens"] > 0
    assert any("eval_entropy" in entry for entry in stock[0])


def test_rows_without_labels_count_as_zero():
    import torch

    from hf_fsdp_recipes.training.device_metrics import _Pending

    assert (_Pending(torch.tensor(0.0)) / _Pending(torch.tensor(0))).item().value == 0.0


def test_what_is_not_a_number_stays_so():
    import torch

    from hf_fsdp_recipes.training.device_metrics import _Pending

    assert (_Pending(torch.tensor(float("nan"))) / _Pending(torch.tensor(3))).value.isnan()
    assert (_Pending(torch.tensor(float("inf"))) / _Pending(torch.tensor(3))).value.isinf()
