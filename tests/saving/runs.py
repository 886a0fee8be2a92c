"""Functions that the checkpointing tests run on ranks.

They train a tiny model with dropout for a few steps, and describe what came of it.
"""

import hashlib
import logging
import os
from pathlib import Path

from hf_fsdp_recipes.errors import CheckpointError

LORA = {
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
}
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "score",
    "greater_is_better": False,
}
VOCABULARY = 64
SETTINGS = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
SFT = {
    "max_length": 16,
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "bf16": False,
    "gradient_checkpointing": False,
}


def make_trainer(
    output, callbacks=(), *, lora=False, sft=False, dropout=0.1, hidden=32, resume=None, **arguments
):
    """Build a Trainer, or an SFTTrainer, on 48 random rows.

    It saves every two of four steps unless `arguments` differ.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
    from trl import SFTConfig, SFTTrainer

    from hf_fsdp_recipes import keep_global_batch

    settings = SETTINGS | (SFT if sft else {}) | arguments
    args = (SFTConfig if sft else TrainingArguments)(output_dir=str(output), **settings)
    keep_global_batch(args, resume)
    set_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        attention_dropout=dropout,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (48, 16), generator=generator).tolist()
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
    common = {
        "train_dataset": rows,
        "eval_dataset": rows.select(range(8)),
        "callbacks": list(callbacks),
    }
    peft_config = LoraConfig(**LORA) if lora else None
    if sft:
        return SFTTrainer(
            model, args, processing_class=_tokenizer(), peft_config=peft_config, **common
        )
    return Trainer(get_peft_model(model, peft_config) if lora else model, args, **common)


def _tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w1", eos_token="w2", unk_token="w0"
    )


def describe(trainer):
    """Return the losses, Trainer's best model and hashes of the weights and the optimizer's state.

    Collective.
    """
    state = trainer.state
    optimizer = trainer.optimizer.state if trainer.optimizer else {}  # refused before training
    parameters = sorted(trainer.model.named_parameters())
    return {
        "losses": {entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry},
        "best": (state.best_metric, state.best_global_step, state.best_model_checkpoint),
        "weights": [_digest(value) for _, value in parameters],
        "optimizer": [
            _digest(value)
            for _, parameter in parameters
            for value in optimizer.get(parameter, {}).values()
        ],
    }


def _digest(value):
    import torch

    full = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
    content = full.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha1(content).hexdigest()[:10]


def train(output, *, stock=False, resume=True, callback=None, prepare=None, **options):
    """Train and return what came of it.

    This is `describe`, where the run resumed, this package's warnings and error, and what `prepare`
    noted.

    `resume` is a checkpoint, or whether to resume from the latest one. `stock` trains without our
    callback, `callback` holds its arguments, `prepare` is called with the trainer and may append to
    `trainer.notes`, `options` are those of `make_trainer`.
    """
    from hf_fsdp_recipes import ShardedCheckpointCallback, latest_checkpoint
    from hf_fsdp_recipes.upstream import patches

    patches.enable_cpu_ranks()
    warnings = collect_warnings()
    error = None
    checkpoint = (latest_checkpoint(output) if resume is True else resume) or None
    callbacks = () if stock else (ShardedCheckpointCallback(**(callback or {})),)
    trainer = make_trainer(output, callbacks, resume=checkpoint, **options)
    trainer.notes = []
    if prepare:
        prepare(trainer)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except CheckpointError as found:
        error = str(found)
    resumed = checkpoint and Path(checkpoint).name
    outcome = {"resumed": resumed, "warnings": warnings, "notes": trainer.notes, "error": error}
    return describe(trainer) | outcome


def on(trainer, event, action):
    """Call `action(state, control)` at an event of the trainer, before our callback."""
    from transformers import TrainerCallback

    def act(self, args, state, control, **kwargs):
        action(state, control)

    trainer.callback_handler.callbacks.insert(0, type("Act", (TrainerCallback,), {event: act})())


def before_writing(fragment, action):
    """Call `action` before this rank writes a sharded file whose path contains `fragment`."""
    from hf_fsdp_recipes.saving import hashing

    open_hashed = hashing.open_hashed

    def act(files, path, mode):
        if fragment in str(path):
            action()
        return open_hashed(files, path, mode)

    hashing.open_hashed = act


def collect_warnings():
    """Return a list to which this package's warnings are added."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hf_fsdp_recipes").addHandler(handler)
    return messages


def steps_in(output):
    """Return the steps of all directories named like a checkpoint.

    Check that each of them is complete and intact.
    """
    from hf_fsdp_recipes.saving.directory import list_checkpoints, step_of
    from hf_fsdp_recipes.saving.resume import find_damage

    found = list_checkpoints(output)
    assert [find_damage(checkpoint) for checkpoint in found] == [None] * len(found)
    return sorted(step_of(checkpoint) for checkpoint in found)


def rank():
    return int(os.environ["RANK"])
