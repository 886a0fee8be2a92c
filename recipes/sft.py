"""Fine-tune a causal language model with FSDP: full, or LoRA with `use_peft`.

A recipe is a YAML of TRL's and Trainer's own arguments; anything on the command line overrides it.

    accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/sft.py \
        --config recipes/quickstart.yaml --model_name_or_path path/to/model

    accelerate launch --config_file accelerate_configs/fsdp2_full_shard.yaml recipes/sft.py \
        --model_name_or_path Qwen/Qwen3-8B --dataset_name my_rows.jsonl --output_dir runs/qwen3 \
        --use_peft --lora_target_modules all-linear --packing --resume_from_checkpoint auto

What a run leaves in --output_dir: checkpoint-<step>/ (sharded, resumable on another number of ranks),
export/ (loads with from_pretrained), metrics.jsonl, report.md and plots. A run that ends without weights in
export/ exits non-zero.
"""

from torch.distributed.elastic.multiprocessing.errors import record

from hf_fsdp_recipes.distributed import exit_with_message
from hf_fsdp_recipes.patches.torch import wait_for_gloo_at_exit


def main() -> None:
    from hf_fsdp_recipes.training.arguments import parse_arguments
    from hf_fsdp_recipes.training.build import build_trainer, find_resume, finish

    arguments = parse_arguments()  # the same on every rank, or an error before anything is loaded
    if arguments.recipe.dry_run:
        from hf_fsdp_recipes.tools.planner import dry_run

        dry_run.run(arguments)  # the recipe at its full size, without weights
        return
    checkpoint = find_resume(arguments)  # the newest complete one with `auto`; keeps the global batch
    trainer = build_trainer(arguments)  # rank 0 reads headers; no rank holds weights yet
    trainer.train(resume_from_checkpoint=checkpoint)  # shards, fills, trains, saves
    finish(trainer, arguments)  # every rank writes its own slices of the final weights
    trainer.accelerator.end_training()


@record  # the traceback of what nobody expected goes to torchrun's table and error files
def start() -> None:
    wait_for_gloo_at_exit()
    with exit_with_message():
        main()


if __name__ == "__main__":
    start()
