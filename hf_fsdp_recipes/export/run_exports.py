"""Exports the model of a run, and pushes its exports and checkpoints."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing.layout import MANIFEST, list_checkpoints
from hf_fsdp_recipes.checkpointing.mirror import Mirror
from hf_fsdp_recipes.checkpointing.run_identity import EXPORT
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.export.export_plan import parse_dtype
from hf_fsdp_recipes.export.from_model import check_export, export_model
from hf_fsdp_recipes.export.hub import HubTarget, Pusher, read_target
from hf_fsdp_recipes.export.verify_files import has_weights
from hf_fsdp_recipes.loading.export_marker import MARKER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments


class RunExports:
    """Exports a run's model when training ends.

    Also pushes checkpoints and the export to the Hub, and uploads the export to the mirror.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        hub: HubTarget | None,
        mirror: Mirror,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        if hub is not None and not isinstance(hub, HubTarget):
            raise CheckpointError(
                f"hub is {hub!r}, not a HubTarget. Pass hf_fsdp_recipes.export.hub.HubTarget({hub!r})."
            )
        self.directory = None if directory is None else Path(directory)
        self._dtype = parse_dtype(dtype)
        self._hub = hub
        self._mirror = mirror
        self._pusher: Pusher | None = None
        self._output_dir: Path | None = None  # known once training has started
        self.is_finished = False  # the run had ended before it was resumed

    def check(self, model: torch.nn.Module) -> None:
        """Check before training that a planned export can be written; raise an error on every rank if not. Collective."""
        from accelerate.state import AcceleratorState

        if self.directory is None:
            return
        kind = AcceleratorState().distributed_type.value
        if kind in ("DEEPSPEED", "MEGATRON_LM"):
            raise CheckpointError(
                f"export_dir is set, but a model cannot be exported under {kind}. Use FSDP or DDP, or unset export_dir."
            )
        check_export(model, self.directory, dtype=self._dtype)

    def start(self, args: "TrainingArguments") -> None:
        """Create the pusher on rank 0 if checkpoints and exports are to be pushed to the Hub. Not a collective."""
        self._output_dir = Path(args.output_dir)
        target = self._hub or read_target(args)
        if target is not None and distributed.is_main():
            self._pusher = Pusher(target, args.output_dir)

    @property
    def sources(self) -> list[str]:
        """The directories whose push or upload has not finished. They must not be deleted."""
        pushed = [] if self._pusher is None or self._pusher.source is None else [str(self._pusher.source)]
        return pushed + self._mirror.sources

    def push_checkpoint(self, checkpoint: Path | None) -> None:
        """Start pushing the last complete checkpoint, unless that was tried before. Only rank 0 pushes; not a collective."""
        if self._pusher is not None and checkpoint is not None:
            self._pusher.push_checkpoint(checkpoint)

    def export(self, model: torch.nn.Module, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        """If an export directory is set, export the model, push the export to the Hub and start its mirror upload. Collective."""
        if self.directory is None:
            return
        export = self.directory
        if not self.has_exported(export):
            export = export_model(model, export, dtype=self._dtype, tokenizer=tokenizer, use_free_name=True)
            self.push(export)
        self._mirror.add(export, MARKER)

    def save_model(self, trainer: "Trainer", directory: Path) -> None:
        """Export the model to `directory`, or to its subfolder `export` if it is the run's output directory. Collective."""
        is_runs_own = directory.resolve() == Path(trainer.args.output_dir).resolve()
        target = directory / EXPORT if is_runs_own else directory
        export = export_model(trainer.model, target, dtype=self._dtype, tokenizer=trainer.processing_class)
        distributed.print_main(f"exported: {export}")

    def has_exported(self, export: Path) -> bool:
        """Return True if the run had already finished when it was resumed and its export exists. Collective.

        An export that is older than the run's last checkpoint is of an earlier step, and does not count.
        """
        output_dir = self._output_dir or export.parent

        def is_newest() -> bool:
            saved = [found.path / MANIFEST for found in list_checkpoints(output_dir) if found.is_complete]
            written = (export / MARKER).stat().st_mtime_ns if (export / MARKER).is_file() else 0
            return has_weights(export) and all(manifest.stat().st_mtime_ns <= written for manifest in saved[-1:])

        return self.is_finished and distributed.run_on_main(is_newest)

    def push(self, export: Path) -> None:
        """Push the final export, if pushing is on, and wait for it. A failure only logs a warning. Not a collective."""
        if self._pusher is not None:
            self._pusher.push_export(export)

    def upload(self, *exports: Path) -> None:
        """Upload exports to the mirror, if there is one, and wait; raise a SaveError if an upload failed. Collective."""
        for export in exports:
            self._mirror.add(export, MARKER)
        distributed.raise_together(self._mirror.wait())
