"""`hf-fsdp rehearse`: runs a recipe from start to end on CPU ranks, with a tiny model of the same architecture."""

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
import yaml

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.tools.files import find_file, shipped_directory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NUM_ROWS, NUM_STEPS, SAVE_STEPS = 64, 6, 2
LAUNCH_SECONDS = 300
# What a CPU rank lacks, and what costs time or an account.
ON_CPU = {"torch_compile": False, "use_liger_kernel": False, "push_to_hub": False, "report_to": "none", "bf16": False}
SHORT = {
    "max_steps": NUM_STEPS,
    "save_strategy": "steps",
    "save_steps": SAVE_STEPS,
    "logging_steps": 1,
    "max_length": 256,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "eval_strategy": "no",
    "disable_tqdm": True,
}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
MOE_SIZES = {"moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT2_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4}


def rehearse(
    config: Annotated[str, typer.Argument(help="Recipe: a name or a file.")],
    accelerate_config: Annotated[str, typer.Option(help="Template whose sharding is used.")] = "cpu",
    num_processes: Annotated[int, typer.Option(help="CPU ranks.")] = 2,
    directory: Annotated[Optional[Path], typer.Option(help="Keep the files here.")] = None,
) -> None:
    """Will my recipe run to the end? Load, kill, resume, export and generate, on CPU ranks with a tiny model."""
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hf-fsdp-rehearsal-")))
        directory.mkdir(parents=True, exist_ok=True)
        recipe = write_recipe(find_file("recipe", config), directory)
        template = write_template(find_file("template", accelerate_config), directory, num_processes)
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(template)]
        command += ["--main_process_port", "0", str(shipped_directory("recipe") / "sft.py"), "--config", str(recipe)]
        run = directory / "run"
        print("train, and kill all ranks after the first checkpoint", flush=True)
        launch(
            [*command, "--resume_from_checkpoint", "auto"],
            directory,
            run / f"checkpoint-{SAVE_STEPS}" / "manifest.json",
        )
        print("resume and export", flush=True)
        launch([*command, "--resume_from_checkpoint", "auto"], directory)
        print(f"generate: {generate(run / 'export')!r}", flush=True)
        print(f"{Path(config).stem}: loaded, killed, resumed, exported and generated on {num_processes} CPU ranks")


def write_recipe(file: Path, directory: Path) -> Path:
    """Write the recipe with a tiny model, the first rows and a few steps; return the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_fsdp_recipes.tools.models import find_config

    recipe = yaml.safe_load(file.read_text())
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    name = recipe.get("model_name_or_path") or str(file.parent / recipe.get("config_name", ""))
    model_directory = directory / "model"
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.get("tokenizer_name") or name)
    except (OSError, ValueError) as error:
        raise ToolError(
            f"the tokenizer of {name} cannot be read: {error}. Log in, or download the model first."
        ) from error
    model = AutoModelForCausalLM.from_config(shrink(find_config(name), len(tokenizer)), dtype="float32")
    model.save_pretrained(model_directory)
    tokenizer.save_pretrained(model_directory)
    for field in ("config_name", "config_overrides", "tokenizer_name", "attn_implementation"):
        recipe.pop(field, None)
    recipe |= {"model_name_or_path": str(model_directory), "dataset_name": str(write_rows(recipe, file, directory))}
    recipe |= {**ON_CPU, **SHORT, "dtype": "float32", "output_dir": str(directory / "run")}
    for field in ("dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming"):
        recipe.pop(field, None)
    target = directory / "recipe.yaml"
    target.write_text(yaml.safe_dump(recipe))
    return target


def shrink(config: "PreTrainedConfig", num_tokens: int) -> "PreTrainedConfig":
    """Return a config of the same class for a model of a few layers, with the same tying and kinds of layers."""
    tiny = copy.deepcopy(config)
    text = tiny.get_text_config()
    heads = getattr(text, "num_attention_heads", 4)
    groups = getattr(text, "num_key_value_heads", None)
    sizes = {**SIZES, **MOE_SIZES, **GPT2_SIZES, "vocab_size": max(num_tokens, 8)}
    if groups:
        sizes["num_key_value_heads"] = max(1, 4 * groups // heads)
    for name, size in sizes.items():
        if isinstance(getattr(text, name, None), int):
            with contextlib.suppress(AttributeError):  # computed from other fields
                setattr(text, name, size)
    for name in ("layer_types", "mlp_layer_types"):  # one entry for each layer; keep different kinds
        kinds = getattr(text, name, None)
        if isinstance(kinds, list):
            setattr(text, name, [*dict.fromkeys(kinds), *kinds][: SIZES["num_hidden_layers"]])
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    return tiny


def write_rows(recipe: dict[str, Any], file: Path, directory: Path) -> Path:
    """Write the first rows of the recipe's dataset with all their columns; return the file."""
    from datasets import load_dataset

    name = recipe.get("dataset_name") or recipe["datasets"][0]["path"]
    name = str(file.parent / name) if (file.parent / name).exists() else name
    options: dict[str, Any] = {"path": "json", "data_files": name} if Path(name).is_file() else {"path": name}
    try:
        rows = load_dataset(**options, name=recipe.get("dataset_config"), split="train", streaming=True)
        lines = [json.dumps(row, default=str) + "\n" for row in islice(rows, NUM_ROWS)]
    except Exception as error:  # datasets raises many classes
        raise ToolError(
            f"the rows of {name} cannot be read: {error}. Name a dataset that this machine can read."
        ) from error
    target = directory / "rows.jsonl"
    target.write_text("".join(lines))
    return target


def write_template(file: Path, directory: Path, num_processes: int) -> Path:
    """Write the template for CPU ranks; sharding and wrapping stay the same."""
    template = yaml.safe_load(file.read_text())
    template |= {"use_cpu": True, "mixed_precision": "no", "num_machines": 1, "num_processes": num_processes}
    if template.get("distributed_type") == "MULTI_GPU":
        template["distributed_type"] = "MULTI_CPU"
    if "parallelism_config" in template:
        half = {"dp_replicate_size": 2, "dp_shard_size": num_processes // 2}
        template["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in half.items()}
    if "fsdp_min_num_params" in (template.get("fsdp_config") or {}):
        template["fsdp_config"]["fsdp_min_num_params"] = 5000  # the tiny model is smaller than one unit of a real one
    target = directory / "template.yaml"
    target.write_text(yaml.safe_dump(template))
    return target


def launch(command: list[str], directory: Path, kill_at: Path | None = None) -> None:
    """Run the recipe to its end, or until a file exists; then kill its processes. Raises a ToolError if it fails."""
    log = directory / "log.txt"
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    with log.open("a") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    deadline = time.monotonic() + LAUNCH_SECONDS
    while process.poll() is None and time.monotonic() < deadline and not (kill_at and kill_at.exists()):
        time.sleep(0.1)
    was_running = process.poll() is None
    kill_tree(process)
    if kill_at is None and (was_running or process.returncode):
        found = [line for line in log.read_text().splitlines() if "Error" in line]
        raise ToolError(f"the run failed: {found[-1] if found else 'it took too long'}. Its output is in {log}.")


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill the launcher and its ranks, which torchrun starts in sessions of their own."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        for member in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)
    process.wait()


def generate(export: Path) -> str:
    """Return a few tokens from an exported model or adapter."""
    from transformers import AutoTokenizer

    if (export / "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM as Auto
    else:
        from transformers import AutoModelForCausalLM as Auto
    tokenizer, model = AutoTokenizer.from_pretrained(export), Auto.from_pretrained(export)
    tokens = model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(tokens[0]))
