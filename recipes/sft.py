"""Fine-tune a causal language model with TRL's SFTTrainer under FSDP: all weights, LoRA or QLoRA.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/sft.py \
        --config recipes/quickstart.yaml --model_name_or_path path/to/model

    accelerate launch --config_file accelerate_configs/full_shard.yaml recipes/sft.py \
        --model_name_or_path Qwen/Qwen3-8B --dataset_name my_rows.jsonl --output_dir runs/qwen3 \
        --use_peft --lora_target_modules all-linear --packing --resume_from_checkpoint auto

A recipe (--config) is a YAML file with arguments of TRL, Trainer and this package
(`RecipeArguments`). Options on the command line override the recipe. A run writes
checkpoint-<step>/, export/, metrics.jsonl, report.md and plots to --output_dir.
"""

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_recipes import distributed, patches
from hf_fsdp_recipes.errors import CheckpointError, RecipeError, describe
from hf_fsdp_recipes.training.arguments import Arguments, parse_arguments
from hf_fsdp_recipes.training.checks import check_arguments, check_targets
from hf_fsdp_recipes.training.rows import read_rows

if TYPE_CHECKING:
    from transformers import (
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
        TrainerCallback,
    )
    from trl import SFTTrainer

    from hf_fsdp_recipes import ShardedCheckpointCallback


@contextlib.contextmanager
def explained(what: str, has_begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn an upstream error into one line that says what failed.

    If `has_begun()` is true, keep the error as it is.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:  # from torch DCP, with each rank's traceback in its text
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError(
            f"the checkpoint does not fit the recipe: {describe(first)}"
        ) from error
    except Exception as error:
        if isinstance(error, RecipeError) or has_begun():
            raise
        raise RecipeError(f"{what}: {describe(error)}") from error


def find_checkpoint(arguments: Arguments) -> str | None:
    """Return the checkpoint to resume from, or None.

    `auto` stands for the latest intact checkpoint, if any. Collective.
    """
    from hf_fsdp_recipes import keep_global_batch, latest_checkpoint
    from hf_fsdp_recipes.saving.directory import read_manifest
    from hf_fsdp_recipes.saving.resume import find_damage_together

    training = arguments.training
    wanted = training.resume_from_checkpoint
    training.resume_from_checkpoint = None
    if wanted in ("auto", "true", "True", True):
        wanted = latest_checkpoint(training.output_dir)
    elif wanted:
        with explained(f"{wanted} cannot be resumed from"):
            damage = find_damage_together(Path(wanted))
        if damage:
            raise CheckpointError(
                f"{wanted} cannot be resumed from: {damage}. Set resume_from_checkpoint: auto."
            )
    if not wanted:
        return None
    keep_global_batch(training, wanted)
    distributed.print_main(f"resuming from {wanted}")
    manifest = read_manifest(Path(wanted)) or {}
    before = manifest.get("world_size")
    if arguments.is_streamed and before not in (None, training.world_size):
        distributed.print_main(
            f"note: {before} ranks saved the checkpoint. Where a rank reads files of its own, rows "
            "may repeat."
        )
    return wanted


def load_tokenizer(arguments: Arguments) -> "PreTrainedTokenizerBase | ProcessorMixin":
    """Return the processor of an image-text model if it has one, or else the recipe's tokenizer.

    SFTTrainer sets its end token and chat template.
    """
    from transformers import AutoProcessor, AutoTokenizer

    own = arguments.model.model_name_or_path or arguments.recipe.config_name
    name = arguments.recipe.tokenizer_name or own
    options: dict[str, Any] = {"trust_remote_code": arguments.training.trust_remote_code}
    if name == own:
        options["revision"] = arguments.model.model_revision
    with explained(f"the tokenizer of {name} cannot be loaded"):
        with contextlib.suppress(OSError, ValueError):
            return AutoProcessor.from_pretrained(name, **options)
        return AutoTokenizer.from_pretrained(name, **options)


def build_model(arguments: Arguments) -> "PreTrainedModel":
    """Return a pretrained model, or a new model with random weights. Collective.

    The weights of a pretrained model are read when it is sharded.
    """
    import transformers
    from trl import get_quantization_config

    from hf_fsdp_recipes import load_model
    from hf_fsdp_recipes.loading.load_model import find_class

    model = arguments.model
    training = arguments.training
    recipe = arguments.recipe
    options: dict[str, Any] = {
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": training.trust_remote_code,
        **(training.model_init_kwargs or {}),
    }
    training.model_init_kwargs = None  # SFTTrainer would warn that it ignores them
    if recipe.config_name:
        transformers.set_seed(training.seed)
        config = transformers.AutoConfig.from_pretrained(recipe.config_name)
        if recipe.config_overrides:
            config.update_from_string(recipe.config_overrides)
        return transformers.AutoModelForCausalLM.from_config(config, **options)
    source = {"revision": model.model_revision}
    # Unlike a config's class, this needs no code of the model.
    settings, _ = distributed.run_on_main(
        lambda: transformers.PreTrainedConfig.get_config_dict(model.model_name_or_path, **source)
    )
    auto_class = find_class(settings.get("architectures"))
    quantization = get_quantization_config(model)
    if quantization:
        options["quantization_config"] = quantization
    return load_model(model.model_name_or_path, auto_class=auto_class, **source, **options)


def announce_model() -> "TrainerCallback":
    """Return a callback that prints one line about the sharded model before it is trained."""
    from transformers import TrainerCallback

    class ModelLine(TrainerCallback):
        def on_train_begin(self, *_: object, **kwargs: Any) -> None:
            distributed.print_main(describe_model(kwargs["model"]))

    return ModelLine()


def describe_model(model: Any) -> str:
    """Return a model's class, how many of its parameters are trained, and its FSDP units."""
    from hf_fsdp_recipes.training.units import units_of

    num_trained = 0
    num_parameters = 0
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            size = parameter.numel()
            if hasattr(module, "quant_state"):  # bitsandbytes packs two weights into a byte
                size = 2 * parameter.nbytes
            num_parameters += size
            num_trained += size * parameter.requires_grad
    units = Counter(type(unit).__name__ for unit in units_of(model))
    found = ", ".join(f"{count} x {name}" for name, count in units.items()) or "none"
    return (
        f"{type(model).__name__}: trains {num_trained:,} of {num_parameters:,} parameters; "
        f"FSDP units: {found}"
    )


def build_trainer(arguments: Arguments, saving: "ShardedCheckpointCallback") -> "SFTTrainer":
    """Return TRL's trainer with this package's callbacks. Every rank calls this."""
    from trl import SFTTrainer, get_peft_config

    from hf_fsdp_recipes import MetricsCallback, sharded_optimizer
    from hf_fsdp_recipes.training.adjustments import adjust
    from hf_fsdp_recipes.training.labels import check_labels

    training = arguments.training
    tokenizer = load_tokenizer(arguments)
    # Rank 0 fills the cache of the datasets library.
    with training.main_process_first(desc="reading rows"):
        train, evaluation = read_rows(arguments)
    name = arguments.model.model_name_or_path or arguments.recipe.config_name
    with explained(f"{name} cannot be built"):
        model = build_model(arguments)
    adapter = get_peft_config(arguments.model)
    if adapter:
        adapter.revision = arguments.model.model_revision  # merging needs it
    with explained("SFTTrainer refuses the recipe or its rows"):
        trainer = SFTTrainer(
            model=model,
            args=training,
            train_dataset=train,
            eval_dataset=evaluation,
            processing_class=tokenizer,
            peft_config=adapter,
            callbacks=[
                MetricsCallback(throughput_warmup_steps=arguments.recipe.throughput_warmup_steps),
                announce_model(),
                saving,
            ],
            optimizer_cls_and_kwargs=sharded_optimizer(training),
        )
    # Trainer passes its logs to one callback after the other. MetricsCallback adds to them before
    # `report_to` sends them.
    trainer.callback_handler.callbacks.sort(
        key=lambda callback: not isinstance(callback, MetricsCallback)
    )
    if not training.dataset_kwargs:  # with skip_prepare_dataset, rows may have no labels yet
        check_labels("training", train, trainer.train_dataset, training)
        if trainer.eval_dataset is not None:
            check_labels("evaluation", evaluation, trainer.eval_dataset, training)
    adjust(trainer, arguments.is_streamed)
    return trainer


def main(arguments: Arguments) -> None:
    """Run the recipe. Every rank calls this."""
    from hf_fsdp_recipes import ShardedCheckpointCallback

    training = arguments.training
    recipe = arguments.recipe
    check_arguments(arguments)
    check_targets(arguments)
    export_dir = Path(training.output_dir) / "export" if recipe.export else None
    saving = ShardedCheckpointCallback(
        export_dir=export_dir, export_dtype=recipe.export_dtype, merge_adapter=recipe.merge_adapter
    )
    checkpoint = find_checkpoint(arguments)
    trainer = build_trainer(arguments, saving)
    with explained("training cannot begin", lambda: saving.has_begun):
        trainer.train(resume_from_checkpoint=checkpoint)
    if training.push_to_hub and saving.exported and distributed.is_main():
        from huggingface_hub import HfApi

        HfApi(token=training.hub_token).upload_folder(
            repo_id=trainer.hub_model_id, folder_path=saving.exported[0]
        )
    trainer.accelerator.end_training()


if __name__ == "__main__":
    # No recipe can avoid them: TRL sets this field, and PEFT reads the property, by a name that
    # transformers has replaced in 5.23.
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing` is deprecated")
    with distributed.exit_with_message():
        patches.enable_cpu_ranks()
        main(parse_arguments(sys.argv[1:]))
