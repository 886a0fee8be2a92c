"""Builds the SFTTrainer of a recipe, finds what to resume from, and exports the trained model."""

import json
import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.callback import ShardedCheckpointCallback
from hf_fsdp_recipes.checkpointing.layout import STATE_FILE, quarantine_incomplete
from hf_fsdp_recipes.checkpointing.lock import lock_directory
from hf_fsdp_recipes.checkpointing.mirror import Mirror, fetch_checkpoint
from hf_fsdp_recipes.checkpointing.resume import keep_global_batch
from hf_fsdp_recipes.checkpointing.run_identity import EXPORT, EXPORTS, MERGED_EXPORT, claim_directory, read_run
from hf_fsdp_recipes.checkpointing.verification import check_named, latest_checkpoint
from hf_fsdp_recipes.configs.launch import check_wrap_classes
from hf_fsdp_recipes.errors import CheckpointError, ExportError, RecipeError, SaveError, summarize
from hf_fsdp_recipes.export.export_directory import check_target
from hf_fsdp_recipes.export.from_checkpoint import export_checkpoint
from hf_fsdp_recipes.export.from_model import check_export, export_model
from hf_fsdp_recipes.export.hub import read_target
from hf_fsdp_recipes.export.verify_files import has_weights
from hf_fsdp_recipes.export.verify_logits import check_logits
from hf_fsdp_recipes.metrics.metrics_callback import MetricsCallback, place_before_reporters
from hf_fsdp_recipes.patches import cpu_ranks
from hf_fsdp_recipes.training import dtypes, feature_checks
from hf_fsdp_recipes.training.arguments import Arguments, is_streaming
from hf_fsdp_recipes.training.model import build_model
from hf_fsdp_recipes.training.sharded_optimizer import sharded_optimizer
from hf_fsdp_recipes.training.tokenizer import load_tokenizer, tokenizer_for_rows
from hf_fsdp_recipes.training.value_checks import name_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState
    from trl import SFTConfig, SFTTrainer

    from hf_fsdp_recipes.training.data.preparation import TrainingRows

MAX_VERIFIED_PARAMETERS = 3_000_000_000  # to compare logits, rank 0 loads the complete export


def build_trainer(arguments: Arguments) -> "SFTTrainer":
    """Build a TRL SFTTrainer that loads, trains and saves sharded.

    Arguments and data are checked before the model is loaded. Collective: every rank must call this, with the same
    arguments.

    Returns:
        The trainer. `train()` shards the model and reads its weights.

    Raises:
        DataError, LoadError, TemplateError: the same on every rank.
    """
    cpu_ranks.enable()
    # Imported after `enable`, which silences what bitsandbytes prints on every CPU rank when TRL imports it.
    from trl import get_peft_config

    tokenizer = load_tokenizer(arguments)
    rows = load_rows(arguments, tokenizer)
    arguments.training.recipe_facts = _recipe_facts(arguments, rows)
    model = build_model(arguments, tokenizer)
    if arguments.recipe.verify_export == "auto":  # now, because every rank can still count all parameters
        is_small = model.num_parameters() < MAX_VERIFIED_PARAMETERS
        arguments.recipe.verify_export = "logits" if is_small else "off"
    check_wrap_classes(type(module).__name__ for module in model.modules())
    feature_checks.enable_block_compilation(arguments)
    feature_checks.use_cores_for_offload(arguments.training)
    trainer_class, callbacks = _trainer_class(arguments, rows)
    name = arguments.model.model_name_or_path or arguments.recipe.config_name or "model"
    arguments.training.run_name = arguments.training.run_name or default_run_name(arguments.training, name)
    try:
        trainer = trainer_class(
            model=model,
            args=arguments.training,
            train_dataset=rows.train,
            eval_dataset=rows.evaluation,
            processing_class=tokenizer,
            peft_config=get_peft_config(arguments.model),
            callbacks=callbacks,
            optimizer_cls_and_kwargs=sharded_optimizer(arguments.training),
        )
    except (ImportError, TypeError, ValueError, RuntimeError) as error:  # what Trainer refuses only now
        reason = summarize(error)
        values = vars(arguments.training) | {"report_to": ",".join(arguments.training.report_to)}
        raise RecipeError(
            f"Trainer refuses the arguments: {name_settings(reason, values)}{type(error).__name__}: {reason}. Correct the "
            f"recipe."
        ) from error
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    dtypes.set_reduction_dtype(trainer.accelerator, arguments.recipe.reduce_dtype)
    dtypes.cast_trainable(trainer.model, getattr(plugin, "fsdp_version", None), arguments.recipe.adapter_dtype)
    place_before_reporters(trainer)
    if arguments.recipe.export:
        _check_exports(trainer.model, arguments)
    return trainer


def load_rows(arguments: Arguments, tokenizer: "PreTrainedTokenizerBase") -> "TrainingRows":
    """Load the rows a run trains and evaluates on, and set SFTTrainer's arguments so that it prepares nothing.

    Collective: every rank must call this. Rank 0 prepares the rows and the others read its cache, waiting without a
    timeout. Rank 0 prints how many rows were dropped and truncated.
    """
    from hf_fsdp_recipes.training.data import cache
    from hf_fsdp_recipes.training.data.filtering import print_counts
    from hf_fsdp_recipes.training.data.preparation import prepare
    from hf_fsdp_recipes.training.data.streaming import open_streams

    training = arguments.training

    def load() -> "TrainingRows":
        if cache.is_cache(arguments.script.dataset_name) and not arguments.mixture.datasets:
            return cache.read_cache(arguments, tokenizer)
        for_rows = tokenizer_for_rows(tokenizer, training)
        return open_streams(arguments, for_rows) if is_streaming(arguments) else prepare(arguments, for_rows)

    rows = distributed.main_first(load)
    print_counts(rows.counts, training.max_length)
    training.dataset_kwargs = (training.dataset_kwargs or {}) | {"skip_prepare_dataset": True}
    training.assistant_only_loss = False  # already in the labels; SFTTrainer would ask for messages
    return rows


def default_run_name(training: "SFTConfig", model: str, date: datetime | None = None) -> str:
    """Name a run after its start (default: now), model, nodes, GPUs per node, epochs or steps, and batch size per GPU.

    Source: the log files of AMD's article on FSDP with ROCm, fsdp_training_DATE_modelVersion_#node_#gpuPerNode_#epoch_#batchSize.
    """
    gpus_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_nodes = max(1, int(os.environ.get("WORLD_SIZE", "1")) // gpus_per_node)
    length = f"{training.max_steps}steps" if training.max_steps > 0 else f"{training.num_train_epochs:g}"
    return (
        f"fsdp_training_{date or datetime.now():%Y%m%d-%H%M}_{PurePosixPath(model).name}_{num_nodes}_{gpus_per_node}"
        f"_{length}_{training.per_device_train_batch_size}"
    )


def _check_exports(model: torch.nn.Module, arguments: Arguments) -> None:
    """Check before training that the exports can be written. Collective: every rank must call this."""
    output, options = Path(arguments.training.output_dir), _export_options(arguments)
    check_export(model, output / EXPORT, **options)
    if not arguments.recipe.merge_adapter:
        return
    if arguments.model.load_in_4bit:  # merged from files, so its size is not the model's
        distributed.run_on_main(lambda: check_target(output / MERGED_EXPORT, options["max_shard_size"]))
    else:
        check_export(model, output / MERGED_EXPORT, merge_adapter=True, **options)


def _export_options(arguments: Arguments) -> dict[str, Any]:
    recipe = arguments.recipe
    return {"dtype": recipe.export_dtype, "max_shard_size": recipe.export_max_shard_size}


def _recipe_facts(arguments: Arguments, rows: "TrainingRows") -> dict[str, Any]:
    """Return what checkpoints record of the recipe in addition to Trainer's arguments."""
    facts: dict[str, Any] = {}
    for part in (arguments.script, arguments.model, arguments.recipe, arguments.mixture):
        facts |= asdict(part)
    if not isinstance(rows.train, IterableDataset):
        facts["num_train_rows"] = len(rows.train)
    return json.loads(json.dumps(facts, default=str))


def _trainer_class(arguments: Arguments, rows: "TrainingRows") -> "tuple[type[SFTTrainer], list[TrainerCallback]]":
    """Return the trainer class for these rows and the run's callbacks."""
    from hf_fsdp_recipes.training.data.stream_trainer import PositionCallback, StreamTrainer
    from hf_fsdp_recipes.training.device_metrics import DeviceMetricsTrainer

    trainer_class, rank_files = DeviceMetricsTrainer, None
    callbacks: list[TrainerCallback] = []
    if isinstance(rows.train, IterableDataset):
        position = PositionCallback(rows.train)
        trainer_class, rank_files, callbacks = StreamTrainer, position.checkpoint_files, [position]
    hub = read_target(arguments.training)
    # With push_to_hub, Trainer creates the repository before training and ends the run if that fails.
    arguments.training.push_to_hub = False
    recipe = arguments.recipe
    callbacks.append(
        ShardedCheckpointCallback(
            asynchronous=recipe.asynchronous_save,
            hub=hub,
            previous_run=recipe.previous_run,
            checkpoint_mirror=recipe.checkpoint_mirror,
            rank_files=rank_files,
        )
    )
    callbacks.append(dtypes.MasterWeightsCallback(recipe.adapter_dtype))
    if recipe.report:
        callbacks.append(MetricsCallback(throughput_warmup_steps=recipe.throughput_warmup_steps))
    return trainer_class, callbacks


def find_resume(arguments: Arguments) -> str | None:
    """Return the checkpoint to resume from, or None to start at step 0, and lock the output directory until the process exits.

    `resume_from_checkpoint` is a path, a URL to download from, or `auto` for the newest complete checkpoint, if any, in
    `output_dir` or the mirror. Keeps the global batch size if the number of ranks has changed. Collective: every rank must
    call this; each verifies its part of the checkpoint.

    Raises:
        CheckpointError: the path is not a complete checkpoint, or the output directory cannot be written, is in use or holds
            another run's files.
    """
    output_dir, url = arguments.training.output_dir, arguments.recipe.checkpoint_mirror
    mirror = Mirror(url)
    requested = arguments.training.resume_from_checkpoint
    is_requested = requested not in (None, False, "", "no")
    with distributed.sync_errors(distributed.patient_group()):
        if distributed.is_main():
            lock_directory(output_dir)
    mirror.check(output_dir)
    checkpoint = _find_checkpoint(str(requested), output_dir, url) if is_requested else None

    def claim() -> None:
        state = _read_state(checkpoint)
        mirror.claim(read_run(state), state.global_step)
        claim_directory(output_dir, state, arguments.recipe.previous_run)

    distributed.run_on_main(claim, distributed.patient_group())
    if checkpoint is None:
        if is_requested:
            places = [output_dir, url] if _is_auto(str(requested)) else [str(requested)]
            where = " and ".join(filter(None, places))
            distributed.print_main(f"resume: no complete checkpoint in {where}; starting from step 0")
        return None
    distributed.print_main(f"resume: from {checkpoint}")
    with distributed.sync_errors():
        keep_global_batch(arguments.training, checkpoint)
    return str(checkpoint)


def _is_auto(requested: str) -> bool:
    return requested.lower() in ("auto", "true")


def _find_checkpoint(requested: str, output_dir: str, mirror: str | None) -> Path | None:
    if _is_auto(requested):
        newest = latest_checkpoint(output_dir)
        distributed.run_on_main(lambda: quarantine_incomplete(output_dir))
        return newest if mirror is None else fetch_checkpoint(mirror, output_dir, newest)
    if "://" in requested or Path(requested).name == "auto":
        return fetch_checkpoint(requested, output_dir)
    check_named(Path(requested))
    return Path(requested)


def _read_state(checkpoint: Path | None) -> "TrainerState":
    from transformers import TrainerState

    if checkpoint is None:
        return TrainerState()
    try:
        return TrainerState.load_from_json(str(checkpoint / STATE_FILE))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / STATE_FILE} cannot be read: {error}. Use another checkpoint.") from error


def train(trainer: "SFTTrainer", checkpoint: str | None) -> SaveError | None:
    """Train; return the error of the last save if it failed, so that the weights can still be exported.

    Collective: every rank must call this.
    """
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except SaveError as error:
        return error
    return None


def finish(trainer: "SFTTrainer", arguments: Arguments) -> Path | None:
    """Export the trained model to `<output_dir>/export`, then verify and push it if the recipe says so.

    Collective: every rank must call this, after training.

    Returns:
        The export's directory, or None with `export: false`.

    Raises:
        ExportError: on every rank, if the export fails or does not match the trained model.
    """
    output = Path(arguments.training.output_dir)
    callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, ShardedCheckpointCallback))
    if not arguments.recipe.export:
        distributed.print_main("not exported: the recipe sets export: false")
        return None
    exports = [output / name for name in EXPORTS[: 1 + arguments.recipe.merge_adapter]]
    if all(callback.has_exported(export) for export in exports):
        callback.upload_exports(*exports)
        return output / EXPORT
    options = _export_options(arguments) | {"use_free_name": True}
    export = export_model(trainer.model, output / EXPORT, tokenizer=trainer.processing_class, **options)
    merged = [_export_merged(trainer, arguments, export, options)] if arguments.recipe.merge_adapter else []
    with distributed.sync_errors():
        if not has_weights(export):
            raise ExportError(f"{export} has no weights after the export. The checkpoints in {output} are intact.")
    distributed.print_main(f"exported: {export}")
    if arguments.recipe.verify_export == "logits":
        difference = check_logits(trainer.model, export, trainer.processing_class)
        distributed.print_main(
            f"verified: the export's logits differ from the trained model's by {difference:.1e} at most"
        )
    callback.push_export(export)
    callback.upload_exports(export, *merged)
    return export


def _export_merged(trainer: "SFTTrainer", arguments: Arguments, adapter: Path, options: dict[str, Any]) -> Path:
    """Write `<output_dir>/export_merged`. Collective: every rank must call this."""
    merged = Path(arguments.training.output_dir) / MERGED_EXPORT
    if not arguments.model.load_in_4bit:
        tokenizer = trainer.processing_class
        return export_model(trainer.model, merged, merge_adapter=True, tokenizer=tokenizer, **options)
    base = arguments.model.model_name_or_path
    distributed.print_main(f"merge: into the original weights of {base}, not the 4-bit ones of training")
    return export_checkpoint(adapter, merged, base_model=base, merge_adapter=True, **options)
