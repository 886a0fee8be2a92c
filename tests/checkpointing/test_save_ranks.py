"""Checkpoints: complete or absent, and a resumed run equals the uninterrupted one."""

import functools
import json
import operator
import os
import shutil
import signal

import pytest
import torch

from hf_fsdp_recipes.errors import CheckpointError
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build, losses_of

HYBRID = {"dp_replicate_size": 2, "dp_shard_size": 2}


def _train(model, data, output, resume, keywords, callback_keywords):
    """Train with the callback; return losses and a digest of the final parameters and optimizer state."""
    from hf_fsdp_recipes import ShardedCheckpointCallback, latest_checkpoint
    from hf_fsdp_recipes.checkpointing import resume as resuming

    callback = ShardedCheckpointCallback(**callback_keywords)
    defaults = {"save_strategy": "steps", "save_steps": 3, "steps": 8}
    trainer = build(str(model), str(data), str(output), callbacks=[callback], **(defaults | keywords))
    checkpoint = latest_checkpoint(output) if resume else None
    if checkpoint is not None:
        resuming.keep_global_batch(trainer.args, checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return losses_of(trainer), _digest(trainer)


def _digest(trainer):
    import hashlib

    sums = hashlib.sha256()
    for parameter in trainer.model.parameters():
        values = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        sums.update(values.detach().contiguous().numpy().tobytes())
    optimizer = trainer.optimizer.optimizer
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        # Under FSDP1 a rank may hold no part of a parameter; whether the optimizer has a state for it is irrelevant.
        state = optimizer.state.get(parameter, {}) if parameter.numel() else {}
        for key in sorted(state):
            value = state[key]
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            sums.update(torch.as_tensor(value).contiguous().numpy().tobytes())
    return sums.hexdigest()


def train(model, data, output, *, world_size=2, resume=False, environment=None, callback=None, **keywords):
    return run_ranks(
        _train, world_size, model, data, output, resume, keywords, callback or {},
        environment=environment or fsdp_environment(FSDP2),
    )  # fmt: skip


def drop_after(output, step):
    for path in output.glob("checkpoint-*"):
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)


@pytest.mark.parametrize(
    ("kind", "fsdp", "keywords"),
    [
        ("llama_tied", FSDP2, {}),
        ("llama", FSDP2, {"lora": LORA | {"lora_dropout": 0.2}}),
        ("llama", FSDP1, {}),
        pytest.param("llama", FSDP1, {"lora": LORA}, marks=pytest.mark.slow),
        # With three ranks, rank 2 holds no row of a LoRA adapter with r=4.
        pytest.param("llama", FSDP1, {"lora": LORA, "world_size": 3}, marks=pytest.mark.slow),
        pytest.param("llama", FSDP2, {"optim": "paged_adamw_32bit"}, marks=pytest.mark.slow),
        ("llama", FSDP2, {"optim": "adamw_8bit"}),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one(tiny_model, text_file, tmp_path, kind, fsdp, keywords):
    keywords = keywords | {"environment": fsdp_environment(fsdp), "steps": 4, "save_steps": 2}
    whole = train(tiny_model(kind), text_file, tmp_path, **keywords)
    drop_after(tmp_path, 2)
    resumed = train(tiny_model(kind), text_file, tmp_path, resume=True, **keywords)
    assert resumed == whole  # losses of all steps, parameters and optimizer state, on both ranks


def test_blocking_and_asynchronous_saves_hold_the_same(tiny_model, text_file, tmp_path):
    for name, asynchronous in (("a", True), ("b", False)):
        train(tiny_model("llama"), text_file, tmp_path / name, callback={"asynchronous": asynchronous}, steps=3)
    manifests = [json.loads((tmp_path / name / "checkpoint-3" / "manifest.json").read_text()) for name in "ab"]
    small = [file for file in manifests[0]["files"] if file.endswith((".distcp", "scheduler.pt"))]
    assert len(small) == 5
    for file in small:
        assert manifests[0]["files"][file] == manifests[1]["files"][file], file


def test_checkpoint_holds_exactly_its_files(run):
    checkpoint = run / "checkpoint-2"
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert names == {
        "manifest.json", "optimizer_0/.metadata", "optimizer_0/__0_0.distcp", "optimizer_0/__1_0.distcp",
        "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/__1_0.distcp",
        "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "train_params.yaml", "trainer_state.json",
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert not list(run.glob(".checkpoint-*"))


@pytest.mark.parametrize(
    ("fsdp", "lora"),
    [
        (FSDP1, LORA),
        pytest.param(FSDP2, None, marks=pytest.mark.slow),
        pytest.param(FSDP1, None, marks=pytest.mark.slow),
        pytest.param(FSDP2, LORA, marks=pytest.mark.slow),
    ],
)
def test_no_wrapper_names_in_any_key(tiny_model, text_file, tmp_path, fsdp, lora):
    from torch.distributed.checkpoint import FileSystemReader

    train(tiny_model("llama"), text_file, tmp_path, environment=fsdp_environment(fsdp), lora=lora, steps=3)
    metadata = FileSystemReader(tmp_path / "checkpoint-3" / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata
    assert metadata
    for part in ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"):
        assert not any(part in key for key in metadata)
    if lora:
        assert len(metadata) == 28
        assert all("lora_" in key for key in metadata)
        assert all(min(entry.size) >= 4 for entry in metadata.values())  # full shapes, not one rank's slice


def _rows(model, data, output, resume, keywords):
    """Train and return, for each optimizer step of this process, the texts that this rank saw."""
    from hf_fsdp_recipes import ShardedCheckpointCallback, latest_checkpoint

    callback = ShardedCheckpointCallback()
    trainer = build(
        str(model), str(data), str(output), callbacks=[callback], save_strategy="steps", save_steps=3, **keywords
    )
    seen, run_step = [], trainer.training_step

    def step(model, inputs, *rest, **named):
        seen.append(trainer.processing_class.batch_decode(inputs["input_ids"], skip_special_tokens=True))
        return run_step(model, inputs, *rest, **named)

    trainer.training_step = step
    trainer.train(resume_from_checkpoint=str(latest_checkpoint(output)) if resume else None)
    width = trainer.args.gradient_accumulation_steps
    steps = [functools.reduce(operator.iadd, seen[i : i + width], []) for i in range(0, len(seen), width)]
    return steps, losses_of(trainer)


def rows_by_step(model, data, output, world_size, resume=False, parallel=None, steps=6):
    keywords = {"gradient_accumulation_steps": 4 // world_size, "steps": steps}
    arguments = (model, data, output, resume, keywords)
    results = run_ranks(_rows, world_size, *arguments, environment=fsdp_environment(FSDP2, parallel))
    per_rank = [steps for steps, _ in results]
    return [
        sorted(functools.reduce(operator.iadd, (steps[number] for steps in per_rank), []))
        for number in range(len(per_rank[0]))
    ], results[0][1]


@pytest.mark.parametrize(
    ("before", "after", "parallel"),
    [
        (1, 2, None),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 4, None), (4, 1, None), (4, 4, HYBRID))),
    ],
)
def test_resume_on_another_number_of_ranks_sees_every_row_once(
    tiny_model, text_file, tmp_path, before, after, parallel
):
    model = tiny_model("llama")
    whole, losses = rows_by_step(model, text_file, tmp_path, before)
    drop_after(tmp_path, 3)
    resumed, resumed_losses = rows_by_step(model, text_file, tmp_path, after, resume=True, parallel=parallel)
    assert whole[3:] == resumed  # the same rows in every global batch
    seen = functools.reduce(operator.iadd, whole[:3] + resumed, [])
    assert len(set(seen)) == len(seen) == 24  # no row twice
    assert resumed_losses == pytest.approx(losses, rel=1e-4)


def test_eight_bit_states_are_not_resumed_on_another_number_of_ranks(tiny_model, text_file, tmp_path):
    train(tiny_model("llama"), text_file, tmp_path, steps=3, optim="adamw_8bit")
    errors = run_ranks(
        _train, 1, tiny_model("llama"), text_file, tmp_path, True, {"optim": "adamw_8bit"}, {},
        environment=fsdp_environment(FSDP2), expect_failure=True,
    )  # fmt: skip
    assert errors[0][0] == "CheckpointError"
    assert "states of 2 ranks, but this run has 1" in errors[0][1]


@pytest.mark.parametrize(
    ("rows_per_rank", "accumulation"), [(3, 4), (12, 1), (5, None)], ids=["more", "fewer", "impossible"]
)
def test_only_gradient_accumulation_changes_to_keep_the_global_batch(rows_per_rank, accumulation, tmp_path):
    from transformers import TrainingArguments

    from hf_fsdp_recipes import keep_global_batch

    facts = {"global_batch_size": 12, "world_size": 3, "arguments": {"optim": "adamw_torch"}}
    (tmp_path / "train_params.yaml").write_text(json.dumps(facts))
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=rows_per_rank, gradient_accumulation_steps=2, use_cpu=True
    )
    before = args.to_dict()
    keep_global_batch(args, None)
    assert args.to_dict() == before
    if accumulation is None:
        with pytest.raises(CheckpointError, match="12 rows per optimizer step, which is not a multiple of 5"):
            keep_global_batch(args, tmp_path)
    else:
        keep_global_batch(args, str(tmp_path))
        assert args.to_dict() == before | {"gradient_accumulation_steps": accumulation}


def _resume_with_other_batch(model, data, output):
    from hf_fsdp_recipes import latest_checkpoint
    from hf_fsdp_recipes.checkpointing import resume

    trainer = build(str(model), str(data), str(output), per_device_train_batch_size=3)
    resume.keep_global_batch(trainer.args, latest_checkpoint(output))


def test_resume_that_would_skip_rows_is_refused(tiny_model, text_file, tmp_path):
    train(tiny_model("llama"), text_file, tmp_path, steps=3)
    errors = run_ranks(
        _resume_with_other_batch, 2, tiny_model("llama"), text_file, tmp_path,
        environment=fsdp_environment(FSDP2), expect_failure=True,
    )  # fmt: skip
    assert errors[0][0] == "CheckpointError"
    assert "is not a multiple of" in errors[0][1]


def _resume_elsewhere(model, data, output, checkpoint):
    from hf_fsdp_recipes import ShardedCheckpointCallback

    keywords = {"per_device_train_batch_size": 3, "callbacks": [ShardedCheckpointCallback()]}
    build(str(model), str(data), str(output), **keywords).train(resume_from_checkpoint=str(checkpoint))


def test_resume_into_another_directory_that_would_skip_rows_is_refused(tiny_model, text_file, run, tmp_path):
    errors = run_ranks(
        _resume_elsewhere, 2, tiny_model("llama"), text_file, tmp_path, run / "checkpoint-2",
        environment=fsdp_environment(FSDP2), expect_failure=True,
    )  # fmt: skip
    assert errors[0] == errors[1]
    assert "was trained with 2 rows per optimizer step, but this run has 6" in errors[0][1]


def _signalled(model, data, output, number, at_step, only_rank):
    from transformers import TrainerCallback

    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.checkpointing.preemption import EXIT_PREEMPTED

    class Signal(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == at_step and args.process_index == only_rank:
                os.kill(os.getpid(), number)
                os.kill(os.getpid(), number)  # a second signal changes nothing

    trainer = build(
        str(model), str(data), str(output), save_strategy="steps", save_steps=100, steps=8,
        callbacks=[Signal(), ShardedCheckpointCallback()],
    )  # fmt: skip
    try:
        trainer.train()
    except SystemExit as error:
        return error.code == EXIT_PREEMPTED
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_signal_to_one_rank_ends_all_with_a_checkpoint(tiny_model, text_file, tmp_path, number):
    model = tiny_model("llama")
    results = run_ranks(_signalled, 2, model, text_file, tmp_path, number, 4, 1, environment=fsdp_environment(FSDP2))
    assert results == [True, True]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-5"]
    resumed = train(model, text_file, tmp_path, resume=True, save_steps=100)
    whole = train(model, text_file, tmp_path / "whole", save_steps=100)
    assert resumed == whole


def test_best_model_is_kept_and_loaded(tiny_model, text_file, tmp_path):
    results = run_ranks(_train_best, 2, tiny_model("llama"), text_file, tmp_path, environment=fsdp_environment(FSDP2))
    best, kept, best_metric, metric_now = results[0]
    assert best in kept
    assert len(kept) <= 2
    assert metric_now == pytest.approx(best_metric, rel=1e-5)  # the model loaded at the end is the best one


def _train_best(model, data, output):
    from pathlib import Path

    from hf_fsdp_recipes import ShardedCheckpointCallback

    trainer = build(
        str(model), str(data), str(output), save_strategy="best", eval_strategy="steps", eval_steps=2, steps=8,
        metric_for_best_model="loss", learning_rate=0.3,  # too high: the last model is not the best
 load_best_model_at_end=True, save_total_limit=2,
        callbacks=[ShardedCheckpointCallback()],
    )  # fmt: skip
    trainer.train()
    kept = sorted(path.name for path in Path(output).glob("checkpoint-*"))
    best = Path(trainer.state.best_model_checkpoint).name
    return best, kept, trainer.state.best_metric, trainer.evaluate()["eval_loss"]


@pytest.mark.slow
def test_save_by_epochs(tiny_model, text_file, tmp_path):
    train(
        tiny_model("llama"),
        text_file,
        tmp_path,
        save_strategy="epoch",
        steps=-1,
        num_train_epochs=2,
        per_device_train_batch_size=6,
    )
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-6"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_full_disk_loses_a_checkpoint_but_not_the_run(tiny_model, text_file, tmp_path):
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1300k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        results = run_ranks(
            _train_on_small_disk, 2, tiny_model("llama"), text_file, disk, environment=fsdp_environment(FSDP2)
        )
        for losses, message in results:
            assert len(losses) == 5  # training went on to its last step
            assert "No space left" in message
        from hf_fsdp_recipes import latest_checkpoint

        assert latest_checkpoint(disk).name == "checkpoint-1"  # the earlier one is untouched
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _train_on_small_disk(model, data, output):
    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.errors import CheckpointError

    trainer = build(
        str(model), str(data), str(output), save_strategy="steps", save_steps=1, steps=5,
        callbacks=[ShardedCheckpointCallback()],
    )  # fmt: skip
    try:
        trainer.train()
    except CheckpointError as error:  # the run's last save failed too, which is an error
        return losses_of(trainer), str(error)
    return losses_of(trainer), ""


def _stock_trainer(model_dir, data, output):
    """A user's own Trainer script with the two lines of the README."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

    from hf_fsdp_recipes import ShardedCheckpointCallback, load_model

    callback = ShardedCheckpointCallback(export_dir=output / "export")
    args = TrainingArguments(
        output_dir=str(output), max_steps=4, save_steps=2, per_device_train_batch_size=1, report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rows = load_dataset("json", data_files=str(data), cache_dir=str(output / f"cache-{os.getpid()}"))["train"]
    rows = rows.map(lambda row: tokenizer(row["text"]), remove_columns=["text"])
    trainer = Trainer(
        model=load_model(model_dir, dtype="float32"),
        args=args,
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.train()


def test_stock_trainer_with_the_callback_saves_and_exports(tiny_model, text_file, tmp_path):
    from transformers import AutoModelForCausalLM

    run_ranks(_stock_trainer, 2, tiny_model("gpt2"), text_file, tmp_path, environment=fsdp_environment(FSDP2))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a read-only tmpfs needs root")
def test_directory_that_cannot_be_written_is_one_error_before_the_first_step(tiny_model, text_file, tmp_path):
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        errors = run_ranks(
            _train, 2, tiny_model("llama"), text_file, disk, False, {}, {},
            environment=fsdp_environment(FSDP2), expect_failure=True,
        )  # fmt: skip
        assert errors[0] == errors[1]
        assert errors[0][0] == "CheckpointError"
        assert "Read-only file system" in errors[0][1]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _save_twice(output):
    """Save two models of different dtypes three times each; each second save fails; return the stored dtypes."""
    import torch
    from accelerate import PartialState
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hf_fsdp_recipes.checkpointing import dcp_writer
    from hf_fsdp_recipes.checkpointing.dcp_metadata import read_dcp_metadata
    from hf_fsdp_recipes.checkpointing.layout import MODEL_DIRECTORY
    from hf_fsdp_recipes.checkpointing.writer import Snapshot, Writer
    from hf_fsdp_recipes.errors import CheckpointError

    PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        model = torch.nn.Linear(4, 4, bias=False, dtype=dtype)
        fully_shard(model, mesh=mesh)
        writer = Writer(f"{output}/{number}")
        for step in (1, 2, 3):
            upstream, fails = dcp_writer.DirectWriter.write_data, step == 2
            if fails:
                dcp_writer.DirectWriter.write_data = None
            writer.save(Snapshot(step, {"model": model.state_dict(), "optimizer": {"step": step}}, {}, {}))
            try:
                path = writer.wait()
            except CheckpointError:
                assert fails
            finally:
                dcp_writer.DirectWriter.write_data = upstream
            stored = read_dcp_metadata(path / MODEL_DIRECTORY).state_dict_metadata["model.weight"].properties.dtype
            found.append((path.name, str(stored)))
    return found


def test_plans_of_saves_are_kept_only_while_they_fit(tmp_path):
    names = ["checkpoint-1", "checkpoint-1", "checkpoint-3"]
    expected = [(name, dtype) for dtype in ("torch.float32", "torch.bfloat16") for name in names]
    assert run_ranks(_save_twice, 2, str(tmp_path)) == [expected] * 2
