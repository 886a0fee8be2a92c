"""Builds the trainer of a recipe, finds the checkpoint to resume from, and exports the trained model."""

import json
import os
import tempfile
import uuid
from dataclasses import asdict
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.callback import ShardedCheckpointCallback
from hf_fsdp_recipes.checkpointing.download import fetch_checkpoint
from hf_fsdp_recipes.checkpointing.layout import STATE_FILE, quarantine_incomplete
from hf_fsdp_recipes.checkpointing.lock import lock_directory
from hf_fsdp_recipes.checkpointing.mirror import Mirror
from hf_fsdp_recipes.checkpointing.resume import keep_global_batch
from hf_fsdp_recipes.checkpointing.run_identity import EXPORT, EXPORTS, MERGED_EXPORT, claim_directory, read_run
from hf_fsdp_recipes.checkpointing.run_inputs import describe_rows
from hf_fsdp_recipes.checkpointing.verification import check_named, latest_checkpoint
from hf_fsdp_recipes.configs.launch import check_wrap_classes
from hf_fsdp_recipes.environment import fsdp_version
from hf_fsdp_recipes.errors import CheckpointError, ExportError, LoadError, RecipeError, SaveError, summarize
from hf_fsdp_recipes.export.export_directory import check_target
from hf_fsdp_recipes.export.from_checkpoint import export_checkpoint
from hf_fsdp_recipes.export.from_model import check_export, export_model
from hf_fsdp_recipes.export.hub import read_target
from hf_fsdp_recipes.export.verify_files import has_weights
from hf_fsdp_recipes.export.verify_logits import check_logits
from hf_fsdp_recipes.loading.build_on_meta import resolve_directory
from hf_fsdp_recipes.metrics.metrics_callback import MetricsCallback, place_before_reporters
from hf_fsdp_recipes.patches import cpu_ranks
from hf_fsdp_recipes.training import dtypes, feature_checks
from hf_fsdp_recipes.training.arguments import Arguments, is_prepared, is_streaming
from hf_fsdp_recipes.training.model import build_model, build_reference
from hf_fsdp_recipes.training.sharded_optimizer import sharded_optimizer
from hf_fsdp_recipes.training.tokenizer import load_tokenizer, tokenizer_for_rows
from hf_fsdp_recipes.training.trainers import find_kind, load_rewards, needs_reference
from hf_fsdp_recipes.training.value_checks import name_settings

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
    from trl import SFTConfig

    from hf_fsdp_recipes.training.data.preparation import TrainingRows

# By default, logits of larger models are not compared, because rank 0 would have to load the complete export.
MAX_VERIFIED_PARAMETERS = 3_000_000_000


def build_trainer(arguments: Arguments) -> "Trainer":
    """Build a recipe's trainer, which loads, trains and saves the model in shards.

    Arguments and data are checked before the model is loaded. Collective: every rank must call this, with the same
    arguments. For your own scripts, `load_model` and `ShardedCheckpointCallback` are simpler.

    Args:
        arguments: the result of `hf_fsdp_recipes.training.arguments.parse_arguments` for a recipe's command line, such as
            `parse_arguments(["--config", "my_recipe.yaml", "--max_steps", "10"], trainer="sft")`. `trainer` is sft, dpo, kto,
            reward or grpo.

    Returns:
        The trainer. `train()` shards the model and reads its weights.

    Raises:
        RecipeError: this class or a subclass such as DataError or LoadError, on every rank. The message says what to change.
    """
    cpu_ranks.enable()
    # Import TRL after `enable`: TRL imports bitsandbytes, which would otherwise print a message on every CPU rank.
    from trl import get_peft_config

    from hf_fsdp_recipes.training.data.image_rows import load_processor

    tokenizer = load_tokenizer(arguments)
    rows = load_rows(arguments, tokenizer)
    processor = load_processor(arguments, tokenizer) if rows.has_images else tokenizer
    arguments.training.recipe_facts = _recipe_facts(arguments, rows)
    kind = find_kind(arguments.training)
    specific: dict[str, object] = {"reward_funcs": load_rewards(arguments)} if kind.name == "grpo" else {}
    model = build_model(arguments, tokenizer)
    if needs_reference(arguments):
        specific["ref_model"] = build_reference(model, arguments, tokenizer)
    peft_config = get_peft_config(arguments.model)
    if kind.name != "grpo":  # GRPOTrainer builds its reference model with these arguments
        arguments.training.model_init_kwargs = None
    _pass_revision(arguments, peft_config)
    if arguments.recipe.verify_export == "auto":  # decide before sharding, while every rank can count all parameters
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
            processing_class=processor,
            peft_config=peft_config,
            callbacks=callbacks,
            **specific,
        )
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        # Trainer rejects some arguments only when it is created.
        reason = summarize(error)
        values = vars(arguments.training) | {"report_to": ",".join(arguments.training.report_to)}
        raise RecipeError(
            f"Trainer refuses the arguments: {name_settings(reason, values)}{type(error).__name__}: {reason}. Correct the "
            f"recipe."
        ) from error
    trainer.optimizer_cls_and_kwargs = sharded_optimizer(arguments.training)
    if getattr(arguments.training, "precompute_ref_log_probs", False):
        trainer.ref_model = None  # TRL no longer needs this model, but would keep it in memory
    dtypes.cast_trainable(trainer.model, fsdp_version(), arguments.recipe.adapter_dtype)
    place_before_reporters(trainer)
    if arguments.recipe.export:
        _check_exports(trainer.model, arguments)
    return trainer


def _pass_revision(arguments: Arguments, peft_config: "PeftConfig | None") -> None:
    # GRPO's reference model and merges of the adapter load the base model again.
    revision = arguments.model.model_revision
    if revision in (None, "main"):
        return
    if find_kind(arguments.training).name == "grpo":
        arguments.training.model_init_kwargs = {"revision": revision} | (arguments.training.model_init_kwargs or {})
    if peft_config is not None:
        peft_config.revision = revision


def load_rows(arguments: Arguments, tokenizer: "PreTrainedTokenizerBase") -> "TrainingRows":
    """Load the rows of a run, and set arguments so that SFTTrainer does not prepare them again. TRL's other trainers do that.

    Collective: every rank must call this. Rank 0 prepares the rows first; the other ranks wait without a timeout, then load
    them from the cache of `datasets`.
    """
    from hf_fsdp_recipes.training.data import cache
    from hf_fsdp_recipes.training.data.filtering import print_counts
    from hf_fsdp_recipes.training.data.preparation import prepare, read_rows
    from hf_fsdp_recipes.training.data.streaming import open_streams

    training = arguments.training
    run_id = distributed.run_on_main(lambda: uuid.uuid4().hex)

    if find_kind(training).name != "sft":
        rows = distributed.main_first(lambda: read_rows(arguments))
        distributed.print_main(
            f"{len(rows.train):,} rows, tokenized by TRL, which may drop or truncate some without reporting how many"
        )
        return rows

    def load() -> "TrainingRows":
        if is_prepared(arguments.script.dataset_name):
            return cache.read_cache(arguments, tokenizer)
        for_rows = tokenizer_for_rows(tokenizer, training)
        if is_streaming(arguments):
            return open_streams(arguments, for_rows, Path(tempfile.gettempdir(), f"hf-fsdp-evaluation-{run_id}"))
        return prepare(arguments, for_rows)

    rows = distributed.main_first(load)
    print_counts(rows.counts, training.max_length)
    if rows.has_images:
        return rows
    training.dataset_kwargs = (training.dataset_kwargs or {}) | {"skip_prepare_dataset": True}
    training.assistant_only_loss = False  # the labels are masked already; True would make SFTTrainer require messages
    return rows


def default_run_name(training: "SFTConfig", model: str, date: datetime | None = None) -> str:
    """Name a run after its start time (default: now), model, nodes, GPUs per node, epochs or steps, and batch size per GPU.

    Source: the log files of AMD's article on FSDP with ROCm, fsdp_training_DATE_modelVersion_#node_#gpuPerNode_#epoch_#batchSize.
    """
    gpus_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_nodes = max(1, int(os.environ.get("WORLD_SIZE", "1")) // gpus_per_node)
    name = PurePosixPath(model).name.removesuffix(".json")  # a new model is named after its config file
    length = f"{training.max_steps}steps" if training.max_steps > 0 else f"{training.num_train_epochs:g}"
    return (
        f"fsdp_training_{date or datetime.now():%Y%m%d-%H%M}_{name}_{num_nodes}_{gpus_per_node}"
        f"_{length}_{training.per_device_train_batch_size}"
    )


def _check_exports(model: "PreTrainedModel", arguments: Arguments) -> None:
    """Check before training that the exports can be written. Collective."""
    output, is_moved = Path(arguments.training.output_dir), arguments.recipe.previous_run == "archive"
    # With `archive`, another run's exports are moved when training starts, so their names count as free.
    options = _export_options(arguments) | {"use_free_name": is_moved}
    num_bytes = check_export(model, output / EXPORT, **options)
    if not arguments.recipe.merge_adapter:
        return
    if not arguments.model.load_in_4bit:
        check_export(model, output / MERGED_EXPORT, merge_adapter=True, other_bytes=num_bytes, **options)
        return
    base = arguments.model.model_name_or_path

    def find_base() -> Path:
        try:
            return resolve_directory(str(base), {"revision": arguments.model.model_revision})
        except LoadError as error:
            raise ExportError(
                f"merge_adapter with 4-bit weights reads the base model on every node, but {error}"
            ) from error

    directory = distributed.main_first(find_base)

    def check() -> None:  # the merge reads the original weights from files, so take the size from the files
        _check_embeddings(model, directory)
        files = directory.glob("*.safetensors")
        total = num_bytes + sum(file.stat().st_size for file in files)
        size = options["max_shard_size"]
        check_target(output / MERGED_EXPORT, size, total, source=base, use_free_name=is_moved)

    distributed.run_on_main(check)


def _check_embeddings(model: "PreTrainedModel", base: Path) -> None:
    """Raise an ExportError if new tokens have changed the number of embeddings, which the base model's files do not have."""
    before, now = (
        getattr(config.get_text_config(), "vocab_size", None)
        for config in (type(model.config).from_pretrained(base), model.config)
    )
    if before is not None and now is not None and before != now:
        raise ExportError(
            f"merge_adapter with 4-bit weights merges into the base model's files, which have {before:,} embeddings, but new "
            f"tokens have changed the model's to {now:,}. Drop merge_adapter, or add the tokens to the base model first and train "
            f"that."
        )


def _export_options(arguments: Arguments) -> dict[str, Any]:
    recipe = arguments.recipe
    return {"dtype": recipe.export_dtype, "max_shard_size": recipe.export_max_shard_size}


def _recipe_facts(arguments: Arguments, rows: "TrainingRows") -> dict[str, object]:
    """Return the recipe's settings and a description of its rows; checkpoints record both along with Trainer's arguments."""
    from hf_fsdp_recipes.training.data.image_rows import COLUMNS

    facts: dict[str, object] = {}
    for part in (arguments.script, arguments.model, arguments.recipe, arguments.mixture):
        facts |= asdict(part)
    if not isinstance(rows.train, IterableDataset):
        facts |= describe_rows(rows.train.remove_columns([name for name in COLUMNS if name in rows.train.column_names]))
    return dict(json.loads(json.dumps(facts, default=str)))


def _trainer_class(arguments: Arguments, rows: "TrainingRows") -> "tuple[type[Trainer], list[TrainerCallback]]":
    """Return the trainer class for the kind of run and its rows, and the run's callbacks."""
    import trl

    from hf_fsdp_recipes.training.data.stream_trainer import PositionCallback, StreamTrainer
    from hf_fsdp_recipes.training.device_metrics import DeviceMetricsTrainer

    kind, rank_files = find_kind(arguments.training), None
    trainer_class = DeviceMetricsTrainer if kind.name == "sft" else getattr(trl, f"{kind.title}Trainer")
    callbacks: list[TrainerCallback] = []
    if isinstance(rows.train, IterableDataset):
        position = PositionCallback(rows.train)
        trainer_class, rank_files, callbacks = StreamTrainer, position.checkpoint_files, [position]
    hub = read_target(arguments.training)
    # With push_to_hub, Trainer would create the repository before training, and end the run if that fails.
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
    callbacks.append(dtypes.DtypesCallback(recipe.adapter_dtype, recipe.reduce_dtype))
    if recipe.report:
        callbacks.append(MetricsCallback(throughput_warmup_steps=recipe.throughput_warmup_steps))
    return trainer_class, callbacks


def find_resume(arguments: Arguments) -> str | None:
    """Return the checkpoint to resume from, or None to start at step 0, and lock the output directory until the process exits.

    `resume_from_checkpoint` is a path, a URL to download from, or `auto` for the newest complete checkpoint, if any, in
    `output_dir` or the mirror. If the number of ranks or the batch size of a rank has changed, adjusts gradient
    accumulation so that the global batch size stays the same. Collective: every rank must call this; each rank verifies a
    part of the checkpoint.
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
        from transformers import TrainerState

        try:
            state = TrainerState.load_from_json(str(checkpoint / STATE_FILE)) if checkpoint else TrainerState()
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{Path(str(checkpoint), STATE_FILE)} cannot be read: {error}. Use another checkpoint."
            ) from error
        claim_directory(output_dir, state, arguments.recipe.previous_run, is_starting=False)
        mirror.claim(read_run(state), state.global_step, is_starting=False)

    distributed.run_on_main(claim, distributed.patient_group())
    if checkpoint is None:
        if is_requested:
            is_auto = str(requested).lower() in ("auto", "true")
            where = " and ".join(filter(None, [output_dir, url])) if is_auto else requested
            distributed.print_main(f"resume: no complete checkpoint in {where}; starting from step 0")
        return None
    distributed.print_main(f"resume: from {checkpoint}")
    with distributed.sync_errors():
        keep_global_batch(arguments.training, checkpoint)
    return str(checkpoint)


def _find_checkpoint(requested: str, output_dir: str, mirror: str | None) -> Path | None:
    if requested.lower() in ("auto", "true"):
        newest = latest_checkpoint(output_dir)
        distributed.run_on_main(lambda: quarantine_incomplete(output_dir))
        return newest if mirror is None else fetch_checkpoint(mirror, output_dir, newest)
    if "://" in requested or Path(requested).name == "auto":
        return fetch_checkpoint(requested, output_dir)
    check_named(Path(requested))
    return Path(requested)


def train(trainer: "Trainer", checkpoint: str | None) -> SaveError | None:
    """Train the model. If the last save or upload failed, return its error, so that the weights are still exported. Collective."""
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except SaveError as error:
        return error
    return None


def finish(trainer: "Trainer", arguments: Arguments) -> Path | None:
    """Export the trained model to `<output_dir>/export`, verify and push the export if the recipe says so, and return its path.

    Collective: every rank must call this, after training. Returns None with `export: false`.
    """
    output = Path(arguments.training.output_dir)
    callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, ShardedCheckpointCallback))
    if not arguments.recipe.export:
        distributed.print_main("not exported: the recipe sets export: false")
        return None
    exports = [output / name for name in EXPORTS[: 1 + arguments.recipe.merge_adapter]]
    if all(callback.exports.has_exported(export) for export in exports):
        callback.exports.upload(*exports)
        return output / EXPORT
    options = _export_options(arguments) | {"use_free_name": True}
    export = export_model(trainer.model, output / EXPORT, tokenizer=trainer.processing_class, **options)
    merged = [_export_merged(trainer, arguments, export, options)] if arguments.recipe.merge_adapter else []
    with distributed.sync_errors():
        if distributed.is_main() and not has_weights(export):
            raise ExportError(f"{export} has no weights after the export. The checkpoints in {output} are intact.")
    distributed.print_main(f"exported: {export}")
    if arguments.recipe.verify_export == "logits":
        difference = check_logits(trainer.model, export, trainer.processing_class)
        distributed.print_main(
            f"verified: the export's logits differ from the trained model's by {difference:.1e} at most"
        )
    callback.exports.push(export)
    callback.exports.upload(export, *merged)
    return export


def _export_merged(trainer: "Trainer", arguments: Arguments, adapter: Path, options: dict[str, Any]) -> Path:
    """Merge the adapter into the base model, and export the result to `<output_dir>/export_merged`. Collective."""
    merged = Path(arguments.training.output_dir) / MERGED_EXPORT
    if not arguments.model.load_in_4bit:
        tokenizer = trainer.processing_class
        return export_model(trainer.model, merged, merge_adapter=True, tokenizer=tokenizer, **options)
    base = arguments.model.model_name_or_path
    distributed.print_main(
        f"merge: the adapter is merged into the original weights of {base}, not into the 4-bit weights used in training"
    )
    return export_checkpoint(adapter, merged, base_model=base, merge_adapter=True, **options)
