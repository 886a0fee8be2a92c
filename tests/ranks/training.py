"""Functions that the tests run on ranks: a few real SFTTrainer steps.

The model is loaded with stock loading or with this package.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def build(
    model_dir: str,
    data_file: str,
    output_dir: str,
    *,
    loader: str = "rank0",
    dtype: str = "float32",
    lora: dict[str, Any] | None = None,
    steps: int = 5,
    callbacks: list[Any] | None = None,
    load_arguments: dict[str, Any] | None = None,
    prepare: Callable[[Any], None] | None = None,
    quantization: dict[str, Any] | None = None,
    **sft_arguments: Any,
) -> Any:
    """Build an SFTTrainer; `loader` is stock (from_pretrained), rank0 or direct."""
    from hf_fsdp_recipes.upstream import patches

    patches.enable_cpu_ranks()
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from hf_fsdp_recipes import load_model
    from hf_fsdp_recipes.training.sharded_optimizer import sharded_optimizer

    defaults: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "max_length": 64,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    args = SFTConfig(output_dir=output_dir, **(defaults | sft_arguments))
    load_options = {"dtype": dtype} | quantized(quantization) | (load_arguments or {})
    if loader == "stock":
        model = AutoModelForCausalLM.from_pretrained(model_dir, **load_options)
    else:
        model = load_model(model_dir, source=loader, **load_options)
    if prepare:
        prepare(model)
    caches = Path(tempfile.gettempdir(), f"hf-fsdp-tests-{os.getuid()}")
    cache = caches / f"rank-{os.environ['RANK']}"
    rows = load_dataset("json", data_files=str(data_file), cache_dir=str(cache))
    eval_rows = None
    if args.eval_strategy != "no":
        eval_rows = rows["train"].select(range(8))
    return SFTTrainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=eval_rows,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        peft_config=LoraConfig(**lora) if lora else None,
        callbacks=callbacks,
        optimizer_cls_and_kwargs=sharded_optimizer(args),
    )


def quantized(quantization: dict[str, Any] | None) -> dict[str, Any]:
    """Return from_pretrained's argument for 4-bit loading, or no argument."""
    if quantization is None:
        return {}
    import torch
    from transformers import BitsAndBytesConfig

    dtypes = {
        key: getattr(torch, value)
        for key, value in quantization.items()
        if key.endswith(("dtype", "storage"))
    }
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **(quantization | dtypes))}


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_losses(*arguments: Any, **keywords: Any) -> list[float]:
    """Train a few steps and return the losses."""
    trainer = build(*arguments, **keywords)
    trainer.train()
    return losses_of(trainer)


def digest(model: Any) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return the dtype, shape and hash of each full parameter and buffer. Collective."""
    import torch

    found = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        values = full.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found[name] = str(full.dtype), tuple(full.shape), hashlib.sha1(values).hexdigest()
    return found


def train(*arguments: Any, **keywords: Any) -> tuple[list[float], dict[str, Any]]:
    """Train a few steps; return the losses and the digest of the weights."""
    trainer = build(*arguments, **keywords)
    trainer.train()
    return losses_of(trainer), digest(trainer.model)


def error_of(*arguments: Any, **keywords: Any) -> tuple[str, str]:
    """Build and train; return the class and the text of the error."""
    try:
        build(*arguments, **keywords).train()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""
