"""Compares `hf-fsdp plan` with the measured peak memory of CPU ranks that really train.

    python -m benchmarks.plan [--only 3] [--write FILE]

Each row is a run of its own: load_model loads the model, Accelerate shards it, and SFTTrainer
trains two steps on gloo ranks.
Measured: the peak anonymous memory of the largest rank, above the level before the model was built.
Predicted: from the config alone. MALLOC_MMAP_THRESHOLD_=65536 makes glibc return freed memory, so
that the peak is what torch holds.
"""

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.running import machine
from tests.ranks.harness import run_ranks
from tests.ranks.memory import PeakMemory

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536"}
# Of all models; a vocabulary below 32768 would leave part of TRL's tiles untouched, which a GPU
# would count.
SIZES = {
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 704,
    "num_hidden_layers": 4,
    "head_dim": 64,
}
KEEP = "--gradient_checkpointing false"
LORA = "--use_peft true --lora_target_modules all-linear"


@dataclass(frozen=True)
class Case:
    """One run.

    It has the model, the arguments of `hf-fsdp plan`, and whether the model's family was used to
    build the plan.
    """

    label: str
    model_type: str
    options: str
    changes: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    is_held_out: bool = False


BUILT = [
    Case(
        "Llama, 1 rank, activations kept",
        "llama",
        f"{KEEP} --max_length 256 --per_device_train_batch_size 2",
        ranks=1,
    ),
    Case(
        "Llama, 1 rank, eager attention",
        "llama",
        f"{KEEP} --max_length 512 --attn_implementation eager",
        ranks=1,
    ),
    Case("Llama, full_shard, activations kept", "llama", f"{KEEP} --max_length 384"),
    Case("Llama, tied embeddings", "llama", "--max_length 256", {"tie_word_embeddings": True}),
    Case("Llama, 310M", "llama", "--max_length 512", LARGE),
    Case("Llama, shard_grad_op", "llama", "--max_length 256 --fsdp_reshard_after_forward false"),
    Case(
        "Llama, units above 5M",
        "llama",
        "--max_length 256 --fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 5000000",
    ),
    Case(
        "Llama, SGD, 2 micro-batches",
        "llama",
        "--max_length 256 --optim sgd --gradient_accumulation_steps 2",
    ),
    Case("Llama, LoRA", "llama", f"{LORA} {KEEP} --max_length 256"),
    Case(
        "Llama, LoRA, vocabulary of 65,536",
        "llama",
        f"{LORA} --max_length 128",
        {"vocab_size": 65536},
    ),
    Case(
        "Qwen3, vocabulary of 65,536",
        "qwen3",
        "--max_length 256",
        {"vocab_size": 65536, "head_dim": 64},
    ),
    Case(
        "Qwen3, padded rows",
        "qwen3",
        f"{KEEP} --max_length 384 --per_device_train_batch_size 2",
        {"head_dim": 64},
    ),
    Case("Qwen3 MoE", "qwen3_moe", f"{KEEP} --max_length 256", EXPERTS),
    Case(
        "Qwen3 MoE, LoRA on attention",
        "qwen3_moe",
        "--use_peft true --lora_target_modules q_proj v_proj --max_length 256",
        EXPERTS,
    ),
    Case("GPT-2", "gpt2", f"{KEEP} --max_length 384", {"n_positions": 512}),
]
HELD_OUT = [
    Case(f"{label}{what}", model_type, options, changes, is_held_out=True)
    for label, model_type, changes in [
        ("Gemma", "gemma", {"head_dim": 64, "tie_word_embeddings": True}),
        ("Phi-3", "phi3", {}),
        ("Mistral", "mistral", {}),
        ("OLMo 2", "olmo2", {}),
        ("Granite", "granite", {}),
        ("StarCoder2", "starcoder2", {}),
    ]
    for what, options in [
        (", full", f"{KEEP} --max_length 384"),
        (", LoRA", f"{LORA} --max_length 256"),
    ]
]
CASES = BUILT + HELD_OUT


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, action="append", help="number of a case, from 0")
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    if not MALLOC.items() <= os.environ.items():  # glibc reads its settings when a process starts
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.plan", *sys.argv[1:]],
            os.environ | MALLOC,
        )
    lines = [
        "| run | ranks | family held out | predicted, MB | measured, MB | error |",
        "|---|---|---|---|---|---|",
    ]
    errors: dict[bool, list[float]] = {False: [], True: []}
    for number in options.only or range(len(CASES)):
        case = CASES[number]
        predicted = predict(case)
        measured = measure(case)
        error = predicted / measured - 1
        errors[case.is_held_out].append(error)
        held_out = "yes" if case.is_held_out else "no"
        columns = f"{predicted / 1e6:,.0f} | {measured / 1e6:,.0f} | {error:+.1%}"
        lines.append(f"| {case.label} | {case.ranks} | {held_out} | {columns} |")
        print(lines[-1], flush=True)
    for is_held_out, found in errors.items():
        sizes = sorted(map(abs, found))
        if sizes:
            families = "held-out families" if is_held_out else "families used to build it"
            median = statistics.median(sizes)
            lines += ["", f"{families}: median error {median:.1%}, worst {sizes[-1]:.1%}."]
    text = "\n".join([*lines, "", f"`python -m benchmarks.plan`; {machine()}", ""])
    print(text)
    if options.write:
        options.write.write_text(text)


def make_config(case: Case) -> Any:
    """Return the config of the case's model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(case.model_type, **(SIZES | case.changes))


def read_case(case: Case) -> Any:
    """Return the case's job, as `hf-fsdp plan` reads it."""
    from hf_fsdp_recipes.tools.plan.job import read_job

    batch = "--per_device_train_batch_size 1 --optim adamw_torch_fused"
    return read_job(None, "cpu", [*f"--num_processes {case.ranks} {batch} {case.options}".split()])


def predict(case: Case) -> float:
    """Return the predicted peak in bytes."""
    from hf_fsdp_recipes.tools.plan.step import measure_step

    step = measure_step(read_case(case), make_config(case))
    return step.total


def measure(case: Case) -> int:
    """Return the largest peak of the case's ranks in bytes."""
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as directory:
        write_model(case, directory)
        return max(run_ranks(train, case.ranks, case, directory, timeout_seconds=900))


def write_model(case: Case, directory: str) -> None:
    """Write a checkpoint with random weights, and a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    AutoModelForCausalLM.from_config(make_config(case)).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(directory)


def train(case: Case, directory: str) -> int:
    """Train two steps; return the peak above the level before the model was built.

    Every rank runs this.
    """
    job = read_case(case)
    os.environ.update(job.environment)
    import torch
    from accelerate.state import AcceleratorState, PartialState
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTTrainer, get_peft_config

    from hf_fsdp_recipes import load_model
    from hf_fsdp_recipes.upstream import patches

    AcceleratorState._reset_state(reset_partial_state=True)
    patches.enable_cpu_ranks()
    training = job.arguments.training
    num_rows, length = job.shape
    num_rows *= case.ranks * 2 * training.gradient_accumulation_steps
    rows = torch.randint(2, SIZES["vocab_size"], (num_rows, length)).tolist()
    if job.shape[0] > 1:
        rows = [row[: len(row) - number % 2] for number, row in enumerate(rows)]
    training.output_dir = f"{directory}/run"
    training.max_steps = 2
    training.save_strategy = "no"
    training.report_to = []
    training.disable_tqdm = True
    training.max_length = None
    training.dataset_kwargs = {"skip_prepare_dataset": True}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    PartialState(cpu=True)
    with PeakMemory() as memory:
        trainer = SFTTrainer(
            load_model(
                directory,
                dtype="float32",
                attn_implementation=job.arguments.model.attn_implementation,
            ),
            args=training,
            train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
            processing_class=tokenizer,
            peft_config=get_peft_config(job.arguments.model),
        )
        trainer.train()
    return memory.growth_bytes


if __name__ == "__main__":
    main()
