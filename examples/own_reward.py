"""Train a reward model with TRL's `RewardTrainer`, LoRA and a new head that returns one score.

    accelerate launch --config_file accelerate_configs/full_shard.yaml examples/own_reward.py \
        --model Qwen/Qwen3-8B --data my_rows.jsonl --output_dir runs/mine

Each line of `my_rows.jsonl` is a JSON object with the text fields `prompt`, `chosen` and
`rejected`. If the run stops, start the same command again. It resumes from the latest complete
checkpoint. The adapter is written to `<output_dir>/export`, and the reward model with the adapter
merged in to `<output_dir>/export_merged`. Without a GPU, use accelerate_configs/cpu.yaml.
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from hf_fsdp_recipes import ShardedCheckpointCallback, latest_checkpoint, load_model


def main() -> None:
    """Train with the options from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="directory or Hub id")
    parser.add_argument("--data", required=True, help="JSON lines file of preferences")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--save_steps", type=int, default=100)
    parser.add_argument(
        "--resume_from_checkpoint",
        choices=["auto"],
        help="for launch.slurm; every run resumes anyway",
    )
    options = parser.parse_args()

    model = load_model(
        options.model, auto_class=AutoModelForSequenceClassification, num_labels=1, dtype="bfloat16"
    )
    arguments = RewardConfig(
        output_dir=options.output_dir,
        per_device_train_batch_size=2,
        learning_rate=1e-4,
        bf16=torch.accelerator.is_available(),
        max_steps=options.max_steps,
        save_steps=options.save_steps,
        logging_steps=1,
        report_to="none",
    )
    trainer = RewardTrainer(
        model=model,
        args=arguments,
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(
            r=16,
            lora_alpha=32,
            target_modules="all-linear",
            task_type="SEQ_CLS",
            modules_to_save=["score"],
        ),
        callbacks=[
            ShardedCheckpointCallback(export_dir=f"{options.output_dir}/export", merge_adapter=True)
        ],
    )
    # None starts from step 0.
    trainer.train(resume_from_checkpoint=latest_checkpoint(options.output_dir))


if __name__ == "__main__":
    main()
