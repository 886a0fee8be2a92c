"""Writes the files of a rehearsal: a tiny model of the same architecture, a few rows, and the recipe adapted to both."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml

from hf_fsdp_recipes import model_class
from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.configs.model_configs import find_config
from hf_fsdp_recipes.configs.shipped_files import read_recipe
from hf_fsdp_recipes.configs.yaml_file import parse_yaml
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.tools.planner.dry_run import read_model_config
from hf_fsdp_recipes.tools.rehearsal import stand_ins
from hf_fsdp_recipes.training.arguments import Arguments, is_prepared
from hf_fsdp_recipes.training.data.image_rows import has_images
from hf_fsdp_recipes.training.tiny_config import tiny_config
from hf_fsdp_recipes.training.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPE_FILE, TEMPLATE_FILE, RUN_DIRECTORY = "recipe.yaml", "template.yaml", "run"
NUM_ROWS = 96
NUM_STEPS = 9
SAVE_STEPS = 2
MAX_TOKENS = 256  # per row: long enough for prompts, short enough for CPUs
MIN_UNIT_PARAMETERS = 5000  # for size-based wrapping: the tiny model is smaller than one unit of a real model
NUM_HYBRID_RANKS = 4  # two replicas with two shards each
STRATEGY_WITHIN_NODE = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}
# Replacements for settings that need hardware or an account.
REPLACED_SETTINGS = {
    "attention": "auto",
    "attn_implementation": None,
    "torch_compile": False,
    "torch_compile_backend": None,
    "compile_blocks": False,
    "use_liger_kernel": False,
    "tf32": None,
    "push_to_hub": False,
    "report_to": "none",
}


def write_model(arguments: Arguments, directory: Path) -> str:
    """Write the tiny model with the recipe's tokenizer; return a description of its size."""
    config = read_model_config(arguments)
    tokenizer, note = _make_tokenizer(arguments)
    tiny = tiny_config(config, vocab_size=len(tokenizer) if note else None)
    if note:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(tiny.get_text_config(), name, getattr(tokenizer, name))
    model = model_class.build(tiny, dtype=getattr(config, "dtype", None) or torch.bfloat16)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{num_parameters / 1e6:.1f}M parameters, {tiny.get_text_config().num_hidden_layers} layers{note}"


def _make_tokenizer(arguments: Arguments) -> tuple["PreTrainedTokenizerBase", str]:
    """Return the recipe's tokenizer or, if it cannot be read, a byte-level tokenizer and a note that says so."""
    name = str(arguments.recipe.tokenizer_name or arguments.model.model_name_or_path)
    if find_config(name) != name:
        return stand_ins.byte_tokenizer(), f", a tokenizer of bytes instead of {name}'s, which cannot be read"
    # Leave out the recipe's special tokens, because the run itself adds them.
    untouched = arguments._replace(recipe=replace(arguments.recipe, special_tokens=None))
    return load_tokenizer(untouched), ""


def write_rows(arguments: Arguments, directory: Path) -> str:
    """Write the first rows of the recipe's dataset with all their columns; return a description."""
    script = arguments.script
    if arguments.mixture.datasets or is_prepared(script.dataset_name):
        return "the full dataset"  # a mixture, or rows that are already tokenized
    splits, description = stand_ins.read_rows(script, NUM_ROWS)
    if any(has_images(rows) for rows in splits.values()):
        return "the full dataset"
    (directory / "rows").mkdir()
    for split, rows in splits.items():
        if split in (script.dataset_train_split, script.dataset_test_split):
            name = "test" if split == script.dataset_test_split else "train"
            lines = [json.dumps(row, default=str) + "\n" for row in islice(rows, NUM_ROWS)]
            (directory / "rows" / f"{name}.jsonl").write_text("".join(lines))
    return description


def write_template(template: Path, directory: Path) -> None:
    """Write the Accelerate config, adapted to CPU ranks and the tiny model."""
    config = to_cpu_ranks(validate.read_config(template))
    if "fsdp_min_num_params" in config["fsdp_config"]:
        config["fsdp_config"]["fsdp_min_num_params"] = MIN_UNIT_PARAMETERS
    (directory / TEMPLATE_FILE).write_text(yaml.safe_dump(config))


def to_cpu_ranks(config: validate.Section, num_ranks: int = 2) -> validate.Section:
    """Return a copy of a config for CPU ranks, with new rank counts; sharding, wrapping and dtypes stay the same.

    A rehearsal has one node, so FSDP1's HYBRID_SHARD becomes FULL_SHARD, and HYBRID_SHARD_ZERO2 becomes SHARD_GRAD_OP. An FSDP2
    hybrid mesh gets four ranks, whatever `num_ranks` is.
    """
    config = copy.deepcopy(config)
    fsdp = config["fsdp_config"]
    if "parallelism_config" in config:
        num_ranks = NUM_HYBRID_RANKS
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_dp_shard_size": num_ranks // 2,
        }
    strategy = fsdp.get("fsdp_sharding_strategy")
    if strategy in STRATEGY_WITHIN_NODE:
        fsdp["fsdp_sharding_strategy"] = STRATEGY_WITHIN_NODE[strategy]
    for key in ("rdzv_backend", "dynamo_config", "main_process_ip", "main_process_port", "machine_rank"):
        config.pop(key, None)
    return config | {"use_cpu": True, "num_machines": 1, "num_processes": num_ranks}


def write_recipe(settings: validate.Section, arguments: Arguments, directory: Path) -> list[str]:
    """Write the recipe, adapted to the model and rows in the directory; return what the real job does differently.

    `settings` is what `read_settings` returned for the recipe; `arguments` is the parsed recipe.
    """
    replaced = {key: value for key, value in REPLACED_SETTINGS.items() if settings.get(key, value) != value}
    training, model = arguments.training, str(directory / "model")
    differences = [f"{key}: {settings[key]}" for key in replaced]
    differences.append(f"save_strategy: {training.save_strategy.value}, save_steps: {training.save_steps}")
    settings = {key: value for key, value in (settings | replaced).items() if value is not None}
    if (directory / "rows").is_dir():
        for key in ("dataset_config", "dataset_train_split", "dataset_test_split"):
            settings.pop(key, None)
        settings["dataset_name"] = str(directory / "rows")
    if "config_name" in settings:
        settings.pop("config_overrides", None)
        settings |= {"config_name": model, "tokenizer_name": model}
    else:
        settings["model_name_or_path"] = model
    if settings.get("eval_strategy", "no") != "no":
        settings |= {"eval_strategy": "steps", "eval_steps": NUM_STEPS // 2, "eval_delay": 0}
    settings |= {
        "output_dir": str(directory / RUN_DIRECTORY),
        "max_length": min(MAX_TOKENS, training.max_length or MAX_TOKENS),
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": min(2, training.gradient_accumulation_steps),
        "max_steps": NUM_STEPS,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "logging_steps": 1,
        "verify_export": "logits",
        "disable_tqdm": True,
    }
    (directory / RECIPE_FILE).write_text(yaml.safe_dump(settings))
    return differences


def read_settings(recipe: Path, overrides: Sequence[str]) -> validate.Section:
    """Return a recipe's fields with `--field value ...` overrides applied; values are read as YAML."""
    settings = read_recipe(recipe)
    key, values = "", []
    for argument in overrides:
        if argument.startswith("--"):
            key, _, value = argument.removeprefix("--").partition("=")
            values = [parse_yaml(value, f"--{key}", RecipeError)] if value else []
        else:
            values.append(parse_yaml(argument, f"--{key}", RecipeError))
        settings[key] = values[0] if len(values) == 1 else values or True
    return settings
