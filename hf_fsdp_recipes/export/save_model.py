"""Makes `trainer.save_model()` export a sharded model, which Trainer itself would not save."""

from pathlib import Path
from typing import TYPE_CHECKING

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.export.from_model import export_model
from hf_fsdp_recipes.patches.transformers import register_save_handler

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


def enable(callback_type: "type[TrainerCallback]") -> None:
    """Export on `save_model` for trainers that have a callback of this type."""

    def save(trainer: "Trainer", output_dir: str) -> None:
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
        is_sharded = plugin is not None and "SHARDED" in str(plugin.state_dict_type)
        if not is_sharded or not any(isinstance(one, callback_type) for one in trainer.callback_handler.callbacks):
            return
        directory = Path(output_dir)
        if directory.resolve() == Path(trainer.args.output_dir).resolve():
            directory /= "export"  # an export replaces its directory, and this one holds the checkpoints
        export_model(trainer.model, directory, tokenizer=trainer.processing_class)
        distributed.print_main(f"exported: {directory}")

    register_save_handler(save)
