"""A user's own Trainer script with the callback: what cannot work is refused on every rank, before training."""

import re
import shutil

import pytest
from safetensors.torch import load_file

from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.lock_holder import locked_by_another, wait_briefly
from tests.ranks.training import build, losses_of


def _train(model, data, output, export_dir=None):
    from transformers import TrainerCallback

    from hf_fsdp_recipes import ShardedCheckpointCallback

    class Trained(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            (output.parent / "trained").touch()

    wait_briefly()
    callbacks = [Trained(), ShardedCheckpointCallback(export_dir=export_dir)]
    build(str(model), str(data), str(output), callbacks=callbacks, save_strategy="steps", save_steps=2).train()


@pytest.fixture
def refused(tiny_model, text_file, tmp_path):
    """Return a function that runs the script, which must be refused, and returns the error."""

    def run(export_dir=None, parallel=None):
        errors = run_ranks(
            _train, 2, tiny_model("llama"), text_file, tmp_path / "run", export_dir,
            environment=fsdp_environment(FSDP2, parallel), expect_failure=True,
        )  # fmt: skip
        assert errors[0] == errors[1]
        assert not (tmp_path / "trained").exists()
        return errors[0]

    return run


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tp_size": 2}, "tensor parallelism|tp_size"),
        ({"cp_size": 2}, "context parallelism|cp_size"),
        pytest.param({"sp_size": 2}, "sequence parallelism|sp_size", marks=pytest.mark.slow),
    ],
)
def test_other_parallelism_is_refused(refused, sizes, says):
    kind, error = refused(parallel={"dp_shard_size": 1} | sizes)
    assert kind == "TemplateError" and re.search(says, error, re.IGNORECASE), error


def test_export_dir_with_other_files_is_refused(refused, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("keep me")
    kind, error = refused(foreign)
    assert kind == "ExportError" and str(foreign) in error, error
    assert [path.name for path in foreign.iterdir()] == ["notes.txt"]


def test_export_dir_without_room_is_refused(refused, mount, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount(disk, 64 << 10)
    kind, error = refused(disk / "export")
    assert kind == "ExportError" and "needs 144,512 bytes" in error, error
    assert list(disk.iterdir()) == []


def test_directory_of_a_living_run_is_refused(refused, tmp_path):
    with locked_by_another(tmp_path / "run", tmp_path):
        kind, error = refused()
    assert kind == "CheckpointError"
    assert f"{tmp_path}/run is in use by another run (process" in error


def _train_with_mirror(model, data, output, mirror, steps):
    """Train from the newest checkpoint, local or mirrored; return its path, the losses and the export's dtypes."""
    from hf_fsdp_recipes import ShardedCheckpointCallback, fetch_checkpoint, latest_checkpoint

    callback = ShardedCheckpointCallback(
        export_dir=output / "export", export_dtype="bfloat16", checkpoint_mirror=str(mirror)
    )
    settings = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    trainer = build(str(model), str(data), str(output), callbacks=[callback], steps=steps, **settings)
    newest = fetch_checkpoint(str(mirror), output, latest_checkpoint(output))
    trainer.train(resume_from_checkpoint=newest)
    weights = load_file(output / "export" / "model.safetensors").values()
    return newest, losses_of(trainer), {str(weight.dtype) for weight in weights}


def test_mirror_resumes_on_an_empty_disk_and_the_export_has_the_dtype_that_was_asked_for(
    tiny_model, text_file, tmp_path
):
    output, mirror, checkpoint = tmp_path / "run", tmp_path / "mirror", tmp_path / "run" / "checkpoint-4"

    def train(steps, *run):
        arguments = tiny_model("llama"), text_file, *(run or (output, mirror)), steps
        return run_ranks(_train_with_mirror, 2, *arguments, environment=fsdp_environment(FSDP2))[0]

    _, whole, _ = train(6, tmp_path / "whole", tmp_path / "other-mirror")
    assert train(4) == (None, whole[:4], {"torch.bfloat16"})
    shutil.rmtree(output)
    assert train(6) == (checkpoint, whole, {"torch.bfloat16"})
    shutil.rmtree(mirror / "checkpoint-6")
    assert train(6)[0] == output / "checkpoint-6"


def _train_on_any_ranks(model, data, output, steps):
    """Train as docs/trainers.md shows for another number of ranks; return the accumulation steps and the losses."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from hf_fsdp_recipes import ShardedCheckpointCallback, keep_global_batch, latest_checkpoint, load_model

    args = SFTConfig(
        str(output), max_steps=steps, per_device_train_batch_size=1, gradient_accumulation_steps=4, save_steps=2,
        learning_rate=1e-2, lr_scheduler_type="constant", max_length=64, logging_steps=1, bf16=False, use_cpu=True,
        gradient_checkpointing=False, report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    loaded = load_model(str(model), dtype="float32")
    checkpoint = latest_checkpoint(output)
    keep_global_batch(args, checkpoint)
    trainer = SFTTrainer(
        model=loaded,
        args=args,
        train_dataset=load_dataset("json", data_files=str(data), split="train"),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[ShardedCheckpointCallback()],
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.args.gradient_accumulation_steps, losses_of(trainer)


def test_own_script_keeps_its_global_batch_on_another_number_of_ranks(tiny_model, text_file, tmp_path):
    def train(output, num_ranks, steps):
        variables = fsdp_environment(FSDP2) | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
        run = tiny_model("llama"), text_file, output, steps
        return run_ranks(_train_on_any_ranks, num_ranks, *run, environment=variables)[0]

    _, whole = train(tmp_path / "whole", 1, 4)
    assert train(tmp_path / "run", 1, 2) == (4, whole[:2])
    accumulation, losses = train(tmp_path / "run", 2, 4)
    assert accumulation == 2
    assert losses == pytest.approx(whole, rel=1e-4)


def test_export_dtype_that_is_no_dtype_is_refused():
    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.errors import ExportError

    with pytest.raises(ExportError, match="dtype is 'int8'"):
        ShardedCheckpointCallback(export_dtype="int8")


def _train_plain(model, output, quantization):
    """Train an adapter with transformers' Trainer, from the newest checkpoint; return the losses."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    from hf_fsdp_recipes import ShardedCheckpointCallback, latest_checkpoint, load_model
    from tests.ranks.training import LORA, quantized

    loaded = load_model(str(model), dtype="float32", **quantized(quantization))
    rows = [{"input_ids": torch.arange(3 + n, 19 + n), "labels": torch.arange(3 + n, 19 + n)} for n in range(32)]
    arguments = TrainingArguments(
        str(output), max_steps=4, save_steps=2, logging_steps=1, per_device_train_batch_size=2, learning_rate=1e-2,
        report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    callbacks = [ShardedCheckpointCallback(export_dir=output / "export")]
    model = get_peft_model(loaded, LoraConfig(**LORA))
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=latest_checkpoint(output))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "fsdp"),
    [(None, FSDP2), ({"bnb_4bit_quant_type": "nf4"}, FSDP2), (None, FSDP1)],
    ids=["lora", "qlora", "lora, fsdp1"],
)
def test_adapter_with_a_plain_trainer_resumes_and_exports(quantization, fsdp, tiny_model, tmp_path):
    model, environment = tiny_model("llama_wide"), fsdp_environment(fsdp)
    whole = run_ranks(_train_plain, 2, model, tmp_path / "run", quantization, environment=environment)[0]
    shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed = run_ranks(_train_plain, 2, model, tmp_path / "resumed", quantization, environment=environment)[0]
    assert resumed == whole and len(whole) == 4
    first, second = (load_file(tmp_path / run / "export" / "adapter_model.safetensors") for run in ("run", "resumed"))
    assert first.keys() == second.keys()
    assert all(tensor.equal(second[name]) for name, tensor in first.items())
