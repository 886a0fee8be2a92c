"""Fine-tune a causal language model with your own `Trainer`.

Sharded loading, resumable checkpoints, a final export.

    accelerate launch --config_file accelerate_configs/full_shard.yaml examples/own_trainer.py \
        --model Qwen/Qwen3-8B --data my_rows.jsonl --output_dir runs/mine

Each line of `my_rows.jsonl` is a JSON object with the text field `text`. If the run stops, start
the same command again. It resumes from the latest complete checkpoint. The trained model is written
to `<output_dir>/export`, from which `from_pretrained` loads it. On a machine without a GPU, use
accelerate_configs/cpu.yaml.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from hf_fsdp_recipes import ShardedCheckpointCallback, latest_checkpoint, load_model


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

    # Replaces AutoModelForCausalLM.from_pretrained.
    model = load_model(options.model, dtype="float32")
    arguments = TrainingArguments(
        output_dir=str(options.output_dir),
        per_device_train_batch_size=4,
        learning_rate=1e-5,
        bf16=torch.accelerator.is_available(),
        max_steps=options.max_steps,
        save_steps=options.save_steps,
        logging_steps=1,
        report_to="none",
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with arguments.main_process_first():  # rank 0 tokenizes, and the other ranks read its cache
        rows = load_dataset("json", data_files=options.data, split="train")
        rows = rows.map(
            lambda row: tokenizer(row["text"], truncation=True, max_length=1024),
            remove_columns=["text"],
        )

    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
        callbacks=[ShardedCheckpointCallback(export_dir=options.output_dir / "export")],
    )
    # None starts from step 0.
    trainer.train(resume_from_checkpoint=latest_checkpoint(options.output_dir))


if __name__ == "__main__":
    main()
