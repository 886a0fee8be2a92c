"""Fine-tune a causal language model with TRL's SFTTrainer under FSDP: all weights, LoRA or QLoRA.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/sft.py --config recipes/quickstart.yaml \
        --model_name_or_path path/to/model

    accelerate launch --config_file accelerate_configs/full_shard.yaml recipes/sft.py \
        --model_name_or_path Qwen/Qwen3-8B --dataset_name my_rows.jsonl --output_dir runs/qwen3 \
        --use_peft --lora_target_modules all-linear --packing --resume_from_checkpoint auto

A recipe (--config) is a YAML file of TRL's and Trainer's arguments and a few more (`RecipeArguments`); the command line
overrides it. A run writes checkpoint-<step>/, export/, metrics.jsonl, report.md and plots to --output_dir.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_recipes import patches
from hf_fsdp_recipes.distributed import exit_with_message, is_main, print_main, run_on_main
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training.arguments import Arguments, parse_arguments
from hf_fsdp_recipes.training.checks import check_arguments, check_export_target
from hf_fsdp_recipes.training.rows import read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(arguments: Arguments) -> "PreTrainedTokenizerBase":
    """Return the recipe's tokenizer. SFTTrainer sets its end token and chat template."""
    from transformers import AutoTokenizer

    name = arguments.recipe.tokenizer_name or arguments.model.model_name_or_path
    revision = None if arguments.recipe.tokenizer_name else arguments.model.model_revision
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=arguments.training.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise RecipeError(f"there is no tokenizer in {name}: {error}") from error


def build_model(arguments: Arguments) -> "PreTrainedModel":
    """Return the pretrained model, whose weights are read when it is sharded, or a new one with random weights."""
    import transformers
    from trl import get_quantization_config

    from hf_fsdp_recipes import load_model

    model, training = arguments.model, arguments.training
    options: dict[str, Any] = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    options |= {"trust_remote_code": training.trust_remote_code} | (training.model_init_kwargs or {})
    training.model_init_kwargs = None  # SFTTrainer would refuse them for a model that is built already
    if arguments.recipe.config_name:
        config = transformers.AutoConfig.from_pretrained(arguments.recipe.config_name)
        config.update_from_string(arguments.recipe.config_overrides or "")
        options["dtype"] = "float32" if options["dtype"] in (None, "auto") else options["dtype"]
        return transformers.AutoModelForCausalLM.from_config(config, **options)
    source = {"revision": model.model_revision}
    config = run_on_main(lambda: transformers.AutoConfig.from_pretrained(model.model_name_or_path, **source))
    # Like TRL, take the class that the checkpoint names.
    auto_class = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
    quantization = get_quantization_config(model)
    if quantization is not None:
        options["quantization_config"] = quantization
    return load_model(model.model_name_or_path, auto_class=auto_class, **source, **options)


def find_checkpoint(arguments: Arguments) -> str | None:
    """Return the checkpoint to resume from. `auto` is the latest intact one, or None if there is none."""
    from hf_fsdp_recipes import latest_checkpoint

    training = arguments.training
    wanted, training.resume_from_checkpoint = training.resume_from_checkpoint, None
    if wanted in ("auto", "true", "True", True):
        return latest_checkpoint(training.output_dir)
    return wanted or None


def main(arguments: Arguments) -> None:
    """Run the recipe. Every rank runs this."""
    from transformers import set_seed
    from trl import SFTTrainer, get_peft_config

    from hf_fsdp_recipes import MetricsCallback, ShardedCheckpointCallback, keep_global_batch, sharded_optimizer
    from hf_fsdp_recipes.metrics.callback import place_before_reporters

    training, recipe = arguments.training, arguments.recipe
    check_arguments(arguments)
    check_export_target(arguments)
    checkpoint = find_checkpoint(arguments)
    keep_global_batch(training, checkpoint)
    set_seed(training.seed)
    tokenizer = load_tokenizer(arguments)
    with training.main_process_first(desc="reading rows"):  # rank 0 fills the cache of datasets
        train, evaluation = read_rows(arguments)
    export_dir = Path(training.output_dir) / "export" if recipe.export else None
    saving = ShardedCheckpointCallback(
        export_dir=export_dir, export_dtype=recipe.export_dtype, merge_adapter=recipe.merge_adapter
    )
    trainer = SFTTrainer(
        model=build_model(arguments),
        args=training,
        train_dataset=train,
        eval_dataset=evaluation if training.eval_strategy != "no" else None,
        processing_class=tokenizer,
        peft_config=get_peft_config(arguments.model),
        callbacks=[MetricsCallback(throughput_warmup_steps=recipe.throughput_warmup_steps), saving],
        optimizer_cls_and_kwargs=sharded_optimizer(training),
    )
    place_before_reporters(trainer)
    if checkpoint:
        print_main(f"resuming from {checkpoint}")
    trainer.train(resume_from_checkpoint=checkpoint)
    if training.push_to_hub and export_dir and is_main():
        from huggingface_hub import HfApi

        api = HfApi(token=training.hub_token)
        api.upload_folder(repo_id=trainer.hub_model_id, folder_path=export_dir, commit_message="End of training")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    with exit_with_message():
        patches.enable_cpu_ranks()
        main(parse_arguments())
