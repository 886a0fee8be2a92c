"""Host memory of DPO with a reference model, per rank, compared with stock TRL in one run.

    python -m benchmarks.dpo [--parameters 0.3e9] [--dtype float32] [--loading_only]

Trains a random Llama of the given size, with files in bf16, on two gloo ranks under FSDP2 with SGD. Policy and reference
model are loaded either by TRL, from the model's name, or by `load_model`. Memory is the peak of anonymous memory above its
level at the start: once up to the first step, and once over the full run. In the first step every reward is 0 if the reference
equals the policy. `--loading_only` ends before the first step, for models whose training step does not fit in memory. Prints a
table and rewrites its section of docs/measured.md.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.running import machine, make_checkpoint, run_ranks, write_section

WAYS = {"TRL": "stock", "load_model": "load_model"}
WORDS = ("a", "b", "c", "<eos>", "<pad>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=0.3e9)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--loading_only", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-dpo-") as scratch:
        checkpoint = Path(scratch) / "model"
        run_ranks(make_checkpoint, 1, checkpoint, options.parameters)
        lines = [
            "| models from | peak until the first step, MB: rank 0 / rank 1 | peak in all, MB | first reward |",
            "|---|---|---|---|",
        ]
        for way, kind in WAYS.items():
            first, second = run_ranks(
                train, 2, kind, str(checkpoint), f"{scratch}/{kind}", options.dtype, options.loading_only
            )
            peaks = (f"{first[name] / 1e6:,.0f} / {second[name] / 1e6:,.0f}" for name in ("loading", "peak"))
            rewards = "" if options.loading_only else f"{first['rewards/chosen']:.4f}"
            lines.append(f"| {way} | {' | '.join(peaks)} | {rewards} |")
            print(lines[-1], flush=True)
    size = (4 if options.dtype == "float32" else 2) * options.parameters / 1e6
    lines = [
        f"{options.parameters / 1e9:g}B parameters, about {size:,.0f} MB in {options.dtype}; 2 ranks.",
        "",
        *lines,
        "",
    ]
    arguments = " ".join(sys.argv[1:])
    lines.append(f"`python -m benchmarks.dpo {arguments}`; {machine()}")
    print("\n".join(lines))
    title = "DPO with a reference model"
    write_section(f"{title}, loading only" if options.loading_only else title, lines)


class Stop(Exception):
    """Ends training before its first step."""


def train(kind: str, checkpoint: str, output: str, dtype: str, loading_only: bool) -> dict[str, float]:
    """Train at most one step; return the peaks above the initial level, in bytes, and the reward. Every rank runs this."""
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
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found["loading"] = memory.peak_bytes - memory.before_bytes
            if loading_only:
                raise Stop

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            found.update({name: value for name, value in logs.items() if name == "rewards/chosen"})

    found: dict[str, float] = {}
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    arguments = DPOConfig(
        output, max_steps=1, logging_steps=1, per_device_train_batch_size=1, save_strategy="no", optim="sgd", bf16=False,
        use_cpu=True, report_to="none", disable_tqdm=True, gradient_checkpointing=False, dataloader_pin_memory=False,
        model_init_kwargs={"dtype": dtype} if kind == "stock" else None,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    with HostPeak() as memory:
        if kind == "stock":
            given = {"model": checkpoint}
        else:
            given = {name: load_model(checkpoint, dtype=dtype) for name in ("model", "ref_model")}
        common = {"train_dataset": rows, "processing_class": tokenizer, "callbacks": [FirstStep()]}
        trainer = DPOTrainer(args=arguments, **given, **common)
        with contextlib.suppress(Stop):
            trainer.train()
        dist.barrier()
    return found | {"peak": memory.peak_bytes - memory.before_bytes}


if __name__ == "__main__":
    main()
