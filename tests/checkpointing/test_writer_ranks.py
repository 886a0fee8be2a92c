"""A save that cannot copy the state falls back or fails; it never hangs."""

import pytest

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import build


def train_with_failing_copies(model, data, output, error_name, fails_again):
    """Train three steps and save at the second; copying the state fails, and with `fails_again` waiting for copies too."""
    import torch

    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.checkpointing import staging

    error = {"memory": MemoryError("no memory"), "device": torch.AcceleratorError("the device failed")}[error_name]

    def fail(*arguments):
        raise error

    staging.HostStaging.copy = fail
    if fails_again:
        staging.CopyStream.synchronize = fail
    settings = {"save_strategy": "steps", "save_steps": 2, "steps": 3}
    trainer = build(str(model), str(data), str(output), callbacks=[ShardedCheckpointCallback()], **settings)
    trainer.train()
    return sorted(path.name for path in output.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("error", "fails_again", "expected"), [("memory", False, ["checkpoint-2", "checkpoint-3"]), ("device", True, [])]
)
def test_failing_copy_does_not_hang(tiny_model, text_file, tmp_path, error, fails_again, expected):
    found = run_ranks(
        train_with_failing_copies, 2, tiny_model("llama"), text_file, tmp_path, error, fails_again,
        environment=fsdp_environment(FSDP2), expect_failure=fails_again,
    )  # fmt: skip
    if fails_again:
        assert {name for name, _ in found} == {"SaveError"}
        assert "the device failed" in found[0][1]
    else:
        assert found == [expected, expected]
