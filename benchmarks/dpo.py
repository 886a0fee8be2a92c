"""Host memory of DPO with a reference model, per rank, compared with stock TRL in one run.

    python -m benchmarks.dpo [--parameters 0.3e9]

A random Llama of the given size in bf16 files, two gloo ranks under FSDP2 on one machine, float32 parameters, SGD. TRL gets
the name of the model and loads its reference itself; or `load_model` loads both. Memory is peak anonymous memory above the
start: until the first step, and in all. In the first step the reward of every answer is 0 if the reference equals the model.
Prints a table and rewrites its section of docs/measured.md.
"""

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks.running import machine, make_checkpoint, run_ranks, write_section

WAYS = {"TRL": "stock", "load_model": "load_model"}
WORDS = ("a", "b", "c", "<eos>", "<pad>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=0.3e9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-dpo-") as scratch:
        checkpoint = Path(scratch) / "model"
        run_ranks(make_checkpoint, 1, checkpoint, options.parameters)
        lines = [
            "| models from | peak until the first step, MB: rank 0 / rank 1 | peak in all, MB | first reward |",
            "|---|---|---|---|",
        ]
        for way, kind in WAYS.items():
            first, second = run_ranks(train, 2, kind, str(checkpoint), f"{scratch}/{kind}")
            peaks = (f"{first[name] / 1e6:,.0f} / {second[name] / 1e6:,.0f}" for name in ("loading", "peak"))
            lines.append(f"| {way} | {' | '.join(peaks)} | {first['rewards/chosen']:.4f} |")
            print(lines[-1], flush=True)
    size = 4 * options.parameters / 1e6
    lines = [f"{options.parameters / 1e9:g}B parameters, about {size:,.0f} MB in float32; 2 ranks.", "", *lines, ""]
    lines.append(f"`python -m benchmarks.dpo --parameters {options.parameters:g}`; {machine()}")
    print("\n".join(lines))
    write_section("DPO with a reference model", lines)


def train(kind: str, checkpoint: str, output: str) -> dict[str, float]:
    """Train one step; return the peaks above the start in bytes, and the reward. Every rank runs this."""
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    os.environ.update(FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", FSDP_RESHARD_AFTER_FORWARD="true")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    from hf_fsdp_recipes.patches import cpu_ranks

    cpu_ranks.enable()
    import torch.distributed as dist
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    from hf_fsdp_recipes.loading.load_model import load_model
    from hf_fsdp_recipes.metrics.memory import HostPeak

    class FirstStep(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            found["loading"] = memory.peak_bytes - memory.before_bytes

        def on_log(self, args, state, control, logs=None, **kwargs):
            found.update({name: value for name, value in logs.items() if name == "rewards/chosen"})

    found: dict[str, float] = {}
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    arguments = DPOConfig(
        output, max_steps=1, logging_steps=1, per_device_train_batch_size=1, save_strategy="no", optim="sgd", bf16=False,
        use_cpu=True, report_to="none", disable_tqdm=True, gradient_checkpointing=False, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    with HostPeak() as memory:
        if kind == "stock":
            given = {"model": checkpoint}
        else:
            given = {name: load_model(checkpoint, dtype="float32") for name in ("model", "ref_model")}
        common = {"train_dataset": rows, "processing_class": tokenizer, "callbacks": [FirstStep()]}
        trainer = DPOTrainer(args=arguments, **given, **common)
        trainer.train()
        dist.barrier()
    return found | {"peak": memory.peak_bytes - memory.before_bytes}


if __name__ == "__main__":
    main()
