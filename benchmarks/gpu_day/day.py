"""What all steps share: directories, sizes, and the arguments of both training scripts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
LLAMA_8B = ROOT / "hf_fsdp_recipes" / "tools" / "models" / "meta-llama--Llama-3.1-8B.json"
# Changes to the config of Llama 3.1 8B.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "190m": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "head_dim": 64,
        "vocab_size": 32000,
    },
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 2048,
}
LORA = {
    "use_peft": True,
    "lora_target_modules": "all-linear",
    "lora_r": 16,
    "dtype": "bfloat16",
    "learning_rate": 1e-4,
}
QLORA = LORA | {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": True,
}
FULL = {"dtype": "float32", "learning_rate": 1e-5}
# As NeMo Automodel measures LoRA: full sequences, two at a time, accumulated, without dropout.
LARGE = LORA | {
    "packing_strategy": "wrapped",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "lora_dropout": 0.0,
    "use_liger_kernel": True,
    "max_steps": 8,
}


@dataclass(frozen=True)
class Day:
    """Where the steps keep their files, and how large the models are.

    Attributes:
        out: results.jsonl, log.txt and plan.json.
        work: models and runs.
        is_small: whether models are tiny, to test the steps.
    """

    out: Path
    work: Path
    is_small: bool

    @property
    def length(self) -> int:
        """Tokens in a packed row."""
        return 64 if self.is_small else 4096

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a run that is timed."""
        return 10 if self.is_small else 14

    def model(self, name: str) -> Path:
        """Return the directory of a model, which `make_models` has written."""
        return self.work / "models" / name

    @property
    def rows(self) -> Path:
        """Return the directory of the tokenized rows."""
        return self.work / "models" / "rows"

    def output(self, name: str) -> Path:
        """Return the output directory of a run."""
        return self.work / "runs" / name

    def arguments(
        self, model: str, name: str, settings: Mapping[str, Any], is_planned: bool = False
    ) -> list[str]:
        """Return arguments for recipes/sft.py and `trl sft`.

        With `is_planned`, for an accelerator that is not here.
        """
        has_device = is_planned or torch.accelerator.is_available()
        values = {
            "model_name_or_path": self.model(model),
            "dataset_name": self.rows,
            "output_dir": self.output(name),
            "seed": 1,
            "bf16": has_device,
            "max_steps": self.num_steps,
            "max_length": self.length,
            "packing": True,
            "attn_implementation": "sdpa",
            "save_strategy": "no",
            "per_device_train_batch_size": 1,
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "lr_scheduler_type": "constant",
        }
        if not has_device:
            values |= {"use_cpu": True, "dataloader_pin_memory": False}
        values |= settings
        return [word for key, value in values.items() for word in (f"--{key}", str(value))]
