"""`ShardedCheckpointCallback` connects Trainer's events to saving/ and export/."""

import copy
import functools
import logging
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, extract_model_from_parallel
from transformers import (
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.export.directory import write_description
from hf_fsdp_recipes.export.export import export_model, parse_dtype
from hf_fsdp_recipes.loading.load_model import check_fsdp_version
from hf_fsdp_recipes.saving.directory import RunDirectory
from hf_fsdp_recipes.saving.recorder import redirected
from hf_fsdp_recipes.saving.signals import StepFlags
from hf_fsdp_recipes.saving.writer import Save, Writer
from hf_fsdp_recipes.training.units import train_like_one_process
from hf_fsdp_recipes.upstream import patches
from hf_fsdp_recipes.upstream.transformers_internals import GET_OUTPUT_DIR, PUSH_CHECKPOINT

logger = logging.getLogger(__name__)

EXIT_PREEMPTED = 85  # exit status of each rank when a signal stops the run and the save is complete
STATE_KEY = "ShardedCheckpoints"  # key of the run's id in `TrainerState.stateful_callbacks`


class ShardedCheckpointCallback(TrainerCallback):
    """Makes each save of a Trainer under FSDP asynchronous, verified and atomic.

    Also exports the model when training ends.

    Trainer decides when to save. Training waits until the state is copied to host memory, and
    continues while the checkpoint is written. The copy is as large as this rank's shard of the
    model and of the optimizer state. If the state cannot be copied on a rank, all ranks wait until
    the checkpoint is written. The directory `checkpoint-<step>` appears only when all of its files
    are on disk. Resume with
    `trainer.train(resume_from_checkpoint=latest_checkpoint(output_dir))`. If a save fails, the
    error is logged and training continues. The run ends with an error only if its last save fails.
    Without FSDP, Trainer saves as if there were no callback.

    Pass this callback to the trainer on every rank, as the last one. After a signal, callbacks
    behind it get no `on_train_end`.

    Args:
        asynchronous: whether training continues while a checkpoint is written. If False, the
            checkpoint is complete when the callbacks' `on_save` is called. With `push_to_hub`,
            saves are never asynchronous.
        export_dir: directory to which the model is exported in Hugging Face format when training
            ends. With LoRA, only the adapter is exported. If the directory exists,
            `<export_dir>-1` or the next free name is used.
        export_dtype: floating-point dtype of the exported weights, such as "bfloat16". None keeps
            the dtype of the parameters, which is float32 in full fine-tuning with mixed precision.
        merge_adapter: whether to also export the base model with the adapter merged in, to
            `<export_dir>_merged`.
        signals: whether all ranks save at the same step and exit with status 85 if any rank gets
            SIGTERM or SIGUSR1, or if the launcher dies.

    Attributes:
        has_begun: whether a training loop has begun. Errors before that come from the set-up.

    Raises:
        LoadError: the Accelerate config asks for FSDP1.
        PatchError: the installed version of transformers or Accelerate is not supported.
        CheckpointError: on every rank. `output_dir` holds another run's checkpoints at the start,
            or the last save has failed.
        ExportError: on every rank. The export cannot be written, or `export_dtype` is no
            floating-point dtype.
    """

    # Trainer's state at the last complete save, or at the start. It names the best model so far.
    _kept_state: TrainerState

    def __init__(
        self,
        *,
        asynchronous: bool = True,
        export_dir: str | os.PathLike[str] | None = None,
        export_dtype: torch.dtype | str | None = None,
        merge_adapter: bool = False,
        signals: bool = True,
    ) -> None:
        self._asynchronous = asynchronous
        self._signals = signals
        self._merge_adapter = merge_adapter
        self._export_dir = None if export_dir is None else Path(export_dir)
        self._export_dtype = parse_dtype(export_dtype)
        self.has_begun = False
        self._run: str | None = None
        self._writer: Writer | None = None
        self._flags = StepFlags(None, False)  # does nothing until training begins
        self._opened = ExitStack()  # undoes what `on_train_begin` and `on_log` do
        self._forget_last_run()
        if patches.is_fsdp_requested():
            check_fsdp_version()
        patches.enable_cpu_ranks()
        patches.apply_for_saving()

    def _forget_last_run(self) -> None:
        self._stop_signal = 0
        self._saved_step = -1
        self._last_error: str | None = None
        # It replaces `_kept_state` when the save in flight is complete.
        self._pending_state: TrainerState | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: object,
        **kwargs: Any,
    ) -> None:
        """Install the signal handlers.

        Under FSDP, open the output directory for this run and create the threads that save.
        """
        self._close()
        self._forget_last_run()
        if PartialState().distributed_type == DistributedType.FSDP:
            self._claim_directory(args, state)
            train_like_one_process(kwargs["model"])
        group = distributed.new_group() if distributed.is_distributed() else None
        # Created last: while a rank waits above, SIGTERM ends it.
        self._flags = StepFlags(group, self._signals)
        self._opened.callback(self._flags.close)
        self.has_begun = True
        has_all_steps = state.max_steps <= state.global_step
        is_within_epoch = (state.epoch or 0) % 1 > 0
        if self.saves_checkpoints and has_all_steps and is_within_epoch:
            distributed.print_main(
                f"the run is complete: checkpoint-{state.global_step} has all of its steps"
            )
            self.on_train_end(args, state, **kwargs)
            sys.exit()  # otherwise Trainer would train one more step of the unfinished epoch

    def _claim_directory(self, args: TrainingArguments, state: TrainerState) -> None:
        assert args.output_dir is not None
        states: Any = state.stateful_callbacks  # annotated as a list, but a dict
        run = states.get(STATE_KEY, {}).get("run")
        # If training starts again in this process, for instance with auto_find_batch_size, it
        # continues the same run.
        self._run = run or distributed.from_main(self._run or secrets.token_hex(8))
        states[STATE_KEY] = {"run": self._run}
        directory = RunDirectory(Path(args.output_dir), self._run)
        distributed.run_on_main(lambda: directory.open(state.global_step))
        if distributed.is_main():
            self._opened.callback(directory.close)
        self._writer = Writer(directory, distributed.new_group())
        self._opened.callback(self._writer.close)
        self._kept_state = copy.copy(state)

    def on_pre_optimizer_step(self, *_: object, **kwargs: object) -> None:
        """Start the exchange that tells all ranks of a signal or a failed save on any rank."""
        if not self._stop_signal:
            self._flags.start(self._writer is not None and self._writer.has_failed)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Log the error of a failed save. If any rank got a signal, let Trainer save and stop."""
        if self._stop_signal:
            return
        self._stop_signal, any_failed = self._flags.finish()
        if any_failed:
            self._settle(state)
        if self._stop_signal:
            distributed.print_main(
                f"stopping at step {state.global_step} on signal {self._stop_signal}"
            )
            control.should_save = True
            control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """After a signal, do not evaluate, and do not save the same step a second time."""
        if self._stop_signal:
            control.should_evaluate = False
            control.should_save = self.saves_checkpoints and self._saved_step != state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """At Trainer's last log, finish the save in flight. Trainer then loads the best model."""
        if self.saves_checkpoints and "train_runtime" in kwargs["logs"]:
            self._settle(state)
            # With save_total_limit=1, Trainer would now delete all other checkpoints, even those of
            # other runs.
            self._opened.callback(setattr, args, "save_total_limit", args.save_total_limit)
            args.save_total_limit = None

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: object,
        **kwargs: Any,
    ) -> None:
        """Export the model unless a signal stopped the run.

        Raise an error if the last save failed. After a signal, exit.
        """
        self._settle(state)
        self._close()
        if self._export_dir is not None and not self._stop_signal:
            self._export(self._export_dir, kwargs["model"], kwargs.get("processing_class"))
        if self._last_error is not None:
            raise CheckpointError(f"the last checkpoint was not saved: {self._last_error}")
        if self._stop_signal:
            distributed.print_main(
                f"stopped by a signal; resume from {args.output_dir}/checkpoint-{state.global_step}"
            )
            sys.exit(EXIT_PREEMPTED)

    def _export(
        self,
        export_dir: Path,
        model: torch.nn.Module,
        processor: PreTrainedTokenizerBase | None,
    ) -> None:
        export = functools.partial(
            export_model,
            model,
            dtype=self._export_dtype,
            tokenizer=processor,
        )
        written = [export(export_dir)]
        if self._merge_adapter and hasattr(model, "peft_config"):
            merged_dir = export_dir.with_name(f"{export_dir.name}_merged")
            written.append(export(merged_dir, merge_adapter=True))
        distributed.print_main(f"exported: {', '.join(map(str, written))}")

    @property
    def saves_checkpoints(self) -> bool:
        """Whether `save` replaces `Trainer._save_checkpoint`.

        This is true only while a run under FSDP trains.
        """
        return self._writer is not None

    def save(self, trainer: Trainer, save_by_trainer: Callable[[], None], trial: object) -> None:
        """Save a checkpoint in place of `Trainer._save_checkpoint`. Collective."""
        assert self._writer is not None
        args = trainer.args
        state = trainer.state
        self._settle(state)
        final = Path(getattr(trainer, GET_OUTPUT_DIR)(trial)) / f"checkpoint-{state.global_step}"
        best = final.with_name(f"checkpoint-{state.best_global_step}")
        if state.best_global_step and (best == final or best.is_dir()):
            state.best_model_checkpoint = str(best)
        best_path = state.best_model_checkpoint
        written = self._writer.directory.workspace / final.name
        save = Save(
            written,
            final,
            facts={
                "step": state.global_step,
                "world_size": args.world_size,
                "global_batch_size": trainer.get_total_train_batch_size(args),
            },
            keep=args.save_total_limit,
            best=best_path,
        )
        try:
            with redirected(trainer, written.parent) as parts:
                save.parts = parts
                save_by_trainer()
                _complete_small_files(trainer, written, best_path)
        except Exception as error:
            save.error = error
        asynchronous = self._asynchronous and not args.push_to_hub
        self._writer.start(save, asynchronous)
        self._saved_step = state.global_step
        self._pending_state = copy.copy(state)
        if not asynchronous:
            self._settle(state)
            if args.push_to_hub and self._last_error is None:
                getattr(trainer, PUSH_CHECKPOINT)(str(final))

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Raise a CheckpointError if Trainer has saved without calling `save` of this callback."""
        if self.saves_checkpoints and self._saved_step != state.global_step:
            raise CheckpointError(
                "Trainer has saved a checkpoint without _save_checkpoint, so neither in the "
                "background nor verified. Install a tested version of transformers, or remove "
                "ShardedCheckpointCallback."
            )

    def _settle(self, state: TrainerState) -> None:
        """Wait for the save in flight. Collective.

        If it failed, warn, and undo its change of the best model in `state`.
        """
        if not (self._pending_state and self._writer):
            return
        self._last_error = self._writer.wait()
        if self._last_error is None:
            self._kept_state = self._pending_state
        else:
            if distributed.is_main():
                logger.warning(
                    "checkpoint-%d was not saved; training continues: %s",
                    self._saved_step,
                    self._last_error,
                )
            if state.best_global_step == self._saved_step:
                state.best_metric = self._kept_state.best_metric
                state.best_global_step = self._kept_state.best_global_step
                state.best_model_checkpoint = self._kept_state.best_model_checkpoint
        self._pending_state = None

    def _close(self) -> None:
        """Undo what `on_train_begin` and `on_log` did."""
        self._opened.close()
        self._writer = None


def _complete_small_files(trainer: Trainer, written: Path, best_path: str | None) -> None:
    """Add what `export_checkpoint` needs, and name the best checkpoint by its final path."""
    state = trainer.state
    # Trainer notes the unfinished directory if this checkpoint is the best one.
    has_temporary_path = state.best_model_checkpoint != best_path
    state.best_model_checkpoint = best_path
    if trainer.args.should_save:
        model = extract_model_from_parallel(trainer.model, keep_torch_compile=False)
        write_description(written, model, trainer.processing_class)
        if has_temporary_path:
            state.save_to_json(str(written / TRAINER_STATE_NAME))
