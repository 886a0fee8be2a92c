"""A save that cannot copy the state falls back or fails; it never hangs."""

import threading

import pytest

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import build


def train_with_failing_copies(model, data, output, error_name, fails_again):
    """Train three steps and save at the second; copying the state fails, and with `fails_again` waiting for copies too."""
    import torch

    from hf_fsdp_recipes import ShardedCheckpointCallback, distributed
    from hf_fsdp_recipes.checkpointing import staging

    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "checkpoint-stager" or (thread.name == "checkpoint-writer" and distributed.rank() == 1):
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse if error_name == "threads" else start
    error = {"memory": MemoryError("no memory"), "device": torch.AcceleratorError("the device failed")}

    def fail(*arguments):
        raise error

    if error_name in error:
        error = error[error_name]
        staging.HostStaging.copy = fail
    if fails_again:
        staging.CopyStream.synchronize = fail
    settings = {"save_strategy": "steps", "save_steps": 2, "steps": 3}
    trainer = build(str(model), str(data), str(output), callbacks=[ShardedCheckpointCallback()], **settings)
    trainer.train()
    return sorted(path.name for path in output.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("error", "fails_again", "expected"),
    [
        ("memory", False, ["checkpoint-2", "checkpoint-3"]),
        ("threads", False, ["checkpoint-2", "checkpoint-3"]),
        ("device", True, []),
    ],
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


def train_in_own_directory(model, data, output):
    """Train two steps; the output directory is not shared by the ranks."""
    from hf_fsdp_recipes import ShardedCheckpointCallback, distributed

    output = output / f"node-{distributed.rank()}"
    trainer = build(
        str(model), str(data), str(output), callbacks=[ShardedCheckpointCallback()], save_strategy="steps", save_steps=1,
        steps=2,
    )  # fmt: skip
    trainer.train()


def test_directory_that_a_rank_does_not_see_is_named(tiny_model, text_file, tmp_path):
    errors = run_ranks(
        train_in_own_directory, 2, tiny_model("llama"), text_file, tmp_path,
        environment=fsdp_environment(FSDP2), expect_failure=True,
    )  # fmt: skip
    assert errors[0] == errors[1]
    assert errors[0][0] == "SaveError"
    assert (
        ".checkpoint-2.incomplete is missing on rank 1. Mount the same output_dir on every node. Earlier"
        in errors[0][1]
    )
    assert not list(tmp_path.glob("node-*/.checkpoint-*"))
