"""Functions that the checkpointing tests run on ranks.

They train a tiny model with dropout for a few steps, and describe what came of it.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from pathlib import Path

from hf_fsdp_recipes.errors import CheckpointError, ExportError

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

    `trained` are the hashes of the trained weights, sorted. Collective.
    """
    state = trainer.state
    # There is no optimizer until the model is prepared for training.
    optimizer = trainer.optimizer.state if trainer.optimizer else {}
    parameters = sorted(trainer.model.named_parameters())
    return {
        "losses": {entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry},
        "best": (state.best_metric, state.best_global_step, state.best_model_checkpoint),
        "step": state.global_step,
        "weights": [_digest(value) for _, value in parameters],
        "trained": sorted(_digest(value) for _, value in parameters if value.requires_grad),
        "optimizer": [
            _digest(value)
            for _, parameter in parameters
            for value in optimizer.get(parameter, {}).values()
        ],
    }


def _digest(value):
    import torch

    full = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
    # FSDP could not free memory that numpy has seen.
    content = full.detach().clone().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha1(content).hexdigest()[:10]


def digests_in(directory):
    """Return the hashes of all weights in a checkpoint or an export, sorted."""
    import torch
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    shards = directory / "pytorch_model_fsdp_0"
    if shards.is_dir():
        with tempfile.NamedTemporaryFile() as file:
            dcp_to_torch_save(shards, file.name)
            tensors |= torch.load(file.name)["model"]
    return sorted(map(_digest, tensors.values()))


def train(output, *, stock=False, resume=True, callback=None, prepare=None, **options):
    """Train and return what came of it.

    This is `describe`, where the run resumed, this package's warnings and error, and what `prepare`
    noted. A SystemExit is not caught.

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
    except (CheckpointError, ExportError) as found:
        error = str(found)
    resumed = checkpoint and Path(checkpoint).name
    outcome = {"resumed": resumed, "warnings": warnings, "notes": trainer.notes, "error": error}
    return describe(trainer) | outcome


class Trial(dict):
    """What Trainer needs of a trial of optuna."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.params = {}


def search(output, **callback):
    """Train the trials 0 and 1, as a hyperparameter search does. Return the error that ends it.

    `callback` holds the arguments of our callback.
    """
    import transformers
    from transformers.trainer_utils import HPSearchBackend

    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.upstream import patches

    patches.enable_cpu_ranks()
    transformers.integrations.hp_params = dict
    trainer = make_trainer(output, [ShardedCheckpointCallback(**callback)])
    trainer.model_init = lambda: make_trainer(output.with_name("unused")).model
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = lambda trial: {}
    try:
        for number in (0, 1):
            trainer.train(trial=Trial(number))
    except (CheckpointError, ExportError) as error:
        return str(error)
    return None


def on(trainer, event, action, is_last=False):
    """Call `action(state, control)` at an event of the trainer, after Trainer's own callback.

    If `is_last`, call it after all other callbacks.
    """
    from transformers import TrainerCallback

    def act(self, args, state, control, **kwargs):
        action(state, control)

    callback = type("Act", (TrainerCallback,), {event: act})()
    callbacks = trainer.callback_handler.callbacks
    callbacks.insert(len(callbacks) if is_last else 1, callback)


def before_writing(fragment, action):
    """Call `action` before this rank writes a sharded file whose path contains `fragment`."""
    from hf_fsdp_recipes.saving import hashing

    open_hashed = hashing.open_hashed

    def act(files, path, mode):
        if fragment in str(path):
            action()
        return open_hashed(files, path, mode)

    hashing.open_hashed = act


def before_last_file(trainer, step, action):
    """Call `action` on each rank before Trainer writes its last file of the save at a step."""
    save = trainer._save_rng_state

    def act(directory):
        # The random state is also kept before an evaluation, in another directory.
        if Path(directory).name == f"checkpoint-{step}":
            action()
        save(directory)

    trainer._save_rng_state = act


def slow_disk():
    """Let the files of a save take longer to be flushed to disk than the next step takes."""
    flush = os.fsync

    def flush_late(descriptor):
        time.sleep(0.02)
        flush(descriptor)

    os.fsync = flush_late


def collect_warnings():
    """Return a list to which this package's warnings are added."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hf_fsdp_recipes").addHandler(handler)
    return messages


def steps_in(output):
    """Return the steps of all directories named like a checkpoint.

    Check that each of them is intact, and that its manifest lists all of its files.
    """
    from hf_fsdp_recipes.saving.directory import list_checkpoints, step_of
    from hf_fsdp_recipes.saving.resume import find_damage

    found = list_checkpoints(Path(output))
    assert [find_damage(checkpoint) for checkpoint in found] == [None] * len(found)
    for checkpoint in found:
        assert not checkpoint.is_symlink()
        files = {name for name, content in contents_of(checkpoint).items() if content is not None}
        assert "manifest.json" in files, f"{checkpoint.name} has no manifest"
        listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
        unlisted = files - {"manifest.json"} - listed.keys()
        assert not unlisted, f"the manifest of {checkpoint.name} does not list {unlisted}"
    return sorted(step_of(checkpoint) for checkpoint in found)


def contents_of(directory):
    """Return the content of each file below a directory; None stands for a directory."""
    directory = Path(directory)
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def names_in(directory):
    """Return the names in a directory, sorted. A directory that is not there has none."""
    return sorted(path.name for path in Path(directory).glob("*"))


def wait_for(path):
    deadline = time.monotonic() + 120
    while not os.path.lexists(path):
        assert time.monotonic() < deadline, f"{path.name} does not appear"
        time.sleep(0.05)


def rank():
    return int(os.environ.get("RANK", "0"))
