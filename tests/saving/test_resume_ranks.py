"""Checkpoints hold what stock Trainer would save, and a resumed run equals the uninterrupted one.

They are equal bit for bit.
"""

import functools
import pickle
import shutil
from types import SimpleNamespace

import pytest
import torch

from hf_fsdp_recipes import keep_global_batch
from hf_fsdp_recipes.errors import CheckpointError
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.saving.runs import describe, on, train

# These files contain the output directory.
WITH_PATHS = ("trainer_state.json", "training_args.bin", ".metadata")


def _train_both(output, options, checkpoint=False):
    """Train, or resume from our checkpoint, without and with our callback in the same process."""
    torch.serialization.set_crc32_options(False)  # our writer leaves checksums to the manifest
    return train(output / "stock", stock=True, resume=checkpoint, **options), train(
        output / "ours", **options
    )


def _contents(checkpoint):
    """Return {name: bytes} of a checkpoint's files, but for `.metadata` the tensors in it."""
    files = {
        str(path.relative_to(checkpoint)): path for path in checkpoint.rglob("*") if path.is_file()
    }
    contents = {
        name: path.name if path.name in WITH_PATHS else path.read_bytes()
        for name, path in files.items()
    }
    listed = {name: path.read_bytes() for name, path in files.items() if path.name == ".metadata"}
    return contents | {
        name: pickle.loads(content).state_dict_metadata for name, content in listed.items()
    }


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {}),
        (2, {"sft": True, "lora": True}),
        pytest.param(1, {"gradient_accumulation_steps": 3}, marks=pytest.mark.slow),
        pytest.param(
            2, {"lora": True, "callback": {"asynchronous": False}}, marks=pytest.mark.slow
        ),
        pytest.param(4, {"sft": True}, marks=pytest.mark.slow),
        pytest.param(3, {"lora": True}, marks=pytest.mark.slow),  # uneven shards
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one_and_stock(run, tmp_path, world_size, options):
    both = run(tmp_path, world_size, function=_train_both, options=options)
    uninterrupted = both[0][0]
    assert all(result == uninterrupted for results in both for result in results)
    assert len(uninterrupted["losses"]) == 4
    ours, stock = (_contents(tmp_path / name / "checkpoint-2") for name in ("ours", "stock"))
    assert ours.items() >= stock.items() and "manifest.json" in ours
    for name in ("ours", "stock"):
        shutil.rmtree(tmp_path / name / "checkpoint-4")
    checkpoint = str(tmp_path / "ours" / "checkpoint-2")
    for results in run(
        tmp_path, world_size, function=_train_both, options=options, checkpoint=checkpoint
    ):
        assert [result.pop("resumed") for result in results] == ["checkpoint-2", "checkpoint-2"]
        assert all(result | {"resumed": None} == uninterrupted for result in results)


def _describe_step_2(trainer):
    def note(state, control):
        if state.global_step == 2:
            trainer.notes.append({key: describe(trainer)[key] for key in ("weights", "optimizer")})

    on(trainer, "on_train_begin", note)
    on(trainer, "on_step_end", note)


@pytest.mark.parametrize(
    ("world_size", "per_device"), [(1, 2), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_another_number_of_ranks_continues_with_the_same_state_and_global_batch(
    run, tmp_path, world_size, per_device
):
    options = {"prepare": _describe_step_2, "dropout": 0.0}
    whole = run(tmp_path, gradient_accumulation_steps=2, **options)[0]
    shutil.rmtree(tmp_path / "checkpoint-4")
    # keep_global_batch sets the accumulation
    resumed = run(tmp_path, world_size, per_device_train_batch_size=per_device, **options)[0]
    assert resumed["resumed"] == "checkpoint-2"
    assert resumed["notes"][0] == whole["notes"][0]
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-5)  # sums in another order


def test_a_batch_that_the_ranks_cannot_train_is_an_error(tmp_path):
    (tmp_path / "manifest.json").write_text('{"files": {}, "global_batch_size": 8}')
    with pytest.raises(
        CheckpointError, match="global batch of 8 rows, which 1 ranks with 3 rows each cannot train"
    ):
        keep_global_batch(SimpleNamespace(train_batch_size=3, world_size=1), tmp_path)


def _accumulation_with_two_ranks_a_row(checkpoint, is_in_arguments):
    """Return the accumulation with which each batch is as large as the checkpoint's."""
    from accelerate.parallelism_config import ParallelismConfig
    from transformers import TrainingArguments

    arguments = {"per_device_train_batch_size": 2, "use_cpu": True}
    if is_in_arguments:
        arguments["parallelism_config"] = ParallelismConfig(cp_size=2)
    args = TrainingArguments(str(checkpoint), **arguments)
    keep_global_batch(args, checkpoint)
    return args.gradient_accumulation_steps


@pytest.mark.parametrize("is_in_arguments", [False, True])
def test_ranks_that_share_the_rows_of_a_context_count_as_one(tmp_path, is_in_arguments):
    (tmp_path / "manifest.json").write_text('{"files": {}, "global_batch_size": 4}')
    parallel = None if is_in_arguments else {"cp_size": 2, "dp_shard_size": 1}
    environment = fsdp_environment(FSDP2, parallel)
    accumulation = run_ranks(
        _accumulation_with_two_ranks_a_row, 2, tmp_path, is_in_arguments, environment=environment
    )
    assert accumulation == [2, 2]


def _evaluate_each_epoch(trainer, ends_in):
    """Let evaluations draw random numbers, and one of them end the run."""

    def draw(state, control):
        torch.rand(1)
        if state.global_step == ends_in:
            raise ValueError("out of memory")

    on(trainer, "on_prediction_step", draw)
    on(trainer, "on_evaluate", lambda state, _: trainer.notes.append(state.global_step))


@pytest.mark.parametrize("world", ["fsdp", "one"])
@pytest.mark.parametrize("ends_in", [4, 8])
def test_the_evaluation_after_an_epochs_last_save_is_made_up_for(run, tmp_path, world, ends_in):
    options = {"world": world, "eval_strategy": "epoch", "save_steps": 4, "max_steps": 8}
    options["per_device_train_batch_size"] = {"fsdp": 6, "one": 12}[world]  # four steps an epoch
    evaluate = functools.partial(_evaluate_each_epoch, ends_in=0)
    whole = run(tmp_path / "whole", prepare=evaluate, **options)
    ended = functools.partial(_evaluate_each_epoch, ends_in=ends_in)
    run(tmp_path / "run", prepare=ended, expect_failure=True, **options)
    for result, expected in zip(
        run(tmp_path / "run", prepare=evaluate, **options), whole, strict=True
    ):
        assert result["resumed"] == f"checkpoint-{ends_in}"
        for key in ("weights", "losses", "optimizer"):
            assert result[key] == expected[key]
        assert result["notes"] == list(range(ends_in, 9, 4)) and expected["notes"] == [4, 8]


def test_a_checkpoint_without_optimizer_state_is_a_warning(run, tmp_path):
    options = {"world": "one", "save_only_model": True}
    run(tmp_path, **options)
    (result,) = run(tmp_path, **options)
    assert any("holds only the model" in warning for warning in result["warnings"])
