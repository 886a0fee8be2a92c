"""Joins loader, data, callbacks and TRL into one SFTTrainer, and ends a run with an export or an error.

Everything that can be checked is checked before the model is loaded.
"""

from pathlib import Path
from typing import Any

from hf_fsdp_recipes import ranks
from hf_fsdp_recipes.errors import DataError, ExportError, LoadError
from hf_fsdp_recipes.launch import cpu
from hf_fsdp_recipes.load.meta_loader import load_model
from hf_fsdp_recipes.measure.callback import MetricsCallback, place_before_reporters
from hf_fsdp_recipes.measure.run_name import default_run_name
from hf_fsdp_recipes.save.callback import ShardedCheckpointCallback
from hf_fsdp_recipes.save.export import export_model
from hf_fsdp_recipes.save.export_check import has_weights
from hf_fsdp_recipes.save.layout import check_named, latest_checkpoint, set_aside_torn
from hf_fsdp_recipes.save.logits_check import check_logits
from hf_fsdp_recipes.save.resume import keep_global_batch
from hf_fsdp_recipes.train.arguments import Arguments
from hf_fsdp_recipes.train.data import load_data

MAX_VERIFIED_PARAMETERS = 3_000_000_000  # rank 0 loads the export whole to compare


def build_trainer(arguments: Arguments) -> Any:
    """Build a TRL SFTTrainer that loads, trains and saves sharded.

    Collective: every rank must call this, with the same arguments.

    Returns:
        The trainer; `train()` shards the model and fills it.

    Raises:
        DataError, LoadError, TemplateError: the same on every rank.
    """
    from trl import SFTTrainer, get_peft_config, get_quantization_config

    cpu.enable()
    training, model_arguments = arguments.training, arguments.model
    tokenizer = load_tokenizer(arguments)
    train, evaluation = load_data(arguments)
    _check_chat_template(train, tokenizer, training)
    model = load_model(
        model_arguments.model_name_or_path,
        source=arguments.recipe.load_source,  # type: ignore[arg-type]  # one of the field's choices
        dtype=model_arguments.dtype,
        revision=model_arguments.model_revision,
        attn_implementation=model_arguments.attn_implementation,
        trust_remote_code=getattr(training, "trust_remote_code", False),
        **_optional("quantization_config", get_quantization_config(model_arguments)),
        **(training.model_init_kwargs or {}),
    )
    training.model_init_kwargs = None
    training.run_name = training.run_name or default_run_name(training, model_arguments.model_name_or_path)
    trainer = SFTTrainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_arguments),
        callbacks=_callbacks(arguments),
    )
    place_before_reporters(trainer)
    return trainer


def _optional(key: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {key: value}


def _callbacks(arguments: Arguments) -> list[Any]:
    callbacks: list[Any] = [ShardedCheckpointCallback(asynchronous=arguments.recipe.asynchronous_save)]
    if arguments.recipe.report:
        callbacks.append(MetricsCallback())
    return callbacks


def load_tokenizer(arguments: Arguments) -> Any:
    """Load the model's tokenizer on rank 0 and hand it to all. Collective: every rank must call this."""
    from transformers import AutoTokenizer

    tokenizer = None
    with ranks.agreed():
        if ranks.is_main():
            try:
                tokenizer = AutoTokenizer.from_pretrained(
                    arguments.model.model_name_or_path,
                    revision=arguments.model.model_revision,
                    trust_remote_code=getattr(arguments.training, "trust_remote_code", False),
                )
            except Exception as error:
                raise LoadError(
                    f"no tokenizer at {arguments.model.model_name_or_path}: {str(error).splitlines()[0]} Remedy: check the "
                    f"name; a directory needs config.json, safetensors and tokenizer.json."
                ) from error
    return ranks.broadcast_object(tokenizer)


def _check_chat_template(rows: Any, tokenizer: Any, training: Any) -> None:
    columns = rows.column_names or []
    if "messages" in columns and tokenizer.chat_template is None and training.chat_template_path is None:
        raise DataError(
            "the dataset holds messages and the tokenizer has no chat template. Remedy: chat_template_path (a .jinja file or "
            "a model that has one), or prompt/completion data."
        )


def find_resume(arguments: Arguments) -> str | None:
    """Return the checkpoint to resume from: a path as given, or with `auto` the newest complete one, if any.

    Collective: every rank must call this; rank 0 looks (checksums of the newest are read).

    Raises:
        CheckpointError: a path was given and there is no complete checkpoint.
    """
    wish = arguments.training.resume_from_checkpoint
    if wish in (None, False, "", "no"):
        return None
    found = None
    with ranks.agreed():
        if ranks.is_main():
            found = _find_checkpoint(str(wish), arguments.training.output_dir)
    found = ranks.broadcast_object(found)
    if found is None:
        ranks.print_main(f"resume: no complete checkpoint in {arguments.training.output_dir}; starting from step 0")
        return None
    ranks.print_main(f"resume: from {found}")
    with ranks.agreed():
        keep_global_batch(arguments.training, found)
    return str(found)


def _find_checkpoint(wish: str, output_dir: str) -> Path | None:
    """Look for what was asked for; with `auto`, move aside what cannot be resumed from. Main rank only."""
    if wish.lower() not in ("auto", "true"):
        check_named(Path(wish))
        return Path(wish)
    found = latest_checkpoint(output_dir)
    set_aside_torn(output_dir)
    return found


def _is_verified(trainer: Any, wish: str) -> bool:
    if wish != "auto":
        return wish == "logits"
    return sum(parameter.numel() for parameter in trainer.model.parameters()) < MAX_VERIFIED_PARAMETERS


def finish(trainer: Any, arguments: Arguments) -> Path:
    """Export the trained model into `<output_dir>/export`, and the merged one where asked for.

    Collective: every rank must call this, after training.

    Raises:
        ExportError: the same on every rank; a run never ends well without weights in `export/`.
    """
    output = Path(arguments.training.output_dir)
    common: dict[str, Any] = {
        "dtype": arguments.recipe.export_dtype,
        "max_shard_size": arguments.recipe.export_max_shard_size,
        "tokenizer": trainer.processing_class,
    }
    exported = export_model(trainer.model, output / "export", **common)
    if arguments.recipe.merge_adapter:
        export_model(trainer.model, output / "export_merged", merge_adapter=True, **common)
    if _is_verified(trainer, arguments.recipe.verify_export):
        difference = check_logits(trainer.model, exported, trainer.processing_class)
        ranks.print_main(f"verified: the export's logits differ from the trained model's by {difference:.1e} at most")
    with ranks.agreed():
        if not has_weights(exported):
            raise ExportError(f"{exported} holds no weights after the export. The checkpoints in {output} are intact.")
    ranks.print_main(f"exported: {exported}")
    return exported
