"""`ShardedCheckpointCallback` lets a Trainer's training loops run as in `saving.run`."""

import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import CheckpointError, ExportError, explained
from hf_fsdp_recipes.export.directory import check_is_own, publish
from hf_fsdp_recipes.export.export import export_model, parse_dtype, plan_export
from hf_fsdp_recipes.loading.load_model import check_fsdp_version
from hf_fsdp_recipes.saving.directory import OutputDirectory, read_run_id, step_of
from hf_fsdp_recipes.saving.recorder import is_sharded
from hf_fsdp_recipes.saving.run import Run, checksums
from hf_fsdp_recipes.upstream import patches
from hf_fsdp_recipes.upstream.transformers_internals import GET_OUTPUT_DIR, INTERNAL_CALL


class ShardedCheckpointCallback(TrainerCallback):
    """Makes a Trainer's checkpoints complete or absent, and verified. Exports the model at the end.

    Trainer decides when to save. The directory `checkpoint-<step>` appears only when all of its
    files are on disk, with those that other callbacks add in `on_save`. Resume with
    `trainer.train(resume_from_checkpoint=latest_checkpoint(output_dir))`.

    With sharded state under FSDP, training waits until the state is copied to host memory, and
    continues while the checkpoint is written. The copy is as large as this rank's shard of the
    model and of the optimizer state. If the state cannot be copied on a rank, all ranks wait until
    it is written. With any other state, Trainer writes the files, and only their hashes are
    computed in the background.

    If a save fails, the error is logged and training continues. Training ends with an error if two
    saves in a row fail, if weights contain NaN, or if the last save fails.

    Pass this callback to the trainer on every rank. It comes into play after all other callbacks.

    Args:
        asynchronous: whether training continues while a checkpoint is written. If False, all files
            of the state are there when the other callbacks' `on_save` is called, and the checkpoint
            is complete before the next step. With `push_to_hub`, saves are never asynchronous.
        export_dir: directory to which the model is exported in Hugging Face format when training
            ends. With LoRA, only the adapter is exported. An earlier export of the same run is
            renamed to `_set-aside-<time>-<name>`.
        export_dtype: floating-point dtype of the exported weights, such as "bfloat16". None keeps
            the dtype of the parameters, which is float32 in full fine-tuning with mixed precision.
        merge_adapter: whether to also export the base model with the adapter merged in, to
            `<export_dir>_merged`.
        signals: whether all ranks save at the same step and exit with status 85 if any rank gets
            SIGTERM or SIGUSR1, or if the launcher dies.

    Attributes:
        exported: the directories to which the last training loop has exported.
        has_begun: whether a training loop has begun. Errors before that come from the set-up.
        evaluated: checksums of the weights that Trainer evaluates, or None if it does not.

    Raises:
        LoadError: the Accelerate config asks for FSDP1.
        PatchError: the installed version of transformers or Accelerate is not supported.
        CheckpointError: on every rank. Another run trains in `output_dir` or has left checkpoints
            there, or saves have failed.
        ExportError: on every rank. `export_dir` holds something else than this run's export, the
            model cannot be exported, which is known before training, the export cannot be written,
            or `export_dtype` is no floating-point dtype.
    """

    def __init__(
        self,
        *,
        asynchronous: bool = True,
        export_dir: str | os.PathLike[str] | None = None,
        export_dtype: torch.dtype | str | None = None,
        merge_adapter: bool = False,
        signals: bool = True,
    ) -> None:
        self.asynchronous = asynchronous
        self.signals = signals
        self._export_dirs: list[Path] = []  # where the model is exported, and the merged one
        if export_dir is not None:
            path = Path(export_dir).expanduser().resolve()
            self._export_dirs = [path, path.with_name(f"{path.name}_merged")][: 1 + merge_adapter]
        self._export_dtype = parse_dtype(export_dtype)
        self.exported: list[Path] = []
        self.has_begun = False
        self.evaluated: list[float] | None = None
        self._run_id: str | None = None
        self._is_training = False
        if patches.is_fsdp_requested():
            check_fsdp_version()
        patches.enable_cpu_ranks()
        patches.apply_for_saving()

    def on_init_end(self, args: Any, *_: object, **__: object) -> None:
        """Delete what a killed run left unfinished: `resume_from_checkpoint=True` would take it."""
        distributed.run_on_main(OutputDirectory(Path(args.output_dir)).heal)

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Note that training has begun.

        Raises:
            CheckpointError: the trainer has a training loop of its own.
        """
        if not self._is_training:
            raise CheckpointError(
                "this ShardedCheckpointCallback is not the trainer's first one, or the trainer has "
                "a training loop of its own. Remove it."
            )
        self.has_begun = True

    def on_step_end(
        self,
        args: object,
        state: object,
        control: TrainerControl,
        model: Any = None,
        **_: object,
    ) -> None:
        """Note the weights before other callbacks can replace them for an evaluation."""
        self.evaluated = checksums(model) if control.should_evaluate else None

    on_epoch_end = on_step_end

    def on_evaluate(self, *_: object, **__: object) -> None:
        """Note that evaluations which follow are of other callbacks, or of another dataset.

        If a signal ended them, the resumed run would repeat this one.
        """
        self.evaluated = None

    def train_with(
        self,
        trainer: Any,  # a Trainer
        loop: Callable[[], Any],
        checkpoint: str | None,
        trial: object,
    ) -> Any:
        """Run Trainer's training loop, and return its result. Collective.

        Args:
            trainer: the trainer.
            loop: its training loop.
            checkpoint: the checkpoint from which the loop resumes.
            trial: the trial of a hyperparameter search, if there is one.
        """
        directory = OutputDirectory(Path(getattr(trainer, GET_OUTPUT_DIR)(trial)))
        self._exports = self._export_dirs
        if trial is not None:
            self._exports = [directory.path / path.name for path in self._export_dirs]
        if trainer.args.save_on_each_node:
            raise CheckpointError(
                "save_on_each_node is set, but all nodes must share output_dir. Remove it, or "
                "remove ShardedCheckpointCallback."
            )
        self._run_id = distributed.run_on_main(
            lambda: self._claim(directory, trainer.args.auto_find_batch_size, checkpoint)
        )
        distributed.set_timeout(trainer.args.ddp_timeout_delta)
        self._is_training = True
        self.evaluated = None
        try:
            if is_sharded(trainer) and "save_model" not in vars(trainer):
                trainer.save_model = partial(_save_model, trainer, trainer.save_model)
            result = Run(self, trainer, directory, self._run_id, checkpoint).train(loop)
            self._run_id = None
        finally:
            self._is_training = False
            if distributed.is_main():
                directory.close()
        distributed.gather(None)  # so that no rank sees the workspace any more
        return result

    def _claim(self, directory: OutputDirectory, is_repeated: bool, checkpoint: str | None) -> str:
        """Open the directories of a run on rank 0. Return the run's id.

        If `is_repeated`, one `Trainer.train` runs several training loops.
        """
        step = 0
        run_id = self._run_id if is_repeated else None
        if checkpoint:
            state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
            step = state.global_step
            run_id = read_run_id(Path(checkpoint))
        run_id = run_id or secrets.token_hex(8)
        for export_dir in self._exports:
            if directory.path.resolve().is_relative_to(export_dir):
                raise ExportError(
                    f"export_dir is {export_dir}, which holds the checkpoints. Choose another one."
                )
            check_is_own(export_dir, run_id)
            with explained(ExportError, f"{export_dir} cannot be written"):
                export_dir.parent.mkdir(parents=True, exist_ok=True)
                TemporaryDirectory(dir=export_dir.parent).cleanup()
        try:
            directory.open(run_id, checkpoint, step)
        except Exception:
            directory.close()
            raise
        return run_id

    def check_exports(self, model: Any) -> None:
        """Raise an ExportError if a model cannot be exported. Collective. A run calls it."""
        if not hasattr(model, "peft_config"):
            self._exports = self._exports[:1]  # there is nothing to merge
        for merge_adapter in range(len(self._exports)):
            plan_export(model, self._export_dtype, bool(merge_adapter))

    def export(self, run: Run) -> None:
        """Export the model of a run that ends. Collective. A run calls it."""
        self.exported = []
        model = run.trainer.model
        state = run.trainer.state
        best = run.trainer.args.load_best_model_at_end and state.best_model_checkpoint
        step = step_of(Path(best)) if best else state.global_step
        facts = {"run": run.run_id, "step": step}
        for merge_adapter, export_dir in enumerate(self._exports):
            unpublished = export_dir.with_name(f".{export_dir.name}-{run.run_id}")
            # A kill may have left one.
            distributed.run_on_main(partial(rmtree, unpublished, ignore_errors=True))
            written = export_model(
                model,
                unpublished,
                dtype=self._export_dtype,
                tokenizer=run.processor,
                merge_adapter=bool(merge_adapter),
            )
            final = distributed.run_on_main(partial(publish, written, export_dir, facts))
            distributed.print_main(f"exported: {final}")
            self.exported.append(final)


def _save_model(
    trainer: Any,  # a Trainer
    by_trainer: Callable[..., None],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Let `Trainer.save_model` write the full model, not nothing, if the state is sharded.

    The model in a checkpoint stays sharded.
    """
    if args and INTERNAL_CALL in kwargs:
        by_trainer(*args, **kwargs)
        return
    plugin = trainer.accelerator.state.fsdp_plugin
    full = type(plugin.state_dict_type).FULL_STATE_DICT
    with mock.patch.object(plugin, "state_dict_type", full):
        by_trainer(*args, **kwargs)
