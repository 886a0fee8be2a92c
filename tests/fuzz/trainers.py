"""Builds the trainer of a combination, stock or ours."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from hf_fsdp_recipes import load_model
from tests.fuzz.callbacks import Actor, Counter
from tests.fuzz.combinations import Case, training_arguments

VOCABULARY = 64
NUM_EVAL_ROWS = 4
EXPORT_DIR = "exported"


def make_models(directory: str) -> None:
    """Write two tiny models, with tied and untied embeddings."""
    for name in ("tied", "untied"):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=name == "tied",
            bos_token_id=1,
            eos_token_id=2,
        )
        LlamaForCausalLM(config).save_pretrained(f"{directory}/{name}")


def load(case: Case, models: str, is_ours: bool) -> Any:
    """Load the model, and change it as the combination asks."""
    load_by = load_model if is_ours else AutoModelForCausalLM.from_pretrained
    model: Any = load_by(f"{models}/{'tied' if case.get('tied') else 'untied'}", dtype="float32")
    if case.get("sampling"):
        model.generation_config.temperature = 0.5  # without do_sample
    if case.get("lora"):
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    elif case.get("frozen"):
        model.get_input_embeddings().weight.requires_grad_(False)
    return model


class Stream(torch.utils.data.IterableDataset):
    """Rows whose number is not known before."""

    def __init__(self, rows: list[dict[str, list[int]]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        yield from self._rows


class FuzzedTrainer(Trainer):
    """Runs out of memory, and has parameter groups of its own, if the combination asks for it."""

    def __init__(self, case: Case, **keywords: Any) -> None:
        self.case = case
        super().__init__(**keywords)

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        oom_at = self.case.get("oom_at", float("inf"))
        has_rows = len(inputs["input_ids"]) > 1
        if model.training and has_rows and self.state.global_step >= oom_at:
            raise RuntimeError("CUDA out of memory. Simulated.")
        return super().compute_loss(model, inputs, *rest, **named)

    def create_optimizer(self, model: Any = None) -> Any:
        if self.case.get("groups") and self.optimizer is None:
            kind, keywords = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            groups: list[dict[str, Any]] = [{"params": [], "lr": 1e-3}, {"params": []}]
            for name, value in self.model.named_parameters():
                if value.requires_grad:
                    groups["layers" in name]["params"].append(value)
            self.optimizer = kind(groups, **keywords)
        return super().create_optimizer(model)


class StockTrainer(FuzzedTrainer):
    """Stock, but for two faults under FSDP with sharded state that would hide others.

    It looks for the best checkpoint before it has made the directory, and `save_model` writes no
    weights.
    """

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        directory = output_dir or self.args.output_dir
        is_sharded = self.case["world"].startswith("fsdp")
        if self.case.get("as_is") or not is_sharded:
            super().save_model(output_dir, _internal_call)
        elif _internal_call:
            os.makedirs(directory, exist_ok=True)
            torch.distributed.barrier()
        else:
            state = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(directory, state_dict=state)


class StockExport(TrainerCallback):
    """Writes the model when training ends, as `export_dir` does, with upstream's functions."""

    trainer: FuzzedTrainer

    def on_train_end(self, args: Any, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        state = trainer.accelerator.get_state_dict(trainer.model)
        if trainer.case.get("tied"):
            state.pop("lm_head.weight", None)  # as save_pretrained does for one shared tensor
        if args.should_save:
            model = trainer.accelerator.unwrap_model(trainer.model)
            trial = getattr(trainer, "_trial", None)
            place = (
                EXPORT_DIR if trial is None else Path(trainer._get_output_dir(trial), EXPORT_DIR)
            )
            model.save_pretrained(place, state_dict=state)


def compute_metrics(found: Any) -> dict[str, float]:
    """Return a metric that goes up and down, and depends on each bit of the predictions."""
    is_tuple = isinstance(found.predictions, tuple)
    logits = found.predictions[0] if is_tuple else found.predictions
    total = float(numpy.asarray(logits, dtype=numpy.float64).sum())
    return {"odd": float(abs(numpy.sin(1e4 * total)))}


def make_rows(num_rows: int) -> list[dict[str, list[int]]]:
    rng = random.Random(5)
    rows = [[rng.randrange(3, VOCABULARY) for _ in range(8)] for _ in range(num_rows)]
    return [{"input_ids": row, "labels": row} for row in rows]


def build_trainer(
    case: Case, models: str, directory: str, recorder: TrainerCallback, ours: TrainerCallback | None
) -> FuzzedTrainer:
    """Build a trainer.

    Args:
        case: the complete combination.
        models: directory of the models.
        directory: `output_dir`.
        recorder: the callback that notes events.
        ours: the callback that saves; None for stock.
    """
    arguments = TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=case["batch"],
        per_device_eval_batch_size=2,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        seed=3,
        **training_arguments(case),
    )
    actors = case["actors"] + ([] if ours is None else case["faults"])
    callbacks = [recorder, *(Actor(*actor) for actor in actors)]
    if case.get("early_stop"):
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=case["early_stop"]))
    if case.get("counter"):
        callbacks.append(Counter())
    export = StockExport()
    if ours is not None:
        callbacks.insert(0 if case.get("first") else len(callbacks), ours)
    elif case.get("export"):
        callbacks.append(export)
    rows = make_rows(NUM_EVAL_ROWS + case["rows"])
    train_rows = rows[NUM_EVAL_ROWS:]

    def init_model() -> Any:
        return load(case, models, is_ours=ours is not None)

    kind = StockTrainer if ours is None else FuzzedTrainer
    trainer = kind(
        case,
        model=None if case.get("trial") else init_model(),
        model_init=init_model if case.get("trial") else None,
        args=arguments,
        train_dataset=Stream(train_rows) if case.get("stream") else train_rows,
        eval_dataset=rows[:NUM_EVAL_ROWS],
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        callbacks=callbacks,
    )
    export.trainer = trainer
    return trainer
