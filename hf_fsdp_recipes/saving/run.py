"""What Trainer's events do to the saves of one training loop."""

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import (
    GenerationConfig,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import CheckpointError, WeightsError, describe
from hf_fsdp_recipes.export.directory import save_as_it_came, write_description
from hf_fsdp_recipes.saving.directory import (
    MANIFEST,
    STATE_KEY,
    OutputDirectory,
    list_checkpoints,
    read_run_id,
    step_of,
)
from hf_fsdp_recipes.saving.recorder import is_sharded, redirected
from hf_fsdp_recipes.saving.resume import find_damage_together
from hf_fsdp_recipes.saving.saver import Save, Saver, check_finite
from hf_fsdp_recipes.saving.signals import StepFlags
from hf_fsdp_recipes.training.units import train_like_one_process, units_of
from hf_fsdp_recipes.upstream.transformers_internals import (
    DETERMINE_BEST,
    EVALUATE,
    FINALIZE,
    LOAD_RANDOM_STATE,
    PUSH_CHECKPOINT,
    RUN_EPOCH,
    SAVE_CHECKPOINT,
    SAVE_RANDOM_STATE,
)
from hf_fsdp_recipes.weights.rows import local_part

logger = logging.getLogger(__name__)

EXIT_PREEMPTED = 85  # exit status of each rank when a signal stops the run and the save is complete
# Training arguments that change when a signal stops the run, until training has ended.
CHANGED_BY_SIGNALS = ("eval_strategy", "save_only_model", "load_best_model_at_end")
MAX_FAILURES = 2  # failed saves in a row after which training stops


class Run(TrainerCallback):
    """One training loop. While it runs, this is the last of the trainer's callbacks.

    Args:
        callback: the callback that runs the loop, with its arguments.
        trainer: the trainer.
        directory: the run's output directory, which rank 0 has opened.
        run_id: the run's id.
        checkpoint: the checkpoint from which the loop resumes.
    """

    def __init__(
        self,
        callback: Any,  # a ShardedCheckpointCallback
        trainer: Any,  # a Trainer
        directory: OutputDirectory,
        run_id: str,
        checkpoint: str | None,
    ) -> None:
        self.trainer = trainer
        self.run_id = run_id
        self.processor = trainer.processing_class or getattr(
            trainer.data_collator, "tokenizer", None
        )
        self._callback = callback
        self._directory = directory
        self._saver = Saver(directory)
        self._is_asynchronous = distributed.from_main(
            callback.asynchronous and not trainer.args.push_to_hub
        )
        self._checkpoint = checkpoint
        self._evaluated_step = 0  # the step of the last evaluation
        self._is_cut = False  # whether a signal has ended an evaluation
        self._save: Save | None = None  # the save in flight
        self._has_saved = False
        self._saved_step = -1  # the step of the last save, in flight or ended
        self._error: BaseException | None = None  # of the last save
        self._num_failures = 0  # failed saves in a row
        self._opened = ExitStack()  # undoes what this run does to the trainer and the process

    def train(self, loop: Callable[[], Any]) -> Any:
        """Run Trainer's training loop and return its result. Collective.

        When this returns or raises an error, the save in flight has ended, and the trainer and the
        process are as before. A save is given up if an error is raised before all callbacks have
        added their files.
        """
        with self._opened:
            # This rank's random state before the evaluation that may be stopped.
            self._random_state = self._opened.enter_context(TemporaryDirectory())
            self._opened.callback(self._saver.close)
            args = self.trainer.args
            for name in CHANGED_BY_SIGNALS:
                self._opened.callback(setattr, args, name, getattr(args, name))
            callbacks = self.trainer.callback_handler.callbacks
            callbacks.remove(self._callback)
            callbacks.insert(1, self._callback)  # after Trainer's own, which plans an evaluation
            self.trainer.add_callback(self)
            self._opened.callback(self.trainer.remove_callback, self)
            self._replace(FINALIZE, self._finalize)
            by_trainer = getattr(Trainer, SAVE_CHECKPOINT)

            def save_checkpoint(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
                save = partial(by_trainer, trainer, *args, **kwargs)
                if trainer is self.trainer:
                    save = partial(self.save_checkpoint, save)
                save()

            # In the class, so that a trainer of another class has its own method around this one.
            self._opened.enter_context(mock.patch.object(Trainer, SAVE_CHECKPOINT, save_checkpoint))
            return loop()

    def _replace(self, name: str, replacement: Callable) -> None:
        """Replace a method of the trainer by `replacement(the method, ...)`."""
        replaced = partial(replacement, getattr(self.trainer, name))
        self._opened.enter_context(mock.patch.object(self.trainer, name, replaced))

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: object,
    ) -> None:
        """Install the signal handlers. If the run is complete, let Trainer skip its epochs."""
        states: Any = state.stateful_callbacks
        is_evaluation_due = states.get(STATE_KEY, {}).get("evaluate")
        if self._checkpoint:
            self._find_best(Path(self._checkpoint, TRAINER_STATE_NAME))
        if self.trainer.is_fsdp_enabled:
            train_like_one_process(self.trainer.model)
        self._callback.check_exports(self.trainer.model)
        self._flags = StepFlags(self._callback.signals)
        self._opened.push(self._flags.close)
        if 0 < state.max_steps <= state.global_step:
            distributed.print_main(
                f"the run is complete: checkpoint-{state.global_step} has all of its steps"
            )
            control.should_training_stop = True
        if is_evaluation_due and args.eval_strategy != "no":
            self._make_up_for_evaluation()
        self._kept_best = _best(state)
        if control.should_training_stop:
            # Otherwise, Trainer would train one more step of an unfinished epoch.
            self._replace(RUN_EPOCH, lambda run_epoch, **_: None)

    def _find_best(self, state_file: Path) -> None:
        """Let Trainer know of the best checkpoint, which it forgets if the directory was moved."""
        saved = distributed.run_on_main(lambda: TrainerState.load_from_json(str(state_file)))
        best = saved.best_model_checkpoint
        if best:
            self._locate_best(step_of(Path(best)))
            self._check_best(self.trainer.state.best_model_checkpoint or best)

    def _make_up_for_evaluation(self) -> None:
        """Evaluate as the run before would have done after its checkpoint. Collective."""
        trainer = self.trainer
        getattr(trainer, LOAD_RANDOM_STATE)(self._checkpoint)
        metrics = getattr(trainer, EVALUATE)(None, None)
        getattr(trainer, DETERMINE_BEST)(metrics=metrics, trial=None)
        self._locate_best(trainer.state.best_global_step)
        getattr(trainer, SAVE_RANDOM_STATE)(self._random_state)
        self._replace(LOAD_RANDOM_STATE, lambda load, _: load(self._random_state))

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        """Start the exchange that tells all ranks of a signal or a failed save on any rank."""
        ended = self._save and self._save.ended
        self._flags.start(bool(ended and ended.done() and ended.exception()))

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Log the error of a failed save. If any rank got a signal, let Trainer stop.

        Raises:
            CheckpointError: weights are not finite, or several saves in a row have failed.
        """
        if self._flags.finish():
            self._settle()
            self._stop_if_hopeless()
        if self._flags.told:
            if state.epoch % 1 and not control.should_training_stop:
                args.eval_strategy = "no"  # Trainer ends the epoch, which is cut short
            control.should_training_stop = True
            args.save_only_model = False  # so that the next run continues exactly
        if control.should_evaluate:
            getattr(self.trainer, SAVE_RANDOM_STATE)(self._random_state)

    on_epoch_end = on_step_end

    def on_prediction_step(self, *_: object, **__: object) -> None:
        """If any rank got a signal, end an evaluation: save and exit. The resumed run evaluates.

        But do not end one that another callback has begun, or that uses other weights than those of
        the last step, such as averages: they would be saved.
        """
        callback = self._callback
        if callback.evaluated is None:
            return
        self._flags.finish()
        if not self._flags.told:
            self._flags.start(False)
            return
        trainer = self.trainer
        is_unchanged = callback.evaluated == checksums(trainer.model)
        callback.evaluated = None
        if not all(distributed.gather(is_unchanged)):
            return
        self._is_cut = True
        getattr(trainer, LOAD_RANDOM_STATE)(self._random_state)
        self._save_now()
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)

    def _save_now(self) -> None:
        """Save because of a signal. Collective."""
        trainer = self.trainer
        trainer.args.save_only_model = False
        getattr(trainer, SAVE_CHECKPOINT)(trainer.model, None)
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    def on_evaluate(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        """Finish the save in flight: if it failed, its metric must not be the best so far."""
        self._evaluated_step = state.global_step
        self._saved_step = -1  # what an evaluation has found is not saved
        if self._save and self._save.ended:  # else other callbacks may still add files
            self._settle()

    def save_checkpoint(self, by_trainer: Callable[[], None]) -> None:
        """Save a checkpoint in place of `Trainer._save_checkpoint`. Collective."""
        trainer = self.trainer
        args = trainer.args
        state = trainer.state
        self._settle()
        self._has_saved = True
        self._saved_step = state.global_step
        self._come_last()
        self._stop_if_hopeless()
        self._locate_best(state.best_global_step)
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(self._path_of(state.global_step))
        # If the step ends an epoch, Trainer may evaluate next.
        is_last = not state.epoch % 1 or trainer.control.should_training_stop
        is_due = is_last and args.eval_strategy == "epoch" and args.eval_delay <= state.epoch
        is_due = is_due and self._evaluated_step != state.global_step
        states: Any = state.stateful_callbacks  # annotated as a list, but a dict
        states[STATE_KEY] = {"run": self.run_id, "evaluate": self._is_cut or is_due}
        save = Save(
            step=state.global_step,
            written=self._directory.workspace / f"checkpoint-{state.global_step}",
            facts={
                "run": self.run_id,
                "step": state.global_step,
                "world_size": args.world_size,
                "global_batch_size": trainer.get_total_train_batch_size(args),
            },
            keep=args.save_total_limit,
            best=_best(state),
        )
        self._save = save
        is_gathered = trainer.is_fsdp_enabled and not is_sharded(trainer)
        for unit in units_of(trainer.model):
            unit.reshard()  # on all ranks, even if one fails before it would in its save
        try:
            distributed.run_on_main(lambda: self._directory.begin(save.step))
            with nullcontext() if is_gathered else distributed.agreed():
                self._write_small_files(save, by_trainer)
            self._saver.start(save, self._is_asynchronous)
        except Exception as error:
            if is_gathered:
                raise  # as in stock Trainer: other ranks may still wait for this one
            save.error = error

    def _locate_best(self, step: int | None) -> None:
        """Let Trainer's state name the checkpoint of a step as the best, if it is there.

        So the directory of a run may be moved.
        """
        state = self.trainer.state
        # A kill may have left `checkpoint-0<step>` only.
        found = [path for path in list_checkpoints(self._directory.path) if step_of(path) == step]
        for path in distributed.from_main(found[:1]):
            state.best_model_checkpoint = str(path)

    def _write_small_files(self, save: Save, by_trainer: Callable[[], None]) -> None:
        """Let Trainer write its files, and record the sharded state."""
        trainer = self.trainer
        state = trainer.state
        with (
            mock.patch.object(GenerationConfig, "save_pretrained", save_as_it_came),
            # Otherwise, Trainer would wait for all ranks, even if one has failed, and look for the
            # best checkpoint beside the unfinished one.
            mock.patch.object(state, "best_global_step", None),
            redirected(trainer, save.written.parent) as save.state,
        ):
            by_trainer()
        if not save.state:
            weights = trainer.model.named_parameters()
            check_finite(item for item in weights if item[1].requires_grad)
        if trainer.args.should_save:
            state.save_to_json(str(save.written / TRAINER_STATE_NAME))
            if is_sharded(trainer):
                model = extract_model_from_parallel(trainer.model, keep_torch_compile=False)
                write_description(save.written, model, self.processor)

    def on_save(self, *_: object, **__: object) -> None:
        """Let the save be completed: all other callbacks have added their files.

        Raises:
            CheckpointError: Trainer has saved without calling `save_checkpoint`.
        """
        if not self._has_saved:
            raise CheckpointError(
                "the trainer has saved without calling Trainer._save_checkpoint, so its checkpoints"
                " are not verified. Let it call this method, or remove ShardedCheckpointCallback."
            )
        self._end_save()

    def _end_save(self, *_: object, **__: object) -> None:
        """Let the save in flight, if any, be completed. Collective."""
        save = self._save
        if save is None or save.ended is not None:
            return
        distributed.gather(None)  # then the callbacks of all ranks are done
        distributed.run_on_main(lambda: self._directory.hide(save.written))
        self._saver.complete(save)
        if not self._is_asynchronous:
            self._settle()
            if self.trainer.args.push_to_hub and self._error is None:
                getattr(self.trainer, PUSH_CHECKPOINT)(str(self._path_of(save.step)))

    on_step_begin = _end_save  # another callback may have saved without Trainer's event

    def _come_last(self) -> None:
        """Be the last callback again: others may have been added."""
        callbacks = self.trainer.callback_handler.callbacks
        callbacks.append(callbacks.pop(callbacks.index(self)))

    def _finalize(self, by_trainer: Callable, *args: object, **kwargs: object) -> Any:
        """Finish the save in flight before Trainer loads the best model."""
        self._callback.evaluated = None
        self._come_last()
        state = self.trainer.state
        if self._flags.told and self._saved_step != state.global_step:
            self._save_now()
        self._settle()
        _set_best(state, distributed.from_main(_best(state)))
        arguments = self.trainer.args
        if self._flags.told:
            arguments.load_best_model_at_end = False
        self._check_best(state.best_model_checkpoint)
        # With 1, Trainer would delete all checkpoints but the best one.
        with mock.patch.object(arguments, "save_total_limit", None):
            return by_trainer(*args, **kwargs)

    def _check_best(self, best: str | None) -> None:
        """Raise a CheckpointError if the model to be exported cannot be loaded. Collective."""
        if not best or not self.trainer.args.load_best_model_at_end:
            return
        path = distributed.from_main(Path(best))
        is_of_stock = distributed.run_on_main(
            lambda: path.is_dir() and not read_run_id(path) and not (path / MANIFEST).exists()
        )
        damage = None if is_of_stock else find_damage_together(path, only_model=True)
        if damage:
            raise CheckpointError(
                f"the best checkpoint, {path}, cannot be loaded: {damage}. Copy it there, or set "
                "load_best_model_at_end=False."
            )

    def on_train_end(self, *_: object, **__: object) -> None:
        """Export the model unless a signal stopped the run. After a signal, exit.

        Raises:
            CheckpointError: the last save failed.
            ExportError: the model cannot be exported.
        """
        self._settle()
        if not self._flags.told:
            self._callback.export(self)
        if self._error is not None:
            raise CheckpointError(
                f"the last checkpoint was not saved in {self._directory.path}: "
                f"{describe(self._error)}"
            ) from self._error
        if self._flags.told:
            checkpoint = self._path_of(self.trainer.state.global_step)
            distributed.print_main(f"stopped by a signal; resume from {checkpoint}")
            distributed.gather(None)  # then no rank needs another one any more
            sys.exit(EXIT_PREEMPTED)

    def _settle(self) -> None:
        """Complete the save in flight. If it failed, warn and undo its change of the best model."""
        self._end_save()  # Trainer's event is missing if another callback has saved
        save = self._save
        if save is None or save.ended is None:
            return
        self._save = None
        self._error = save.ended.exception()  # the same on every rank
        if self._error is None:
            self._num_failures = 0
            self._kept_best = save.best
            return
        self._num_failures += 1
        if distributed.is_main():
            logger.warning("checkpoint-%d was not saved: %s", save.step, describe(self._error))
        state = self.trainer.state
        if state.best_global_step == save.step:
            _set_best(state, self._kept_best)

    def _stop_if_hopeless(self) -> None:
        """Raise the error of the last save if the next ones would fail, too."""
        error = self._error
        if isinstance(error, WeightsError) or (error and self._num_failures >= MAX_FAILURES):
            raise CheckpointError(
                f"training stops, because nothing was saved in {self._directory.path}: "
                f"{describe(error)}"
            ) from error

    def _path_of(self, step: int) -> Path:
        return self._directory.path / f"checkpoint-{step}"


@torch.no_grad()
def checksums(model: Any) -> list[float]:
    """Return the sum of each trained weight of this rank. Not a collective."""
    for unit in units_of(model):  # an evaluation leaves the root gathered
        unit.reshard()
    weights = [local_part(value) for value in model.parameters() if value.requires_grad]
    # Some devices have no float64.
    return [weight.sum(dtype=torch.float32).item() for weight in weights]


def _best(state: TrainerState) -> tuple[Any, ...]:
    """Return Trainer's best metric so far, and the step and the checkpoint that have it."""
    return state.best_metric, state.best_global_step, state.best_model_checkpoint


def _set_best(state: TrainerState, best: tuple[Any, ...]) -> None:
    state.best_metric, state.best_global_step, state.best_model_checkpoint = best
