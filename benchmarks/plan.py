"""Compare the planner's predictions with the measured peak host memory of CPU ranks that really train.

    python -m benchmarks.plan [--only 3] [--write]

Each row is a separate run: load_model loads the model, Accelerate shards it, and TRL's SFTTrainer (or Trainer) trains
it for two steps on 1 or 2 gloo ranks. Measured: the peak anonymous memory of the largest rank, above the level before the
model was built. Predicted: `hf_fsdp_recipes.tools.planner`, from the config alone.

By default glibc keeps much of the freed memory for reuse. This script sets MALLOC_MMAP_THRESHOLD_=65536, so that large
blocks return to the kernel immediately and the peak is what torch holds. `--as-glibc-comes` keeps glibc's default, to show
how much memory it adds.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.running import machine, run_ranks

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536"}
PRELOADED = ["torch", "transformers", "trl", "peft", "datasets", "accelerate", "tests.ranks.preload"]
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "planner.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SMALL = {
    "vocab_size": 32768,  # TRL's fused loss uses tiles of 32768; with a smaller vocabulary, part of a tile stays untouched
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
TIED = SMALL | {"tie_word_embeddings": True}
EXPERTS = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4, "intermediate_size": 704}


@dataclass(frozen=True)
class Case:
    """One run: config, number of ranks, and what differs from the defaults."""

    label: str
    config: dict[str, Any]
    ranks: int = 2
    kind: str = "LlamaConfig"
    strategy: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("1 rank, every activation kept", SMALL, 1, job={"batch": 2, "length": 256, "gradient_checkpointing": False}),
    Case("1 rank, layers recomputed", SMALL, 1, job={"batch": 2, "length": 256}),
    Case(
        "1 rank, eager attention", SMALL, 1, job={"length": 512, "gradient_checkpointing": False, "attention": "eager"}
    ),
    Case("1 rank, full logits", SMALL, 1, job={"length": 384, "loss": "model"}),
    Case("fsdp2 full_shard", SMALL, job={"length": 384, "gradient_checkpointing": False}),
    Case("fsdp1 full_shard", SMALL, job={"length": 384, "gradient_checkpointing": False}, strategy={"version": 1}),
    Case(
        "fsdp2, LoRA on all linear layers", SMALL, job={"length": 256, "lora_rank": 16, "gradient_checkpointing": False}
    ),
    Case("fsdp2 full_shard, recomputed, tied", TIED, job={"length": 256}),
    Case("fsdp2 shard_grad_op", SMALL, job={"length": 256}, strategy={"sharding": "shard_grad_op"}),
    Case("no_shard", SMALL, job={"length": 256}, strategy={"version": 1, "sharding": "no_shard"}),
    Case("fsdp2, units above 5M", SMALL, job={"length": 256}, strategy={"min_num_params": 5_000_000}),
    Case("fsdp2, SGD, 2 micro-batches", SMALL, job={"length": 256, "optimizer": "sgd", "accumulation": 2}),
    Case(
        "fsdp2, mixture of experts", EXPERTS, kind="MixtralConfig", job={"length": 256, "gradient_checkpointing": False}
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, action="append", help="number of a case, from 0")
    parser.add_argument("--as-glibc-comes", action="store_true")
    parser.add_argument("--write", action="store_true", help="rewrite the table of docs/planner.md")
    options = parser.parse_args()
    if not options.as_glibc_comes and not MALLOC.items() <= os.environ.items():
        # glibc reads these settings only when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    multiprocessing.set_forkserver_preload(PRELOADED)
    chosen = options.only or range(len(CASES))
    lines = ["| run | ranks | predicted, MB | measured, MB | error |", "|---|---|---|---|---|"]
    errors = []
    for number in chosen:
        case = CASES[number]
        predicted, measured = predict(case).peak_bytes, measure(case)
        errors.append(predicted / measured - 1)
        lines.append(
            f"| {case.label} | {case.ranks} | {predicted / 1e6:,.0f} | {measured / 1e6:,.0f} | {errors[-1]:+.1%} |"
        )
        print(lines[-1], flush=True)
    sizes = sorted(abs(error) for error in errors)
    lines += [
        "",
        f"Median error {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}.",
        "",
        f"`python -m benchmarks.plan --write`; {machine()}",
    ]
    print("\n".join(lines))
    if options.write:
        text = RESULTS.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        RESULTS.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after)


def make_config(case: Case) -> Any:
    import transformers

    return getattr(transformers, case.kind)(**case.config)


def make_job(case: Case) -> Any:
    import torch

    from hf_fsdp_recipes.configs.strategy import Strategy
    from hf_fsdp_recipes.tools.planner.training_job import Cluster, TrainingJob

    strategy = Strategy(on_cpu=True, precision="no", **case.strategy)
    cluster = Cluster(case.ranks, case.ranks)
    return TrainingJob(strategy, cluster=cluster, dtype=torch.float32, mixed_precision=None, **case.job)


def predict(case: Case) -> Any:
    from hf_fsdp_recipes.tools.planner.memory_planner import MemoryPlanner

    return MemoryPlanner(make_config(case)).plan(make_job(case))


def measure(case: Case) -> int:
    """Return the largest peak of the case's ranks."""
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as directory:
        write_model(case, directory)
        return max(run_ranks(train, case.ranks, case, directory, timeout_seconds=600, start="forkserver"))


def write_model(case: Case, directory: str) -> None:
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    AutoModelForCausalLM.from_config(make_config(case)).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(directory)


def train(case: Case, directory: str) -> int:
    """Train two steps; return the peak above the level before the model was built. Every rank runs this."""
    os.environ.update(environment(case))
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, Trainer, default_data_collator
    from trl import SFTConfig, SFTTrainer

    from hf_fsdp_recipes import load_model
    from hf_fsdp_recipes.loading import materialize  # noqa: F401 - imported before the measurement
    from hf_fsdp_recipes.metrics.memory import HostPeak
    from hf_fsdp_recipes.patches import cpu_ranks

    cpu_ranks.enable()
    job = make_job(case)
    rows = torch.randint(2, case.config["vocab_size"], (job.batch * job.accumulation * case.ranks * 2, job.length))
    dataset = Dataset.from_dict({"input_ids": rows.tolist(), "labels": rows.tolist()})
    args = SFTConfig(
        output_dir=directory + "/run",
        max_steps=2,
        per_device_train_batch_size=job.batch,
        gradient_accumulation_steps=job.accumulation,
        gradient_checkpointing=job.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if job.gradient_checkpointing else None,
        optim=job.optimizer,
        max_length=None,
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    adapter = LoraConfig(r=job.lora_rank, target_modules=job.lora_targets, task_type="CAUSAL_LM")
    with HostPeak() as memory:
        model = load_model(directory, dtype="float32", attn_implementation=job.attention)
        common: dict[str, Any] = {"args": args, "train_dataset": dataset, "processing_class": tokenizer}
        if job.loss == "model":
            trainer = Trainer(model, data_collator=default_data_collator, **common)
        else:
            trainer = SFTTrainer(model, peft_config=adapter if job.lora_rank else None, **common)
        trainer.train()
    return memory.peak_bytes - memory.before_bytes


def environment(case: Case) -> dict[str, str]:
    """Return the variables that `accelerate launch` would set for the case's strategy."""
    strategy = make_job(case).strategy
    by_size = strategy.min_num_params is not None
    variables = {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": str(strategy.version),
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP" if by_size else "TRANSFORMER_BASED_WRAP",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_SYNC_MODULE_STATES": "false",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    }
    if by_size:
        variables["FSDP_MIN_NUM_PARAMS"] = str(strategy.min_num_params)
    if strategy.version == 2:
        variables["FSDP_RESHARD_AFTER_FORWARD"] = str(strategy.reshards_after_forward).lower()
    else:
        variables["FSDP_SHARDING_STRATEGY"] = strategy.sharding.upper()
        variables["FSDP_RESHARD_AFTER_FORWARD"] = strategy.sharding.upper()
    return variables


if __name__ == "__main__":
    main()
