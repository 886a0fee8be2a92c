"""What a rehearsal runs in place of the real thing: a small model of the same architecture, the data's first rows, the
same recipe with fewer steps, and the template for CPU ranks. Writes files; starts nothing.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.tools.rehearsal.cpu_variant import to_cpu_ranks

NUM_ROWS = 96
NUM_STEPS = 9
SAVE_STEPS = 2
MAX_TOKENS = 256  # rows are cut there; long enough for prompts, short enough for CPUs
UNIT_PARAMETERS = 5000  # of size-wrapped units: the small model is smaller than one of the real ones
# What needs hardware that a rehearsal does not have, and what stands in for it.
STAND_INS = {
    "attention": "auto",
    "attn_implementation": None,
    "torch_compile": False,
    "torch_compile_backend": None,
    "use_liger_kernel": False,
    "tf32": None,
    "push_to_hub": False,
    "report_to": "none",
}


def prepare(rehearsal: Any, arguments: Any) -> str:
    """Write the small model, the rows, the recipe and the template of the rehearsal; say what they are.

    Args:
        rehearsal: a `rehearse.Rehearsal`; what the real job does differently is added to its `changes`.
        arguments: the recipe's, at its full size.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes.tools.planner.recipe_checks import read_model_config
    from hf_fsdp_recipes.training.tiny_config import tiny_config
    from hf_fsdp_recipes.training.tokenizer import load_tokenizer

    config = read_model_config(arguments)
    special, arguments.recipe.special_tokens = arguments.recipe.special_tokens, None
    tokenizer = load_tokenizer(arguments)
    arguments.recipe.special_tokens = special
    small = tiny_config(config, vocab_size=None)
    model = AutoModelForCausalLM.from_config(small, dtype=getattr(config, "dtype", None) or torch.bfloat16)
    model.save_pretrained(rehearsal.directory / "model")
    tokenizer.save_pretrained(rehearsal.directory / "model")
    rows = _write_rows(arguments, rehearsal.directory / "rows")
    template = to_cpu_ranks(validate.read_config(rehearsal.template))
    if "fsdp_min_num_params" in template["fsdp_config"]:
        template["fsdp_config"]["fsdp_min_num_params"] = UNIT_PARAMETERS
    (rehearsal.directory / "template.yaml").write_text(yaml.safe_dump(template))
    settings = _settings(rehearsal, arguments)
    (rehearsal.directory / "recipe.yaml").write_text(yaml.safe_dump(settings))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{num_parameters / 1e6:.1f}M parameters, {small.get_text_config().num_hidden_layers} layers; {rows}"


def _write_rows(arguments: Any, directory: Path) -> str:
    """Take the first rows of every part of the data, columns and all."""
    from itertools import islice

    from hf_fsdp_recipes.training.data import cache
    from hf_fsdp_recipes.training.data.dataset_parts import read_splits

    script = arguments.script
    if arguments.mixture.datasets or cache.is_cache(script.dataset_name):
        return "its own data, whole"
    is_local = Path(script.dataset_name).exists()
    splits = read_splits(script.dataset_name, script.dataset_config, streaming=not is_local)
    directory.mkdir()
    for split, rows in splits.items():
        if split in (script.dataset_train_split, script.dataset_test_split):
            with (directory / f"{'test' if split == script.dataset_test_split else 'train'}.jsonl").open("w") as file:
                file.writelines(json.dumps(row, default=str) + "\n" for row in islice(rows, NUM_ROWS))
    return f"the first {NUM_ROWS} rows of {script.dataset_name}"


def _settings(rehearsal: Any, arguments: Any) -> dict[str, Any]:
    """Return the recipe's settings for the rehearsal; note what differs."""
    settings = yaml.safe_load(rehearsal.recipe.read_text()) | as_settings(rehearsal.overrides)
    for key, stand_in in STAND_INS.items():
        if key in settings and settings[key] != stand_in:
            rehearsal.changes.append(f"{key}: {settings[key]}")
            settings[key] = stand_in
    settings = {key: value for key, value in settings.items() if value is not None}
    rehearsal.changes.append(
        f"save_strategy: {arguments.training.save_strategy.value}, save_steps: {arguments.training.save_steps}"
    )
    if (rehearsal.directory / "rows").is_dir():
        settings["dataset_name"] = str(rehearsal.directory / "rows")
        for key in ("dataset_config", "dataset_train_split", "dataset_test_split"):
            settings.pop(key, None)
    if "config_name" in settings:
        settings |= {
            "config_name": str(rehearsal.directory / "model"),
            "tokenizer_name": str(rehearsal.directory / "model"),
        }
        settings.pop("config_overrides", None)
    else:
        settings["model_name_or_path"] = str(rehearsal.directory / "model")
    if settings.get("eval_strategy", "no") != "no":
        settings |= {"eval_strategy": "steps", "eval_steps": NUM_STEPS // 2, "eval_delay": 0}
    return settings | {
        "output_dir": str(rehearsal.output),
        "max_length": min(MAX_TOKENS, arguments.training.max_length or MAX_TOKENS),
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": min(2, arguments.training.gradient_accumulation_steps),
        "max_steps": NUM_STEPS,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "logging_steps": 1,
        "verify_export": "logits",
        "disable_tqdm": True,
    }


def as_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Read `--field value` pairs as YAML would."""
    settings: dict[str, Any] = {}
    key = None
    for word in overrides:
        if word.startswith("--"):
            key = word.removeprefix("--")
            settings[key] = True
        elif key is not None:
            settings[key] = yaml.safe_load(word)
    return settings
