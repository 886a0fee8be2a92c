"""On CPU ranks, a run trains on all ranks or fails with one sentence before training, in whatever order it is built."""

import os

import pytest

from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import losses_of

ORDERS = ["arguments model trainer", "model arguments trainer", "callback arguments model trainer"]
LATE = ["arguments trainer callback", "accelerator model trainer"]


def _train_in_order(order, model_dir, data_file, output_dir):
    """Build a run in the given order, configured by the launcher's environment alone; return its losses."""
    os.environ.pop("ACCELERATE_USE_CPU", None)  # accelerate launch does not set it for FSDP configs
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    from hf_fsdp_recipes import ShardedCheckpointCallback, load_model

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    lines = [f"The big fox runs over the fence and then it runs again, number {number}." for number in range(40)]
    ids = [tokenizer(line)["input_ids"][:16] for line in lines]
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
    built = {}
    for step in order.split():
        if step == "accelerator":
            Accelerator()
        elif step == "callback":
            built["callback"] = ShardedCheckpointCallback(signals=False)
        elif step == "model":
            built["model"] = load_model(model_dir, dtype="float32")
        elif step == "arguments":
            built["arguments"] = TrainingArguments(
                output_dir=output_dir, max_steps=3, per_device_train_batch_size=1, logging_steps=1, save_strategy="no",
                learning_rate=1e-2, report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
            )  # fmt: skip
        else:
            model = built.get("model") or AutoModelForCausalLM.from_pretrained(model_dir)
            callbacks = [built["callback"]] if "callback" in built else None
            trainer = Trainer(model, built.get("arguments"), train_dataset=rows, callbacks=callbacks)
    trainer.train()
    return losses_of(trainer), trainer.args.world_size, str(trainer.accelerator.distributed_type)


@pytest.mark.parametrize("fsdp", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)], ids=["fsdp2", "fsdp1"])
def test_every_order_trains_on_all_ranks(tiny_model, text_file, tmp_path, fsdp):
    found = {
        order: run_ranks(
            _train_in_order, 2, order, str(tiny_model("llama")), str(text_file), str(tmp_path / str(number)),
            environment=fsdp_environment(fsdp), timeout_seconds=150,
        )
        for number, order in enumerate(ORDERS)
    }  # fmt: skip
    losses, world_size, kind = found[ORDERS[1]][0]
    assert len(losses) == 3 and world_size == 2 and kind.endswith("FSDP")
    for order, ranks in found.items():
        assert ranks == [(losses, world_size, kind)] * 2, order


@pytest.mark.parametrize("order", LATE)
def test_order_that_cannot_work_is_one_sentence_on_every_rank(tiny_model, text_file, tmp_path, order):
    errors = run_ranks(
        _train_in_order, 2, order, str(tiny_model("llama")), str(text_file), str(tmp_path),
        environment=fsdp_environment(FSDP2), timeout_seconds=150, expect_failure=True,
    )  # fmt: skip
    assert errors[0] == errors[1]
    assert errors[0][0] == "TemplateError"
    assert "an Accelerator was created before FSDP could be turned on for CPU ranks" in errors[0][1]
