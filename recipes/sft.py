"""Fine-tune a causal language model with FSDP: all parameters, or LoRA with `use_peft`.

A recipe is a YAML file of TRL's and Trainer's arguments; the command line overrides it.

    accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/sft.py \
        --config recipes/quickstart.yaml --model_name_or_path path/to/model

    accelerate launch --config_file accelerate_configs/fsdp2_full_shard.yaml recipes/sft.py \
        --model_name_or_path Qwen/Qwen3-8B --dataset_name my_rows.jsonl --output_dir runs/qwen3 \
        --use_peft --lora_target_modules all-linear --packing --resume_from_checkpoint auto

A run writes to --output_dir: checkpoint-<step>/ (sharded, resumable on another number of ranks), export/ (loads with
from_pretrained), metrics.jsonl, report.md and plots. Unless the recipe sets export: false, a run that ends without exported
weights has exit status 1.
"""

from typing import TYPE_CHECKING

from hf_fsdp_recipes.training.run import start

if TYPE_CHECKING:
    from hf_fsdp_recipes.training.arguments import Arguments


def plan(arguments: "Arguments") -> None:
    """Print a plan of the run at full size, without weights."""
    from hf_fsdp_recipes.tools.planner import dry_run

    dry_run.run(arguments)


if __name__ == "__main__":
    start("sft", plan)
