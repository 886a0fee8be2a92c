"""`ShardedCheckpointCallback` replaces a stock Trainer's saves. Wiring only; checkpointing/ writes the files.

Trainer decides when a save is due. The callback clears Trainer's flag and saves once that step's logging and evaluation are
done, so it writes the state that Trainer would have written.
"""

import copy
import dataclasses
import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import layout, resume
from hf_fsdp_recipes.checkpointing.lock import lock_directory
from hf_fsdp_recipes.checkpointing.preemption import SignalWatch
from hf_fsdp_recipes.checkpointing.state import capture
from hf_fsdp_recipes.checkpointing.writer import Snapshot, Writer, save_bytes, save_tensors, save_text
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.export import model_assets
from hf_fsdp_recipes.export.from_model import export_model
from hf_fsdp_recipes.export.hub import HubTarget, Pusher, read_target
from hf_fsdp_recipes.metrics.clock import clock
from hf_fsdp_recipes.patches import cpu_ranks, registry
from hf_fsdp_recipes.patches.torch import wait_for_gloo_at_exit

if TYPE_CHECKING:
    from filelock import BaseFileLock

logger = logging.getLogger(__name__)


class ShardedCheckpointCallback(TrainerCallback):
    """Save sharded checkpoints atomically and in the background, from a stock Trainer under FSDP.

    Add it to a `Trainer` or a TRL trainer on every rank. `save_strategy`, `save_steps`, `save_total_limit` and
    `load_best_model_at_end` keep their meaning. Without FSDP it does nothing.

    Args:
        asynchronous: keep training while a checkpoint is written, which needs host memory for one copy of this rank's
            state. False blocks until the checkpoint is complete.
        export_dir: export the full model there when training ends.
        signals: whether SIGTERM and SIGUSR1 end the run after a checkpoint, on all ranks at the same step.
        check_signals_every_steps: number of steps between checks for a signal on any rank.
        hub: where to push checkpoints and the export; None reads Trainer's own `push_to_hub` arguments.
        rank_files: returns this rank's additional small files as {name: text}, as they were after the last step.

    Raises:
        CheckpointError: the run's last save failed. An earlier failed save only logs a warning at the next step.
    """

    def __init__(
        self,
        *,
        asynchronous: bool = True,
        export_dir: str | os.PathLike[str] | None = None,
        signals: bool = True,
        check_signals_every_steps: int = 1,
        hub: HubTarget | None = None,
        rank_files: Callable[[], dict[str, str]] | None = None,
    ) -> None:
        wait_for_gloo_at_exit()
        cpu_ranks.enable()
        registry.apply("checkpointing")
        resume.enable_checks()
        self._asynchronous = asynchronous
        self._export_dir = export_dir
        self._rank_files = rank_files
        self._signals = SignalWatch(check_signals_every_steps) if signals else None
        self._strategy: Any = SaveStrategy.NO
        self._writer: Writer | None = None
        self._lock: BaseFileLock | None = None
        self._plugin: Any = None
        self._failure: Exception | None = None  # of the last finished save
        self._pending_step: int | None = None
        self._last_saved_step = -1
        self._random_state: dict[str, Any] = {}
        self._hub = hub
        self._pusher: Pusher | None = None
        self._pushed: Path | None = None
        self._model_assets: dict[str, bytes] = {}

    # Trainer's events, in the order of a run.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over from Trainer if this is an FSDP run. Collective, like all events below."""
        from accelerate.state import AcceleratorState

        self._plugin = getattr(AcceleratorState(), "fsdp_plugin", None)
        if self._plugin is None:
            return
        self._check(args, state)
        self._strategy = args.save_strategy
        if self._strategy == SaveStrategy.BEST:
            # With "best", Trainer saves inside evaluation, where a callback cannot intercept it. With "steps" it still tracks
            # the best step, but only sets a flag that a callback can clear.
            args.save_strategy = SaveStrategy.STEPS
        self._writer = Writer(args.output_dir, self._asynchronous)
        with distributed.sync_errors():
            if distributed.is_main():
                self._lock = lock_directory(args.output_dir)
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
        """Wait until the state is staged, because the optimizer is about to change it. Not a collective."""
        if self._writer is not None:
            with clock.spending("save", after="forward_backward"):
                self._writer.wait_until_staged()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Schedule a due save, exchange signals, and report a save that has failed."""
        if self._writer is None:
            return control
        if (failure := self._writer.collect_failure()) is not None:
            self._record_failure(failure)
        self._push()
        if control.should_save and self._strategy == SaveStrategy.STEPS:
            self._schedule(state)
        control.should_save = False
        if self._signals is not None and self._signals.is_agreed(state.global_step):
            self._schedule(state)
            control.should_training_stop = True
        self._random_state = _random_state()
        return control

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the random state current; save before Trainer loads its best model, after the last step."""
        self._random_state = _random_state()
        if "train_runtime" in (kwargs.get("logs") or {}):
            self._save_if_due(args, state, kwargs)
            self._wait(state)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the random state current."""
        self._random_state = _random_state()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the last step if it is due."""
        self._save_if_due(args, state, kwargs)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the last epoch if it is due."""
        self._save_if_due(args, state, kwargs)

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
            CheckpointError: the last checkpoint was not written.
            SystemExit: the run was signaled; see `preemption` for the exit status.
        """
        if self._writer is None:
            return
        self._save_if_due(args, state, kwargs)
        completed = self._finish()
        self._push()
        self._prune(args, state)
        args.save_strategy = self._strategy
        if self._lock is not None:
            self._lock.release()
        if self._signals is not None:
            self._signals.stop()
        distributed.raise_together(self._failure)
        if self._signals is not None:
            self._signals.exit_if_signaled(completed)
        if self._export_dir is not None:
            exported = export_model(kwargs["model"], self._export_dir, tokenizer=kwargs.get("processing_class"))
            self.push_export(exported)

    def push_export(self, export: Path) -> None:
        """Push the final export, if pushing is on, and wait for it; a failure is a warning.

        Acts on rank 0 only, without collectives: an upload may outlast any timeout.
        """
        if self._pusher is not None:
            self._pusher.push_export(export)

    # Shared by the event handlers.

    def _check(self, args: TrainingArguments, state: TrainerState) -> None:
        from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType

        with distributed.sync_errors():
            if self._plugin.state_dict_type != StateDictType.SHARDED_STATE_DICT:
                raise CheckpointError(
                    f"fsdp_state_dict_type is {self._plugin.state_dict_type.name}, but ShardedCheckpointCallback writes "
                    f"SHARDED_STATE_DICT. Set that in the Accelerate config."
                )
            if args.save_only_model:
                raise CheckpointError(
                    "save_only_model is set, but a checkpoint without an optimizer cannot be resumed. Remove save_only_model."
                )
            if state.global_step > 0:
                resume.check_data_position(args, state)

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
        self._prune(args, state)
        snapshot = Snapshot(
            step,
            capture(kwargs["model"], kwargs["optimizer"], self._plugin),
            self._small_files(args, state, kwargs),
            resume.manifest_facts(args, state),
        )
        try:
            self._writer.save(snapshot)
        except CheckpointError as error:
            self._record_failure(error)

    def _small_files(
        self, args: TrainingArguments, state: TrainerState, kwargs: dict[str, Any]
    ) -> dict[str, Callable[[Path], None]]:
        name = f"rng_state_{distributed.rank()}.pth" if distributed.world_size() > 1 else "rng_state.pth"
        files = {name: save_tensors(self._random_state or _random_state())}
        files |= {name: save_text(text) for name, text in (self._rank_files or dict)().items()}
        if distributed.is_main():
            scheduler = copy.deepcopy(kwargs["lr_scheduler"].state_dict())
            params = yaml.safe_dump(resume.train_params(args, kwargs["model"]), sort_keys=True)
            files |= {name: save_bytes(content) for name, content in self._model_assets.items()}
            files["scheduler.pt"] = save_tensors(scheduler)
            files[layout.STATE_FILE] = save_text(json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n")
            files[resume.PARAMS_FILE] = save_text(params)
        return files

    def _record_failure(self, error: Exception) -> None:
        # Training continues: the earlier checkpoint is intact and the next save may succeed.
        self._failure = error
        if distributed.is_main():
            logger.warning("%s Training continues.", error)

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
        completed = self._writer.completed if self._writer is not None and self._pusher is not None else None
        if completed is not None and completed != self._pushed and self._pusher is not None:
            self._pushed = completed
            self._pusher.push_checkpoint(completed)

    def _wait(self, state: TrainerState) -> None:
        """Wait for the save in flight; forget the best checkpoint if it was not written."""
        if self._writer is None:
            return
        self._finish()
        best = state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            state.best_model_checkpoint = None

    def _prune(self, args: TrainingArguments, state: TrainerState) -> None:
        # Counts complete checkpoints only, not the one in flight, so there is always one to fall back on.
        if args.save_total_limit and args.save_total_limit > 0 and distributed.is_main():
            protected = [state.best_model_checkpoint] if state.best_model_checkpoint else []
            if self._pusher is not None and self._pusher.source is not None:
                protected.append(str(self._pusher.source))
            layout.remove_old(args.output_dir, args.save_total_limit, protect=protected)


def _random_state() -> dict[str, Any]:
    """Return this rank's random state in the form that Trainer restores."""
    import numpy

    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        has_several_ranks = distributed.world_size() > 1
        states[accelerator.type] = module.get_rng_state_all() if has_several_ranks else module.get_rng_state()
    return states
