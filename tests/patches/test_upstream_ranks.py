"""Upstream as it is: the reproductions of docs/upstream.md fail without this package.

And if upstream moves on, nothing trains with weights that were not loaded.
"""

import os
import runpy
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from tests.ranks.harness import FSDP2, fsdp_environment, printed_by, run_ranks
from tests.ranks.training import build

REPRODUCTIONS = Path(__file__).parent / "reproductions"
HAS_FIX = Version(version("torch")) >= Version("2.15")
HAS_UNIT_FOR_HEAD = Version(version("accelerate")) >= Version("1.14")
BY_SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000}
LLAMA_LAYERS = {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
WITHOUT_LAYERS = {"fsdp_auto_wrap_policy": "NO_WRAP"}
WITH_FSDP = (
    "fill_shards",
    "wrap_by_size",
    "head_gradient",
    "label_smoothing",
    "best_model",
    "unused_parameter",
    "unused_expert",
)
ON_ONE_RANK = (
    "save_checkpoint",
    "best_model",
    "unused_parameter",
    "frozen_parameter",
    "fused_loss",
)


def _reproduce(name):
    """Run a reproduction. Those that need FSDP get it on CPU ranks, and no more of this package."""
    from hf_fsdp_recipes import patches

    if name in WITH_FSDP:
        patches.enable_cpu_ranks()
    runpy.run_path(str(REPRODUCTIONS / f"{name}.py"))


@pytest.mark.parametrize(
    ("name", "environment", "error"),
    [
        ("fill_shards", fsdp_environment(FSDP2), "parameters have no values"),
        ("wrap_by_size", fsdp_environment(FSDP2 | BY_SIZE), "forward"),
        ("save_checkpoint", {}, "trainer_state.json"),
        ("cpu_ranks", fsdp_environment(FSDP2), "trains as DistributedType.MULTI_CPU"),
        pytest.param(
            "accumulate",
            {},
            "_unsharded_param",
            marks=pytest.mark.skipif(HAS_FIX, reason="torch 2.15 fixed it"),
        ),
        pytest.param(
            "head_gradient",
            fsdp_environment(FSDP2),
            "the head's change is wrong by 100%",
            marks=pytest.mark.skipif(
                not HAS_UNIT_FOR_HEAD,
                reason="accelerate 1.13 has no unit for the head",
            ),
        ),
        ("label_smoothing", fsdp_environment(FSDP2), "instead of 28.48"),
        ("best_model", fsdp_environment(FSDP2), "checkpoint-1 was loaded"),
        (
            "unused_parameter",
            fsdp_environment(FSDP2 | LLAMA_LAYERS),
            "Missing key in checkpoint state_dict: optimizer.state.model.vision_tower",
        ),
        (
            "unused_expert",
            fsdp_environment(FSDP2 | WITHOUT_LAYERS),
            "expert 0 changes by [-1.5, -1.5, 0.0, 0.0], not -0.5",
        ),
        ("frozen_parameter", {}, "embed_positions.weight"),
        pytest.param(
            "fused_loss",
            {},
            "SFTTrainer computes a loss of 3.50",
            marks=pytest.mark.skipif(
                Version(version("trl")) < Version("1.16"),
                reason="older versions of TRL call the model",
            ),
        ),
    ],
)
def test_the_reason_for_a_patch_or_a_workaround_still_exists(name, environment, error):
    num_ranks = 1 if name in ON_ONE_RANK else 2
    errors = run_ranks(_reproduce, num_ranks, name, environment=environment, expect_failure=True)
    assert all(error in text for _, text in errors)


def _train_past_the_patch(model, data, output):
    trainer = build(str(model), str(data), str(output))
    from accelerate import accelerator

    from hf_fsdp_recipes.upstream.patches import MARK

    accelerator.fsdp2_prepare_model = getattr(accelerator.fsdp2_prepare_model, MARK)
    trainer.train()


def test_an_accelerate_that_shards_with_another_function_trains_nothing(
    tiny_model, text_file, tmp_path
):
    arguments = (_train_past_the_patch, 2, tiny_model(), text_file, tmp_path)
    environment = fsdp_environment(FSDP2)
    errors = run_ranks(*arguments, environment=environment, expect_failure=True)
    # This package's own error or, from torch 2.13, FSDP's about parameters without memory.
    for _, text in errors:
        assert "not loaded yet" in text or "non-contiguous parameters" in text


def _prepare_in_order(order, model, output):
    """Create a run's parts in an order, as the launcher of CPU ranks starts it.

    Return how the model is trained.
    """
    # `accelerate launch` sets it for configs without FSDP only.
    os.environ.pop("ACCELERATE_USE_CPU", None)
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    from hf_fsdp_recipes import load_model

    for part in order.split():
        if part == "accelerator":
            Accelerator()
        elif part == "arguments":
            args = TrainingArguments(output_dir=str(output), report_to="none")
        else:
            loaded = load_model(str(model))
    trainer = Trainer(loaded, args)
    return str(trainer.accelerator.distributed_type), args.world_size


@pytest.mark.parametrize("order", ["arguments model", "model arguments"])
def test_cpu_ranks_train_with_fsdp_in_either_order(order, tiny_model, tmp_path):
    found = run_ranks(
        _prepare_in_order, 2, order, tiny_model(), tmp_path, environment=fsdp_environment(FSDP2)
    )
    assert found == [("DistributedType.FSDP", 2)] * 2


def test_an_accelerator_that_came_too_early_is_one_error(tiny_model, tmp_path):
    arguments = ("accelerator model arguments", tiny_model(), tmp_path)
    errors = run_ranks(
        _prepare_in_order, 2, *arguments, environment=fsdp_environment(FSDP2), expect_failure=True
    )
    assert all("Accelerator was created before FSDP" in text for _, text in errors)


def _enable_cpu_ranks_twice():
    from hf_fsdp_recipes.upstream import patches

    os.environ.pop("ACCELERATE_USE_CPU", None)  # as with a template for GPUs
    patches.enable_cpu_ranks()
    patches.enable_cpu_ranks()


def test_a_template_for_gpus_without_one_is_announced_once_by_rank_0():
    printed = run_ranks(printed_by, 2, _enable_cpu_ranks_twice, environment=fsdp_environment(FSDP2))
    assert printed == ["note: no accelerator was found, so FSDP trains on CPU ranks\n", ""]
