"""TrainingArguments may be created before the model is loaded, as in most scripts, even without the callback."""

import pytest

from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import losses_of, train_losses


def _train_arguments_first(model_dir, data, output):
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        output_dir=str(output), max_steps=5, per_device_train_batch_size=1, logging_steps=1, save_strategy="no",
        learning_rate=1e-2, max_length=64, bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    from hf_fsdp_recipes import load_model
    from hf_fsdp_recipes.training.sharded_optimizer import sharded_optimizer

    model = load_model(str(model_dir), dtype="float32")
    rows = load_dataset("json", data_files=str(data), cache_dir=str(output / f"cache-{args.process_index}"))["train"]
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(model_dir),
        optimizer_cls_and_kwargs=sharded_optimizer(args),
    )  # fmt: skip
    trainer.train()
    return losses_of(trainer)


@pytest.mark.parametrize("fsdp", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)], ids=["fsdp2", "fsdp1"])
def test_arguments_before_the_model_change_nothing(tiny_model, text_file, tmp_path, fsdp):
    model, environment = tiny_model("llama"), fsdp_environment(fsdp)
    found = run_ranks(_train_arguments_first, 2, model, text_file, tmp_path, environment=environment)
    expected = run_ranks(train_losses, 2, str(model), str(text_file), str(tmp_path), environment=environment)
    assert found == expected
