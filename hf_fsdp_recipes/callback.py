"""`ShardedCheckpointCallback` replaces a stock Trainer's saves. It reacts to Trainer's events; checkpointing/ writes the files.

Trainer decides when a save is due and sets `control.should_save`. The callback clears this flag and saves after the step's
logging and evaluation, so that it writes the same state as Trainer would.
"""

import functools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import SoftFileLease
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import divergence, layout, resume, small_files, unsharded
from hf_fsdp_recipes.checkpointing.download import delete_partial
from hf_fsdp_recipes.checkpointing.lock import lock_directory
from hf_fsdp_recipes.checkpointing.mirror import Mirror
from hf_fsdp_recipes.checkpointing.preemption import SignalWatch
from hf_fsdp_recipes.checkpointing.run_end import find_end
from hf_fsdp_recipes.checkpointing.run_identity import PreviousRun, claim_directory, read_run
from hf_fsdp_recipes.checkpointing.save_schedule import SaveSchedule
from hf_fsdp_recipes.checkpointing.state import capture, check_arguments, random_state
from hf_fsdp_recipes.checkpointing.writer import Snapshot, Writer, describe_failure
from hf_fsdp_recipes.configs.launch import check_launch
from hf_fsdp_recipes.errors import CheckpointError, DivergenceError, SaveError, UnexpectedError
from hf_fsdp_recipes.export import model_assets
from hf_fsdp_recipes.export.hub import HubTarget
from hf_fsdp_recipes.export.run_exports import RunExports
from hf_fsdp_recipes.metrics.clock import clock
from hf_fsdp_recipes.patches import cpu_ranks, registry
from hf_fsdp_recipes.patches.torch import wait_for_gloo_at_exit

if TYPE_CHECKING:
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import Trainer

logger = logging.getLogger(__name__)


class ShardedCheckpointCallback(TrainerCallback):
    """Save sharded checkpoints atomically and in the background, from a stock Trainer under FSDP.

    Add it to a `Trainer` or a TRL trainer on every rank. `save_strategy`, `save_steps`, `save_total_limit` and
    `load_best_model_at_end` keep their meaning, and `trainer.save_model()` exports the model. Without FSDP, Trainer writes
    the checkpoints; the callback adds a manifest (the files' sizes and checksums) to each, deletes old ones, and verifies the
    one to resume from.

    Args:
        asynchronous: under FSDP, keep training while a checkpoint is written, which needs host memory for one copy of this
            rank's state. False blocks until the checkpoint is complete.
        export_dir: directory to export the model to when training ends, under FSDP, DDP or in a single process.
        export_dtype: floating-point dtype of the exported weights, such as "bfloat16". Under FSDP it also applies to
            `trainer.save_model()`. None keeps the dtype of the trained parameters: float32 for a full fine-tune in mixed precision.
        signals: whether SIGTERM and SIGUSR1 make all ranks save a checkpoint at the same step and then end the run.
        hub: where to push checkpoints and the export; None reads Trainer's own `push_to_hub` arguments.
        previous_run: what to do if `output_dir` holds checkpoints or an export of another run: refuse to start, or archive
            them in `<output_dir>/previous-<n>`.
        checkpoint_mirror: where to upload checkpoints and the export while training continues: a URL that fsspec opens, such
            as s3://bucket/run, or a path.
        rank_files: function that is called at each save under FSDP. It returns additional small files of this rank as
            {name: text}, with their content as of the last step.

    Raises:
        ExportError: `export_dtype` is not a floating-point dtype, or the export cannot be written; raised before training.
        SaveError: the run's last save or upload failed; raised after the export. An earlier failure only logs a warning.
        DivergenceError: the weights contain NaN or infinity.
    """

    def __init__(
        self,
        *,
        asynchronous: bool = True,
        export_dir: str | os.PathLike[str] | None = None,
        export_dtype: torch.dtype | str | None = None,
        signals: bool = True,
        hub: HubTarget | None = None,
        previous_run: PreviousRun = "refuse",
        checkpoint_mirror: str | None = None,
        rank_files: Callable[[], dict[str, str]] | None = None,
    ) -> None:
        wait_for_gloo_at_exit()
        cpu_ranks.enable()
        registry.apply("checkpointing")
        resume.enable_checks()
        self._asynchronous = asynchronous
        self._rank_files = rank_files
        self._previous_run = previous_run
        self._run: str | None = None  # the run's id, on rank 0
        self.mirror = Mirror(checkpoint_mirror)
        self.exports = RunExports(export_dir, hub, self.mirror, export_dtype)
        self._signals = SignalWatch() if signals else None
        self._schedule: SaveSchedule | None = None  # set under FSDP only, like the writer
        self._writer: Writer | None = None
        self._lock: SoftFileLease | None = None
        self._plugin: FullyShardedDataParallelPlugin | None = None  # Accelerate's FSDP plugin, or None
        self._is_unsharded = False  # whether Trainer itself saves: in one process or under DDP
        self._is_completing = False  # whether to add manifests to the checkpoints that Trainer writes without FSDP
        self._has_saved = False  # whether Trainer has saved a checkpoint that has no manifest yet
        self._failure: Exception | None = None  # the last finished save's error; None if it succeeded
        self._previous_best: str | None = None  # `state.best_model_checkpoint` before the last save
        self._saved_step: int | None = None  # the step of the last save
        self._metric: str | None = None  # the name of the metric that decides which checkpoint is best
        self._callbacks: list[object] = []  # the trainer's callbacks and its control
        self._resumed: Path | None = None  # the checkpoint that this run resumes from
        self._save_total_limit: int | None = None
        self._random_state: dict[str, object] = {}
        self._model_assets: dict[str, bytes] = {}

    # Trainer's events, in the order of a run.

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the launch and, under FSDP, lock the output directory before weights are read.

        Collective, like the other events unless they say otherwise.
        """
        from accelerate.state import AcceleratorState

        check_launch(args)
        distributed.set_timeout(args.ddp_timeout)  # load_model may have started the process group earlier
        if vars(control).setdefault("sharded_checkpoint_callback", self) is not self:
            raise CheckpointError("the trainer has two ShardedCheckpointCallbacks. Pass one.")
        self.exports.check(kwargs["model"])
        self._plugin = getattr(AcceleratorState(), "fsdp_plugin", None)
        self.mirror.check(args.output_dir, is_fsdp=self._plugin is not None)
        if self._plugin is not None:
            self._lock_directory(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Claim the output directory for this run and, under FSDP, take over Trainer's saves."""
        # Trainer has not called `on_init_end` if the callback was added to an existing trainer.
        self.on_init_end(args, state, control, **kwargs)
        self._restore_arguments(args)  # an earlier train() that was interrupted has not
        if not args.push_to_hub or self._plugin is not None:  # otherwise Trainer pushes what it saves
            self.exports.start(args)
        self._is_unsharded = self._plugin is None and unsharded.is_supported(args, state)
        self._is_completing = self._is_unsharded and args.save_strategy != "no" and not args.save_only_model
        self._lock_directory(args)
        state.best_model_checkpoint = distributed.run_on_main(lambda: self._find_best(args, state))
        self._failure, self._previous_best = None, state.best_model_checkpoint
        self._metric = args.metric_for_best_model and f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        with distributed.sync_errors():
            if self._plugin is not None:
                check_arguments(args, self._plugin)
            # With `ignore_data_skip`, Trainer starts at the first row again, so no row can be skipped. Recipes that stream their
            # rows, whose positions are in `rank_files`, set it too, and do not start over.
            starts_over = args.ignore_data_skip and self._rank_files is None
            if state.global_step > 0 and self._resumed is not None:
                resume.check_batches(args, self._resumed, starts_over)
            if distributed.is_main():
                self.mirror.claim(read_run(state) or self._run, state.global_step, is_starting=False)
                claim_directory(args.output_dir, state, self._previous_run, self._run)
                self._run = read_run(state)
                self.mirror.claim(self._run, state.global_step)
                if self._writer is None:  # otherwise an earlier train() may still be writing
                    layout.remove_interrupted(args.output_dir)
        end = distributed.run_on_main(lambda: find_end(state, self._resumed, self._callbacks))
        self.exports.is_finished = end is not None
        if end is not None:
            distributed.print_main(f"finished: {end}, so there is nothing to do")
            control.should_training_stop = True
        self._save_total_limit = args.save_total_limit
        if self._is_completing:
            args.save_total_limit = None  # Trainer would delete old checkpoints before the new one has its manifest
        if self._plugin is None:
            return
        self._schedule = SaveSchedule(args, last_saved_step=state.global_step)
        self.mirror.start(
            args.output_dir, state.global_step, self._save_total_limit, lambda: state.best_model_checkpoint
        )
        self._writer = Writer(args.output_dir, self._asynchronous, functools.partial(self._on_complete, args, state))
        if self._signals is not None:
            self._signals.start()
        if distributed.is_main():
            self._model_assets = model_assets.collect(kwargs["model"], kwargs.get("processing_class"))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait until the last save's copy of the state is complete, because the optimizer is about to change the state.

        During the wait, the ranks exchange the signals that they have received.
        """
        if self._writer is not None:
            if self._signals is not None:
                self._signals.start_exchange(isinstance(self._writer.failure, DivergenceError))
            with clock.spending("save", after="forward_backward"):
                self._writer.wait_until_staged()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Schedule a due save, act on signals, report a failed save; raise a DivergenceError if saved weights are not finite."""
        delete_partial()  # only now, because until the first step Trainer still reads the random state from this download
        if self._writer is None or self._schedule is None:
            return control
        failure = self._writer.failure
        if failure is not None and not isinstance(failure, DivergenceError):
            self._record_failure(state, failure)
        self.exports.push_checkpoint(self._writer.completed)
        self._schedule.take_flag(state, control, SaveStrategy.STEPS)
        if self._signals is not None:
            is_signaled, has_diverged = self._signals.finish_exchange(state.global_step)
            if has_diverged:
                self._finish(state)  # raises on every rank
            if is_signaled:
                self._schedule.request(state)
                control.should_training_stop = True
        self._random_state = random_state()
        return control

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the random state. After the last step, save if due, before Trainer loads the best model."""
        self._random_state = random_state()
        if "train_runtime" in (kwargs.get("logs") or {}):
            if self._writer is not None:
                # Otherwise Trainer could delete the last checkpoint, which tells a later start that the run has ended.
                args.save_total_limit = None
            self._save_if_due(args, state, kwargs)
            if self._writer is not None:
                self._finish(state)
            self._check_best(args, state)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the random state after an evaluation, for the next save."""
        self._random_state = random_state()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """If a save is due, save the state that the previous step or epoch left."""
        self._save_if_due(args, state, kwargs)

    on_epoch_begin = on_step_begin

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Save the epoch's last step if a save is due; with `save_strategy: epoch`, schedule a save."""
        self._save_if_due(args, state, kwargs)
        if self._schedule is not None:
            self._schedule.take_flag(state, control, SaveStrategy.EPOCH)
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Without FSDP, remember that Trainer has just written a checkpoint. Not a collective.

        The manifest is added later, because other callbacks may change the checkpoint in this event.
        """
        # Trainer also calls this after a failed save, whose directory `_discard` may have been unable to delete.
        self._has_saved = self._is_completing and distributed.is_main() and self._failure is None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Finish the last save; then exit if a signal stopped the run, or else export if requested.

        If the last save or upload failed, raises its error.
        """
        delete_partial()
        if self._writer is None:
            self._save_if_due(args, state, kwargs)
            self._restore_arguments(args)
            if self.exports.directory is not None:
                divergence.check_run(kwargs["model"], state, args.output_dir)
            self._end(kwargs)
            return
        self._save_if_due(args, state, kwargs)
        completed = self._finish(state)
        divergence.check_run(kwargs["model"], state, args.output_dir)
        self.exports.push_checkpoint(self._writer.completed)
        if not self.exports.is_finished:
            self._prune(args, state)
        self._restore_arguments(args)
        if self._signals is not None:
            self._signals.stop()
            if self._signals.is_stopping:
                distributed.raise_together(self._failure)
                self.mirror.wait()
                self._signals.exit_if_signaled(completed)
        self._end(kwargs)

    def save_sharded_model(self, trainer: "Trainer", output_dir: str) -> None:
        """Export the model for `trainer.save_model()`, which writes nothing for sharded models. Collective."""
        if "SHARDED" in str(getattr(self._plugin, "state_dict_type", "")):
            self.exports.save_model(trainer, Path(output_dir))

    def see_trainer(self, trainer: "Trainer", checkpoint: Path | None = None) -> None:
        """When training starts, keep the callbacks, whose states are saved, and record the number and checksum of the rows.

        `checkpoint` is the one to resume from, which may be outside `output_dir`.
        """
        self._callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        self._resumed = checkpoint
        resume.record_rows(trainer)

    @property
    def handles_failed_saves(self) -> bool:
        """Whether Trainer must call `end_save` after each of its own saves."""
        return self._is_unsharded

    def end_save(
        self, args: TrainingArguments, state: TrainerState, error: Exception | None, previous_best: str | None
    ) -> None:
        """If Trainer's own save failed on any rank, delete what it wrote, and keep training. Collective.

        `previous_best` is `state.best_model_checkpoint` before the save.
        """
        self._previous_best, self._saved_step = previous_best, state.global_step
        own = None if error is None else describe_failure(state.global_step, error, args.output_dir)
        reasons = list(filter(None, distributed.gather_objects(own)))
        self._failure = None
        if reasons:
            self._discard(args, state, CheckpointError(reasons[0]))

    # Shared by the event handlers.

    def _lock_directory(self, args: TrainingArguments) -> None:
        with distributed.sync_errors():
            if distributed.is_main() and self._lock is None:
                self._lock = lock_directory(args.output_dir)

    def _restore_arguments(self, args: TrainingArguments) -> None:
        """Undo the changes to Trainer's arguments for this run, so that a later train() starts from the user's values."""
        if args.save_total_limit is None:
            args.save_total_limit = self._save_total_limit
        self._save_total_limit = None
        if self._schedule is not None:
            args.save_strategy = self._schedule.strategy
            self._schedule = None

    def _end(self, kwargs: dict[str, Any]) -> None:
        """Export, unlock the output directory, and raise a SaveError if the last save or upload failed."""
        self.exports.export(kwargs["model"], kwargs.get("processing_class"))
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        failed_upload = self.mirror.wait()
        failure = self._failure or failed_upload
        distributed.raise_together(None if failure is None else SaveError(str(failure)))

    def _save_if_due(self, args: TrainingArguments, state: TrainerState, kwargs: dict[str, Any]) -> None:
        if self._has_saved:
            self._complete(args, state, kwargs["model"])
        step = None if self._schedule is None else self._schedule.take_due_step(state)
        if step is not None:
            self._save(step, args, state, kwargs)

    @clock.spending("save", after="data")
    def _save(self, step: int, args: TrainingArguments, state: TrainerState, kwargs: dict[str, Any]) -> None:
        self._finish(state)
        assert self._writer is not None
        self._previous_best, self._saved_step = state.best_model_checkpoint, step
        if state.best_global_step is not None and state.best_global_step == step:
            state.best_model_checkpoint = str(layout.directory_for(args.output_dir, step))
        sharded = capture(kwargs["model"], kwargs["optimizer"], self._plugin)
        rank_files = {} if self._rank_files is None else self._rank_files()
        try:
            with distributed.sync_errors():
                small_files.export_callbacks(state, self._callbacks)
                files = small_files.collect(args, state, kwargs, self._random_state, rank_files, self._model_assets)
            facts = resume.manifest_facts(args, state, self._callbacks)
            self._writer.save(Snapshot(step, sharded, files, facts))
            if not self._writer.has_started:  # a synchronous save, which is complete
                self._failure = None
        except (CheckpointError, UnexpectedError) as error:
            self._record_failure(state, error)

    def _complete(self, args: TrainingArguments, state: TrainerState, model: torch.nn.Module) -> None:
        """Complete the checkpoint that Trainer has just written, push it and delete old ones. Rank 0 only."""
        self._has_saved = False
        try:
            facts = resume.manifest_facts(args, state, self._callbacks)
            self.exports.push_checkpoint(unsharded.complete_checkpoint(args, state, model, facts))
            self._prune(args, state)
        except CheckpointError as error:
            self._discard(args, state, error)

    def _discard(self, args: TrainingArguments, state: TrainerState, error: CheckpointError) -> None:
        """Delete a checkpoint that Trainer could not write completely, and record the error."""
        if distributed.is_main():
            shutil.rmtree(layout.directory_for(args.output_dir, state.global_step), ignore_errors=True)
        self._record_failure(state, error)

    def _record_failure(self, state: TrainerState, error: Exception) -> None:
        # Training continues: the earlier checkpoint is intact and the next save may succeed.
        state.best_model_checkpoint = self._previous_best
        if state.best_global_step is not None and state.best_global_step == self._saved_step:
            # Otherwise only a model better than the lost one would be saved as the best.
            step = layout.step_of(Path(self._previous_best)) if self._previous_best else None
            metrics = {entry.get("step"): entry[self._metric] for entry in state.log_history if self._metric in entry}
            state.best_global_step, state.best_metric = step, metrics.get(step)
        if isinstance(error, DivergenceError):
            self.mirror.wait()
            raise error
        if distributed.is_main() and str(error) != str(self._failure):
            logger.warning("%s Training continues.", error)
        self._failure = error

    def _finish(self, state: TrainerState) -> Path | None:
        """Wait for the save in flight; return the last completed checkpoint, or None if the save failed."""
        assert self._writer is not None
        was_writing = self._writer.has_started
        try:
            completed = self._writer.wait()
        except CheckpointError as error:
            self._record_failure(state, error)
            return None
        if was_writing:
            self._failure = None
        return completed

    def _find_best(self, args: TrainingArguments, state: TrainerState) -> str | None:
        """Return the path of the best checkpoint, or None. Finds it in `output_dir` if that has moved since the run was saved."""
        if state.best_model_checkpoint is not None or state.best_global_step is None:
            return state.best_model_checkpoint
        best, run = layout.directory_for(args.output_dir, state.best_global_step), read_run(state)
        is_own = run is not None and layout.read_manifest(best).get("run") == run
        return str(best) if is_own and layout.validate(best) is None else None

    def _check_best(self, args: TrainingArguments, state: TrainerState) -> None:
        """Forget a best checkpoint that does not exist. If Trainer is to load it: on every rank, and with a warning."""
        best = state.best_model_checkpoint

        def find() -> str | None:
            return best if best is not None and Path(best).is_dir() else None

        state.best_model_checkpoint = distributed.run_on_main(find) if args.load_best_model_at_end else find()
        if args.load_best_model_at_end and state.best_model_checkpoint is None:
            distributed.warn_main("there is no checkpoint of the best step, so the last weights are kept")

    def _on_complete(self, args: TrainingArguments, state: TrainerState, checkpoint: Path) -> None:
        """Upload a complete checkpoint and delete old ones. Called from the thread that wrote it."""
        self.mirror.add(checkpoint)
        self._prune(args, state)

    def _prune(self, args: TrainingArguments, state: TrainerState) -> None:
        if self._save_total_limit and self._save_total_limit > 0 and distributed.is_main():
            protected = [state.best_model_checkpoint] if state.best_model_checkpoint else []
            protected += self.exports.sources
            try:
                layout.remove_old(args.output_dir, self._save_total_limit, protected, read_run(state))
            except (OSError, CheckpointError) as error:
                logger.warning("old checkpoints were not deleted: %s", error)
