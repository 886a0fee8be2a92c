"""Fine-tune a causal language model with FSDP: all parameters, or LoRA with `use_peft`.

A recipe is a YAML file of TRL's and Trainer's arguments; the command line overrides it.

    accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/sft.py \
        --config recipes/quickstart.yaml --model_name_or_path path/to/model

    accelerate launch --config_file accelerate_configs/fsdp2_full_shard.yaml recipes/sft.py \
        --model_name_or_path Qwen/Qwen3-8B --dataset_name my_rows.jsonl --output_dir runs/qwen3 \
        --use_peft --lora_target_modules all-linear --packing --resume_from_checkpoint auto

A run writes to --output_dir: checkpoint-<step>/ (sharded, resumable on another number of ranks), export/ (loads with
from_pretrained), metrics.jsonl, report.md and plots. If export/ has no weights at the end, the exit status is 1.
"""

from torch.distributed.elastic.multiprocessing.errors import record

from hf_fsdp_recipes.distributed import exit_with_message
from hf_fsdp_recipes.patches.torch import wait_for_gloo_at_exit


def main() -> None:
    from hf_fsdp_recipes.training.arguments import parse_arguments

    arguments = parse_arguments()  # checks everything that needs no model; every rank gets the same arguments
    # Imported now, when CPU ranks are set up: it imports bitsandbytes, which would print on each of them.
    from hf_fsdp_recipes.training.build import build_trainer, find_resume, finish, train

    if arguments.recipe.dry_run:
        from hf_fsdp_recipes.tools.planner import dry_run

        dry_run.run(arguments)  # full-size plan, without weights
        return
    checkpoint = find_resume(arguments)  # locks output_dir; with `auto`, the newest complete one
    trainer = build_trainer(arguments)  # prepares the data; no rank holds weights yet
    failed_save = train(trainer, checkpoint)  # shards the model, loads its weights, trains, saves checkpoints
    finish(trainer, arguments)  # exports the final weights, each rank its own slices
    trainer.accelerator.end_training()
    if failed_save is not None:
        raise failed_save  # the last checkpoint could not be written


@record  # unexpected errors appear in torchrun's error table and files
def start() -> None:
    wait_for_gloo_at_exit()
    with exit_with_message():
        main()


if __name__ == "__main__":
    start()
