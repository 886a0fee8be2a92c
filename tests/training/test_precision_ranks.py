"""In bf16 runs, gradients are summed in float32, the loss stays in float32, and buffers are not rounded."""

from unittest import mock

import pytest

from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import build


def observe_dtypes(model, data, output, reduce_dtype):
    """Train two steps; return the dtypes of loss, reduced gradients, buffers, and inputs of the forward pass."""
    import torch.distributed as dist

    from hf_fsdp_recipes.training.dtypes import set_reduction_dtype

    found: dict[str, set] = {"loss": set(), "reduced": set(), "buffer": set(), "input": set()}
    trainer = build(str(model), str(data), str(output), steps=2, bf16=True)
    if reduce_dtype is not None:
        set_reduction_dtype(trainer.accelerator.state.fsdp_plugin, reduce_dtype)
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    reduce_scatter, compute_loss = getattr(dist, name), trainer.compute_loss

    def record_reduced(*args, **kwargs):
        found["reduced"].add((kwargs["input"] if "input" in kwargs else args[1]).dtype)
        return reduce_scatter(*args, **kwargs)

    def record_loss(model, *args, **kwargs):
        loss = compute_loss(model, *args, **kwargs)
        found["loss"].add((loss[0] if isinstance(loss, tuple) else loss).dtype)
        found["buffer"] |= {buffer.dtype for name, buffer in model.named_buffers() if "inv_freq" in name}
        return loss

    def record_input(module, arguments):
        found["input"].add(arguments[0].dtype)

    for module_name, module in trainer.model.named_modules():
        if module_name.endswith("q_proj"):
            module.register_forward_pre_hook(record_input)
    trainer.compute_loss = record_loss
    with mock.patch.object(dist, name, record_reduced):
        trainer.train()
    return {key: sorted(map(str, value)) for key, value in found.items()}


@pytest.mark.parametrize("fsdp", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)], ids=["fsdp2", "fsdp1"])
def test_bf16_runs_add_gradients_in_float32(fsdp, tiny_model, text_file, tmp_path):
    environment = fsdp_environment(fsdp, precision="bf16")
    model = tiny_model("llama")
    for found in run_ranks(observe_dtypes, 2, model, text_file, tmp_path, "float32", environment=environment):
        assert found["input"] == ["torch.bfloat16"]
        assert found["reduced"] == found["loss"] == found["buffer"] == ["torch.float32"]


def test_bfloat16_reduction_is_a_choice(tiny_model, text_file, tmp_path):
    environment = fsdp_environment(FSDP2, precision="bf16")
    for found in run_ranks(
        observe_dtypes, 2, tiny_model("llama"), text_file, tmp_path, "bfloat16", environment=environment
    ):
        assert (found["reduced"], found["loss"]) == (["torch.bfloat16"], ["torch.float32"])


@pytest.mark.slow
def test_accelerates_own_policy_adds_in_bfloat16(tiny_model, text_file, tmp_path):
    environment = fsdp_environment(FSDP2, precision="bf16")
    found = run_ranks(observe_dtypes, 2, tiny_model("llama"), text_file, tmp_path, None, environment=environment)[0]
    assert found["reduced"] == ["torch.bfloat16"]
