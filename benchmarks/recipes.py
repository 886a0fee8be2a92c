"""Calculates how long each shipped recipe trains: rows, tokens, steps, logs, saves and time.

    python -m benchmarks.recipes

Nothing is trained or downloaded. Settings come from the recipe and its template, FLOPs from the
model's config, and the datasets' sizes from their pages. Times assume a fifth of the device's peak,
as one H100 and one H200 reached (docs/measured.md). Padding, loading, saves and evaluation come on
top. With parameters in host memory, a run takes longer.
"""

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

UTILIZATION = 0.2
TINY = "HuggingFaceTB/SmolLM2-135M-Instruct"
H100 = "NVIDIA H100 80GB HBM3"
RTX_4090 = "NVIDIA GeForce RTX 4090"
MI300X = "AMD Instinct MI300X"
# The devices of each recipe: {number: name in torch}. CPU ranks have no known peak.
DEVICES = {
    "c4_150m_pretrain": {8: H100},
    "gpt2_alpaca_offload": {1: H100},
    "gpt_oss_20b_lora": {2: H100},
    "llama2_70b_alpaca_full": {8: MI300X},
    "llama2_70b_chat_full": {16: "NVIDIA A100-SXM4-80GB"},
    "llama2_70b_lora_gaudi": {8: "Gaudi2"},
    "llama2_70b_size_wrap": {8: H100},
    "llama2_7b_alpaca_full": {8: MI300X},
    "llama2_7b_size_wrap": {8: H100},
    "llama3_70b_qlora": {8: H100},
    "llama3_8b_full": {8: H100},
    "quickstart": {2: "CPU"},
    "qwen3_30b_a3b_lora": {4: H100},
    "qwen3_8b_lora": {2: RTX_4090, 16: H100},
    "qwen3_8b_qlora": {1: RTX_4090},
    "smollm2_135m_full": {2: "CPU"},
    "smollm2_135m_lora": {2: "CPU"},
}


class Rows(NamedTuple):
    """The training rows of a dataset."""

    number: int
    tokens: float  # of a row, on average


class Facts(NamedTuple):
    """What a recipe does on its devices."""

    devices: str
    rows: int
    tokens: str
    steps: int
    num_losses: int
    num_saves: int
    time: str

    def __str__(self) -> str:
        """Return the sentence for the recipe's first comment."""
        return (
            f"{self.rows:,} rows, {self.tokens} tokens: {self.steps:,} steps, {self.time} on "
            f"{self.devices}"
        )


# Rows as on each dataset's page on the Hub.
DATASETS = {
    # The page gives 47.8 MB for four columns, of which one repeats the others within the prompt. So
    # a prompt with its answer has 533 bytes. 4.63 bytes make a token of GPT-2 in 999 such texts
    # (LLaMA-Factory's alpaca_en_demo.json).
    "tatsu-lab/alpaca": Rows(52_002, 533 / 4.63),
    # 4,549 bytes a row. LDJnr/Capybara, whose rows these are: "over 1,000 tokens" on average.
    "trl-lib/Capybara": Rows(15_806, 1_000),
    # Bytes of a row, and those of a token as above. Only what fits into max_steps is trained.
    "smangrul/code-chat-assistant-v1": Rows(10_876, 2_302 / 4.63),
    "allenai/c4": Rows(364_868_892, 2_271 / 4.63),
    # GPT-2's tokens, and the 33 that SmolLM2's chat template adds.
    "quickstart.jsonl": Rows(24, 27 + 33),
    "sharded_training_faq.jsonl": Rows(240, 52 + 33),
}


def main() -> None:
    """Print the table."""
    from hf_fsdp_recipes.tools.files import shipped_files

    print("| recipe | devices | rows | tokens | steps | losses | saves | time |")
    print("|---|---|---|---|---|---|---|---|")
    for file in shipped_files("recipe"):
        for found in find_facts(file):
            columns = [f"{value:,}" if isinstance(value, int) else value for value in found]
            print(f"| `{file.stem}` | {' | '.join(columns)} |", flush=True)


def find_facts(file: Path) -> list[Facts]:
    """Return the facts of a recipe, one for each number of devices."""
    return [calculate(file, *devices) for devices in DEVICES[file.stem].items()]


def calculate(file: Path, num_devices: int, device: str) -> Facts:
    """Return the facts of a recipe on a number of devices."""
    job = read_recipe_job(file, num_devices)
    training = job.arguments.training
    rows = find_rows(job)
    steps, tokens = count(job, rows)
    time = "a few minutes"
    if device != "CPU":
        seconds = count_seconds(job, tokens, rows, device)
        time = f"{'at least' if job.is_offloaded else 'about'} {name_seconds(seconds)}"
    name = re.sub(r"NVIDIA |GeForce |AMD Instinct |-SXM4.*| 80GB.*", "", device)
    devices = f"{num_devices} x {name}" if device != "CPU" else f"{num_devices} CPU ranks"
    return Facts(
        devices,
        rows.number,
        name_tokens(tokens),
        steps,
        # Unlike a save, a loss is not due after the last step.
        math.floor(steps / steps_between(steps, training.logging_steps)),
        count_every(steps, training.save_strategy, training.save_steps, training),
        time,
    )


def read_recipe_job(file: Path, num_devices: int) -> Any:
    """Return the job of the command in a recipe's first comment."""
    from hf_fsdp_recipes.tools.plan.job import read_job

    [command] = re.findall(r"^# +hf-fsdp sft (.*?)\\?$", file.read_text(), re.MULTILINE)
    words = command.split()
    template = words[words.index("--accelerate_config") + 1]
    options = [f"--num_processes={num_devices}"]
    if "--mixed_precision" in words:
        options.append("--mixed_precision=no")
    if "--fsdp_offload_params" in words:
        options.append("--fsdp_offload_params=true")
    if file.stem == "quickstart":
        options.append(f"--model_name_or_path={TINY}")
    return read_job(str(file), template, options)


def find_rows(job: Any) -> Rows:
    """Return the rows that a job trains on, without those held out."""
    arguments = job.arguments
    name = str(arguments.script.dataset_name)
    rows = DATASETS[name if name in DATASETS else Path(name).name]
    kept = 1 - arguments.recipe.validation_split_percentage / 100
    return Rows(math.floor(rows.number * kept), rows.tokens)


def count(job: Any, rows: Rows) -> tuple[int, float]:
    """Return the optimizer steps of a job, and the tokens that they train on."""
    training = job.arguments.training
    batch, length = job.shape
    accumulated = training.gradient_accumulation_steps
    num_tokens = min(rows.tokens, length)
    num_sequences = float(rows.number)
    if training.packing:
        num_sequences = rows.number * rows.tokens / length
        num_tokens = length
    num_batches = math.ceil(num_sequences / (batch * job.num_ranks))
    per_epoch = math.ceil(num_batches / accumulated)
    if training.max_steps > 0:
        in_a_step = batch * job.num_ranks * accumulated * num_tokens
        return training.max_steps, training.max_steps * in_a_step
    epochs = training.num_train_epochs
    return math.ceil(per_epoch * epochs), num_sequences * num_tokens * epochs


def count_every(steps: int, strategy: str, every: float, training: Any) -> int:
    """Return how often a run of `steps` steps saves, after its last step included."""
    if strategy == "no":
        return 0
    if strategy == "epoch":
        return math.ceil(training.num_train_epochs)
    return math.ceil(steps / steps_between(steps, every))


def steps_between(steps: int, every: float) -> float:
    """Return the steps from one event to the next. Below 1, `every` is a fraction of all steps."""
    return every if every >= 1 else math.ceil(steps * every)


def count_seconds(job: Any, tokens: float, rows: Rows, device: str) -> float:
    """Return how long a job's devices take for its FLOPs."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM
    from trl import get_peft_config

    from hf_fsdp_recipes.metrics.flops import find_model_flops, find_peak_flops
    from hf_fsdp_recipes.tools.plan.job import read_config

    training = job.arguments.training
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(job))
        adapter = get_peft_config(job.arguments.model)
        if adapter:
            model = get_peft_model(model, adapter)
    # Each token attends to its own row, or to all of a sequence of rows that are cut anywhere.
    is_cut = training.packing and training.packing_strategy == "wrapped"
    width = training.max_length if is_cut else min(rows.tokens, job.shape[1])
    flops = find_model_flops(model).training(round(tokens), round(tokens * width))
    speed = UTILIZATION * find_peak_flops(device, "bfloat16") * job.num_ranks
    return flops / speed


def name_tokens(tokens: float) -> str:
    """Return a number of tokens with a unit."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:.0f}"


def name_seconds(seconds: float) -> str:
    """Return a time with a unit."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


if __name__ == "__main__":
    main()
