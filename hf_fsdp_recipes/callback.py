"""`ShardedCheckpointCallback` replaces a stock Trainer's saves. Wiring only; checkpointing/ writes the files.

Trainer decides when a save is due. The callback clears Trainer's flag and saves once that step's logging and evaluation are
done, so it writes the state that Trainer would have written.
"""

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import divergence, layout, resume, small_files
from hf_fsdp_recipes.checkpointing.lock import DirectoryLock, lock_directory
from hf_fsdp_recipes.checkpointing.mirror import Mirror
from hf_fsdp_recipes.checkpointing.preemption import SignalWatch
from hf_fsdp_recipes.checkpointing.run_identity import EXPORT, PreviousRun, claim_directory, read_run
from hf_fsdp_recipes.checkpointing.state import capture, check_arguments, random_state
from hf_fsdp_recipes.checkpointing.writer import Snapshot, Writer
from hf_fsdp_recipes.configs.launch import check_launch
from hf_fsdp_recipes.errors import CheckpointError, DivergenceError, SaveError
from hf_fsdp_recipes.export import model_assets
from hf_fsdp_recipes.export.export_directory import MARKER
from hf_fsdp_recipes.export.from_model import check_export, export_model
from hf_fsdp_recipes.export.hub import HubTarget, Pusher, read_target
from hf_fsdp_recipes.export.verify_files import has_weights
from hf_fsdp_recipes.metrics.clock import clock
from hf_fsdp_recipes.patches import cpu_ranks, registry
from hf_fsdp_recipes.patches.torch import wait_for_gloo_at_exit

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)


class ShardedCheckpointCallback(TrainerCallback):
    """Save sharded checkpoints atomically and in the background, from a stock Trainer under FSDP.

    Add it to a `Trainer` or a TRL trainer on every rank. `save_strategy`, `save_steps`, `save_total_limit` and
    `load_best_model_at_end` keep their meaning, and `trainer.save_model()` exports. Without FSDP it only exports.

    Args:
        asynchronous: keep training while a checkpoint is written, which needs host memory for one copy of this rank's
            state. False blocks until the checkpoint is complete.
        export_dir: export the model there when training ends; works with FSDP, DDP and a single process.
        signals: whether SIGTERM and SIGUSR1 end the run after a checkpoint, on all ranks at the same step.
        check_signals_every_steps: number of steps between checks for a signal on any rank.
        hub: where to push checkpoints and the export; None reads Trainer's own `push_to_hub` arguments.
        previous_run: what to do if `output_dir` holds checkpoints or an export of another run: refuse to start, or archive
            them in `<output_dir>/previous-<n>`.
        checkpoint_mirror: where to upload checkpoints and the export while training continues: a URL that fsspec opens, such
            as s3://bucket/run, or a path.
        rank_files: returns this rank's additional small files as {name: text}, as they were after the last step.

    Raises:
        SaveError: the run's last save or upload failed; the export was written first. An earlier one only logs a warning.
        DivergenceError: the weights contain NaN or infinity.
    """

    def __init__(
        self,
        *,
        asynchronous: bool = True,
        export_dir: str | os.PathLike[str] | None = None,
        signals: bool = True,
        check_signals_every_steps: int = 1,
        hub: HubTarget | None = None,
        previous_run: PreviousRun = "refuse",
        checkpoint_mirror: str | None = None,
        rank_files: Callable[[], dict[str, str]] | None = None,
    ) -> None:
        if hub is not None and not isinstance(hub, HubTarget):
            raise CheckpointError(
                f"hub is {hub!r}, not a HubTarget. Pass hf_fsdp_recipes.export.hub.HubTarget({hub!r})."
            )
        wait_for_gloo_at_exit()
        cpu_ranks.enable()
        registry.apply("checkpointing")
        resume.enable_checks()
        self._asynchronous = asynchronous
        self._export_dir = export_dir
        self._rank_files = rank_files or dict
        self._previous_run = previous_run
        self._run: str | None = None  # id, on rank 0
        self.mirror = Mirror(checkpoint_mirror)
        self._signals = SignalWatch(check_signals_every_steps) if signals else None
        self._strategy: Any = SaveStrategy.NO
        self._writer: Writer | None = None
        self._lock: DirectoryLock | None = None
        self._plugin: Any = None
        self._failure: Exception | None = None  # of the last finished save
        self._pending_step: int | None = None
        self._last_saved_step = -1
        self._is_finished = False  # the run was resumed after its last step
        self._random_state: dict[str, Any] = {}
        self._hub = hub
        self._pusher: Pusher | None = None
        self._model_assets: dict[str, bytes] = {}

    # Trainer's events, in the order of a run.

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Lock the output directory before weights are read. Collective, like all events below."""
        from accelerate.state import AcceleratorState

        check_launch(args)
        distributed.set_timeout(args.ddp_timeout)  # load_model may have started the process group before
        if vars(control).setdefault("sharded_checkpoint_callback", self) is not self:
            raise CheckpointError("the trainer has two ShardedCheckpointCallbacks. Pass one.")
        if self._export_dir is not None:
            kind = AcceleratorState().distributed_type.value
            if kind in ("DEEPSPEED", "MEGATRON_LM"):
                raise CheckpointError(
                    f"export_dir is set, but a model cannot be exported under {kind}. Use FSDP or DDP, or unset it."
                )
            check_export(kwargs["model"], self._export_dir)
        self._plugin = getattr(AcceleratorState(), "fsdp_plugin", None)
        self.mirror.check(args.output_dir, is_fsdp=self._plugin is not None)
        if self._plugin is None:
            return
        with distributed.sync_errors():
            if distributed.is_main() and self._lock is None:
                self._lock = lock_directory(args.output_dir)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over from Trainer if this is an FSDP run."""
        self.on_init_end(args, state, control, **kwargs)  # not called yet if the callback was added later
        if self._plugin is None:
            return
        with distributed.sync_errors():
            check_arguments(args, self._plugin)
            if state.global_step > 0:
                resume.check_data_position(args, state)
            if distributed.is_main():
                claim_directory(args.output_dir, state, self._previous_run, self._run)
                self._run = read_run(state)
                self.mirror.claim(self._run, state.global_step)
        self._is_finished = 0 < state.max_steps <= state.global_step
        if self._is_finished:
            distributed.print_main(f"finished: step {state.global_step} is the last one, so there is nothing to do")
            self._last_saved_step = state.global_step
            control.should_training_stop = True
        self._strategy = args.save_strategy
        if self._strategy == SaveStrategy.BEST:
            # With "best", Trainer saves inside evaluation, where a callback cannot intercept it. With "steps" it still tracks
            # the best step, but only sets a flag that a callback can clear.
            args.save_strategy = SaveStrategy.STEPS
        limit = args.save_total_limit
        self.mirror.start(args.output_dir, state.global_step, limit, lambda: state.best_model_checkpoint)
        self._writer = Writer(args.output_dir, self._asynchronous, functools.partial(self._on_complete, args, state))
        if self._signals is not None:
            self._signals.start()
        if distributed.is_main():
            self._model_assets = model_assets.collect(kwargs["model"], kwargs.get("processing_class"))
        target = self._hub or read_target(args)
        if target is not None and distributed.is_main():
            self._pusher = Pusher(target, args.output_dir)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait until the state is staged, because the optimizer is about to change it, and exchange signals meanwhile."""
        if self._writer is not None:
            if self._signals is not None:
                self._signals.start_exchange(state.global_step + 1, isinstance(self._writer.failure, DivergenceError))
            with clock.spending("save", after="forward_backward"):
                self._writer.wait_until_staged()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Schedule a due save, act on signals, and report a save that has failed.

        Raises:
            DivergenceError: the weights of the last save contain NaN or infinity.
        """
        if self._writer is None:
            return control
        failure = self._writer.failure
        if failure is not None and not isinstance(failure, DivergenceError):
            self._record_failure(failure)
        self._push()
        if control.should_save and self._strategy == SaveStrategy.STEPS:
            self._schedule(state)
        control.should_save = False
        if self._signals is not None:
            is_signaled, has_diverged = self._signals.finish_exchange(state.global_step)
            if has_diverged:
                self._finish()  # raises on every rank
            if is_signaled:
                self._schedule(state)
                control.should_training_stop = True
        self._random_state = random_state()
        return control

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the random state current; save before Trainer loads its best model, after the last step."""
        self._random_state = random_state()
        if "train_runtime" in (kwargs.get("logs") or {}):
            self._save_if_due(args, state, kwargs)
            if self._writer is not None:
                self._finish()
                if state.best_model_checkpoint is not None:
                    self.mirror.wait()  # Trainer may delete the other checkpoints now
                if state.best_model_checkpoint is not None and not Path(state.best_model_checkpoint).is_dir():
                    state.best_model_checkpoint = None  # it was not written

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the random state current."""
        self._random_state = random_state()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the last step or epoch if it is due."""
        self._save_if_due(args, state, kwargs)

    on_epoch_begin = on_step_begin

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Save the epoch's last step if a save is due; with `save_strategy: epoch`, schedule the save."""
        if self._writer is None:
            return control
        self._save_if_due(args, state, kwargs)
        if control.should_save and self._strategy == SaveStrategy.EPOCH:
            self._schedule(state)
        control.should_save = False
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Finish the last save, exit if the run was signaled, and export if asked to.

        Raises:
            SaveError: the last checkpoint was not written.
            DivergenceError: the weights contain NaN or infinity; nothing was exported.
            SystemExit: the run was signaled; see `preemption` for the exit status.
        """
        if self._writer is None:
            self._export(kwargs)
            return
        self._save_if_due(args, state, kwargs)
        completed = self._finish()
        divergence.check_run(kwargs["model"], state, args.output_dir)
        self._push()
        if not self._is_finished:
            self._prune(args, state)
        args.save_strategy = self._strategy
        if self._signals is not None:
            self._signals.stop()
            if self._signals.is_stopping:
                distributed.raise_together(self._failure)
                self.mirror.wait()
                self._signals.exit_if_signaled(completed)
        self._export(kwargs)
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        failed_upload = self.mirror.wait()
        failure = self._failure or failed_upload
        distributed.raise_together(None if failure is None else SaveError(str(failure)))

    def _export(self, kwargs: dict[str, Any]) -> None:
        if self._export_dir is None:
            return
        export, tokenizer = Path(self._export_dir), kwargs.get("processing_class")
        if not self.has_exported(export):
            export = export_model(kwargs["model"], export, tokenizer=tokenizer, use_free_name=True)
            self.push_export(export)
        self.mirror.add(export, MARKER)

    def upload_exports(self, *exports: Path) -> None:
        """Upload exports to the mirror, if there is one, and wait for it. Collective.

        Raises:
            SaveError: the last checkpoint or an export was not uploaded.
        """
        for export in exports:
            self.mirror.add(export, MARKER)
        distributed.raise_together(self.mirror.wait())

    def has_exported(self, export: Path) -> bool:
        """Return whether the run had already finished when it was resumed, and its export exists. Collective."""
        return self._is_finished and distributed.run_on_main(lambda: has_weights(export))

    def push_export(self, export: Path) -> None:
        """Push the final export, if pushing is on, and wait for it; a failure is a warning.

        Acts on rank 0 only, without collectives: an upload may outlast any timeout.
        """
        if self._pusher is not None:
            self._pusher.push_export(export)

    def save_sharded_model(self, trainer: "Trainer", output_dir: str) -> None:
        """Export the model for `trainer.save_model()`; in the run's own directory, to its `export` folder. Collective."""
        if "SHARDED" in str(getattr(self._plugin, "state_dict_type", "")):
            is_runs_own = Path(output_dir).resolve() == Path(trainer.args.output_dir).resolve()
            directory = Path(output_dir) / EXPORT if is_runs_own else Path(output_dir)
            export_model(trainer.model, directory, tokenizer=trainer.processing_class)
            distributed.print_main(f"exported: {directory}")

    # Shared by the event handlers.

    def _schedule(self, state: TrainerState) -> None:
        if state.global_step != self._last_saved_step:
            self._pending_step = state.global_step

    def _save_if_due(self, args: TrainingArguments, state: TrainerState, kwargs: dict[str, Any]) -> None:
        if self._writer is None:
            return
        if self._strategy == SaveStrategy.BEST and state.best_global_step == state.global_step:
            self._schedule(state)
        if self._pending_step is not None:
            self._save(args, state, kwargs)

    @clock.spending("save", after="data")
    def _save(self, args: TrainingArguments, state: TrainerState, kwargs: dict[str, Any]) -> None:
        self._finish()
        assert self._writer is not None and self._pending_step is not None
        step = self._last_saved_step = self._pending_step
        self._pending_step = None
        if state.best_global_step is not None and state.best_global_step == step:
            state.best_model_checkpoint = str(layout.directory_for(args.output_dir, step))
        sharded = capture(kwargs["model"], kwargs["optimizer"], self._plugin)
        rank_files = self._rank_files()
        files = small_files.collect(args, state, kwargs, self._random_state, rank_files, self._model_assets)
        facts = {**resume.manifest_facts(args, state), "run": read_run(state)}
        try:
            self._writer.save(Snapshot(step, sharded, files, facts))
        except CheckpointError as error:
            self._record_failure(error)

    def _record_failure(self, error: Exception) -> None:
        # Training continues: the earlier checkpoint is intact and the next save may succeed.
        if isinstance(error, DivergenceError):
            self.mirror.wait()
            raise error
        if distributed.is_main() and str(error) != str(self._failure):
            logger.warning("%s Training continues.", error)
        self._failure = error

    def _finish(self) -> Path | None:
        """Wait for the save in flight; return its checkpoint, or None."""
        assert self._writer is not None
        was_writing = self._writer.has_started
        try:
            completed = self._writer.wait()
        except CheckpointError as error:
            self._record_failure(error)
            return None
        if was_writing:
            self._failure = None
        return completed

    def _push(self) -> None:
        """Start pushing the last complete checkpoint, once. Acts on rank 0 only; not a collective."""
        if self._pusher is not None and self._writer is not None and self._writer.completed is not None:
            self._pusher.push_checkpoint(self._writer.completed)

    def _on_complete(self, args: TrainingArguments, state: TrainerState, checkpoint: Path) -> None:
        """Upload a complete checkpoint and delete old ones. Called from the thread that wrote it."""
        self.mirror.add(checkpoint)
        self._prune(args, state)

    def _prune(self, args: TrainingArguments, state: TrainerState) -> None:
        if args.save_total_limit and args.save_total_limit > 0 and distributed.is_main():
            protected = [state.best_model_checkpoint] if state.best_model_checkpoint else []
            if self._pusher is not None and self._pusher.source is not None:
                protected.append(str(self._pusher.source))
            protected += self.mirror.sources
            try:
                layout.remove_old(args.output_dir, args.save_total_limit, protected, read_run(state))
            except OSError as error:
                logger.warning("old checkpoints were not deleted: %s", error)
