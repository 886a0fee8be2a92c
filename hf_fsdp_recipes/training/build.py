"""Joins loader, data, callbacks and TRL into one SFTTrainer, and ends a run with an export or an error.

Everything that can be checked is checked before the model is loaded.
"""

from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.callback import ShardedCheckpointCallback
from hf_fsdp_recipes.checkpointing.layout import check_named, latest_checkpoint, quarantine_incomplete
from hf_fsdp_recipes.checkpointing.resume import keep_global_batch
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export.from_checkpoint import export_checkpoint
from hf_fsdp_recipes.export.from_model import export_model
from hf_fsdp_recipes.export.hub import read_target
from hf_fsdp_recipes.export.verify_files import has_weights
from hf_fsdp_recipes.export.verify_logits import check_logits
from hf_fsdp_recipes.metrics.metrics_callback import MetricsCallback, place_before_reporters
from hf_fsdp_recipes.metrics.run_name import default_run_name
from hf_fsdp_recipes.patches import cpu_ranks
from hf_fsdp_recipes.training import dtypes, feature_checks
from hf_fsdp_recipes.training.arguments import Arguments
from hf_fsdp_recipes.training.data.dataset import load_rows
from hf_fsdp_recipes.training.data.tokenize import TrainingRows
from hf_fsdp_recipes.training.model import build_model
from hf_fsdp_recipes.training.tokenizer import load_tokenizer

MAX_VERIFIED_PARAMETERS = 3_000_000_000  # rank 0 loads the export whole to compare


def build_trainer(arguments: Arguments) -> Any:
    """Build a TRL SFTTrainer that loads, trains and saves sharded.

    Collective: every rank must call this, with the same arguments.

    Returns:
        The trainer; `train()` shards the model and fills it.

    Raises:
        DataError, LoadError, TemplateError: the same on every rank.
    """
    from trl import get_peft_config

    cpu_ranks.enable()
    tokenizer = load_tokenizer(arguments)
    rows = load_rows(arguments, tokenizer)
    model = build_model(arguments, tokenizer)
    feature_checks.compile_blocks(arguments)
    trainer_class, callbacks = _trainer_class(arguments, rows)
    name = arguments.model.model_name_or_path or arguments.recipe.config_name or "model"
    arguments.training.run_name = arguments.training.run_name or default_run_name(arguments.training, name)
    trainer = trainer_class(
        model=model,
        args=arguments.training,
        train_dataset=rows.train,
        eval_dataset=rows.evaluation,
        processing_class=tokenizer,
        peft_config=get_peft_config(arguments.model),
        callbacks=callbacks,
        optimizer_cls_and_kwargs=feature_checks.sharded_optimizer(arguments.training),
    )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    dtypes.settle(trainer.model, getattr(plugin, "fsdp_version", None), arguments.recipe.adapter_dtype)
    place_before_reporters(trainer)
    return trainer


def _trainer_class(arguments: Arguments, rows: TrainingRows) -> tuple[Any, list[Any]]:
    """Return SFTTrainer, or the one for streams, and the callbacks that go with it."""
    from trl import SFTTrainer

    trainer_class, checkpoint_files, callbacks = SFTTrainer, None, []
    if isinstance(rows.train, IterableDataset):
        from hf_fsdp_recipes.training.data.stream_trainer import PositionCallback, StreamTrainer

        position = PositionCallback(rows.train)
        trainer_class, checkpoint_files, callbacks = StreamTrainer, position.checkpoint_files, [position]
    hub = read_target(arguments.training)
    # Trainer would ask the Hub for a repository before training, and end the run if that fails.
    arguments.training.push_to_hub = False
    is_asynchronous = arguments.recipe.asynchronous_save
    callbacks.append(ShardedCheckpointCallback(asynchronous=is_asynchronous, hub=hub, rank_files=checkpoint_files))
    callbacks.append(dtypes.MastersCallback(arguments.recipe.adapter_dtype))
    if arguments.recipe.report:
        callbacks.append(MetricsCallback(throughput_warmup_steps=arguments.recipe.throughput_warmup_steps))
    return trainer_class, callbacks


def find_resume(arguments: Arguments) -> str | None:
    """Return the checkpoint to resume from: a path as given, or with `auto` the newest complete one, if any.

    Collective: every rank must call this; rank 0 looks (checksums of the newest are read).

    Raises:
        CheckpointError: a path was given and there is no complete checkpoint.
    """
    wish = arguments.training.resume_from_checkpoint
    if wish in (None, False, "", "no"):
        return None
    found = distributed.run_on_main(lambda: _find_checkpoint(str(wish), arguments.training.output_dir))
    if found is None:
        distributed.print_main(
            f"resume: no complete checkpoint in {arguments.training.output_dir}; starting from step 0"
        )
        return None
    distributed.print_main(f"resume: from {found}")
    with distributed.sync_errors():
        keep_global_batch(arguments.training, found)
    return str(found)


def _find_checkpoint(wish: str, output_dir: str) -> Path | None:
    """Look for what was asked for; with `auto`, move aside what cannot be resumed from. Main rank only."""
    if wish.lower() not in ("auto", "true"):
        check_named(Path(wish))
        return Path(wish)
    found = latest_checkpoint(output_dir)
    quarantine_incomplete(output_dir)
    return found


def _export_merged(trainer: Any, arguments: Arguments, adapter: Path, common: dict[str, Any]) -> None:
    """Write `<output_dir>/export_merged`. Collective: every rank must call this."""
    merged = Path(arguments.training.output_dir) / "export_merged"
    if not arguments.model.load_in_4bit:
        export_model(trainer.model, merged, merge_adapter=True, **common)
        return
    base, size = arguments.model.model_name_or_path, common["max_shard_size"]
    distributed.print_main(f"merge: into {base} as it is in its files; the 4-bit weights of training are not exported")
    export_checkpoint(adapter, merged, base_model=base, dtype=common["dtype"], max_shard_size=size, merge_adapter=True)


def _is_verified(trainer: Any, wish: str) -> bool:
    if wish != "auto":
        return wish == "logits"
    return sum(parameter.numel() for parameter in trainer.model.parameters()) < MAX_VERIFIED_PARAMETERS


def finish(trainer: Any, arguments: Arguments) -> Path | None:
    """Export the trained model into `<output_dir>/export`, and the merged one where asked for; nothing if not wanted.

    Collective: every rank must call this, after training.

    Raises:
        ExportError: the same on every rank; a run that exports never ends well without weights in `export/`.
    """
    output = Path(arguments.training.output_dir)
    if not arguments.recipe.export:
        distributed.print_main("not exported: the recipe says export: false")
        return None
    common: dict[str, Any] = {
        "dtype": arguments.recipe.export_dtype,
        "max_shard_size": arguments.recipe.export_max_shard_size,
        "tokenizer": trainer.processing_class,
    }
    exported = export_model(trainer.model, output / "export", **common)
    if arguments.recipe.merge_adapter:
        _export_merged(trainer, arguments, exported, common)
    if _is_verified(trainer, arguments.recipe.verify_export):
        difference = check_logits(trainer.model, exported, trainer.processing_class)
        distributed.print_main(
            f"verified: the export's logits differ from the trained model's by {difference:.1e} at most"
        )
    with distributed.sync_errors():
        if not has_weights(exported):
            raise ExportError(f"{exported} holds no weights after the export. The checkpoints in {output} are intact.")
    distributed.print_main(f"exported: {exported}")
    _push(trainer, exported)
    return exported


def _push(trainer: Any, export: Path) -> None:
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ShardedCheckpointCallback):
            callback.push_export(export)
