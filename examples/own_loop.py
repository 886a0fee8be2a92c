"""Fine-tune a causal language model with Accelerate alone.

Your own loop, resumable checkpoints, a final export.

    accelerate launch --config_file accelerate_configs/full_shard.yaml examples/own_loop.py \
        --model Qwen/Qwen3-8B --data my_rows.jsonl --output_dir runs/mine

Each line of `my_rows.jsonl` is a JSON object with the text field `text`. If the run stops, start
the same command again. It resumes from the latest complete checkpoint. The trained model is written
to `<output_dir>/export`, from which `from_pretrained` loads it. On a machine without a GPU, use
accelerate_configs/cpu.yaml.
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_linear_schedule_with_warmup,
)

from hf_fsdp_recipes import export_model, load_model


def save(accelerator: Accelerator, output_dir: Path, step: int) -> None:
    """Save to the directory `step-<step>`, which appears only when all of its files are written."""
    accelerator.save_state(output_dir / "unfinished")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (output_dir / "unfinished").rename(output_dir / f"step-{step}")


def main() -> None:
    """Train with the options from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="directory or Hub id")
    parser.add_argument("--data", required=True, help="JSON lines file with a text column")
    parser.add_argument("--output_dir", required=True, type=Path)
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--save_steps", type=int, default=100)
    parser.add_argument(
        "--resume_from_checkpoint",
        choices=["auto"],
        help="for launch.slurm; every run resumes anyway",
    )
    options = parser.parse_args()
    set_seed(0)
    # Before the Accelerator: load_model turns on FSDP on CPUs.
    model = load_model(options.model, dtype="float32")
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with accelerator.main_process_first():  # rank 0 tokenizes, and the other ranks read its cache
        rows = load_dataset("json", data_files=options.data, split="train")
        rows = rows.map(
            lambda row: tokenizer(row["text"], truncation=True, max_length=1024),
            remove_columns=["text"],
        )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    order = torch.Generator().manual_seed(0)
    batches = DataLoader(
        rows, batch_size=4, shuffle=True, generator=order, collate_fn=collator, drop_last=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, 0, options.max_steps * accelerator.num_processes
    )
    # Fills the shards.
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)

    step = max((int(path.name[5:]) for path in options.output_dir.glob("step-*")), default=0)
    if step:
        accelerator.load_state(options.output_dir / f"step-{step}")
    model.train()
    while step < options.max_steps:
        epoch, num_done = divmod(step, len(batches))
        batches.set_epoch(epoch)
        for batch in islice(
            accelerator.skip_first_batches(batches, num_done), options.max_steps - step
        ):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            accelerator.print({"loss": round(loss.item(), 4), "step": step})
            if step % options.save_steps == 0:
                save(accelerator, options.output_dir, step)
    export_model(model, options.output_dir / "export", tokenizer=tokenizer)


if __name__ == "__main__":
    main()
