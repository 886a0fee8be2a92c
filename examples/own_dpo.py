"""Align a language model with preferences: TRL's `DPOTrainer`, with model and reference model sharded while they load.

    accelerate launch --config_file accelerate_configs/fsdp2_full_shard.yaml examples/own_dpo.py \
        --model Qwen/Qwen3-8B --data my_preferences.jsonl --output_dir runs/mine

Each line of `my_preferences.jsonl` has the texts prompt, chosen and rejected. If the run stops, start the same command
again: it resumes from the newest complete checkpoint. The trained model ends up in `<output_dir>/export`.
On a machine without a GPU use accelerate_configs/fsdp2_cpu.yaml.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from hf_fsdp_recipes import ShardedCheckpointCallback, latest_checkpoint, load_model


def main() -> None:
    """Train with the options from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="directory or Hub id")
    parser.add_argument("--data", required=True, help="JSON lines file of preferences")
    parser.add_argument("--output_dir", required=True, type=Path)
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--save_steps", type=int, default=100)
    parser.add_argument("--resume_from_checkpoint", choices=["auto"], help="for launch.slurm; every run resumes anyway")
    options = parser.parse_args()

    model = load_model(options.model, dtype="float32")
    reference = load_model(options.model, dtype="bfloat16" if torch.accelerator.is_available() else "float32")
    arguments = DPOConfig(
        output_dir=str(options.output_dir),
        per_device_train_batch_size=2,
        learning_rate=1e-6,
        bf16=torch.accelerator.is_available(),
        max_steps=options.max_steps,
        save_steps=options.save_steps,
        logging_steps=1,
        report_to="none",
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,  # without this line, TRL loads the reference model itself, through load_model
        args=arguments,
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        processing_class=tokenizer,
        callbacks=[ShardedCheckpointCallback(export_dir=options.output_dir / "export")],
    )
    trainer.train(resume_from_checkpoint=latest_checkpoint(options.output_dir))  # None starts from step 0


if __name__ == "__main__":
    main()
