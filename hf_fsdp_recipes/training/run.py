"""The main function of the scripts in recipes/: runs a recipe, from its arguments to the export."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.errors import record

from hf_fsdp_recipes.distributed import exit_with_message
from hf_fsdp_recipes.patches.torch import wait_for_gloo_at_exit, wait_for_gloo_workers

if TYPE_CHECKING:
    from hf_fsdp_recipes.training.arguments import Arguments


@record  # unexpected errors appear in torchrun's error table and files
def start(name: str, plan: Callable[["Arguments"], None] | None = None) -> None:
    """Run the recipe that the command line names. Collective: every rank must call this.

    A RecipeError ends the process with one line that says what to do, instead of a traceback.

    Args:
        name: the trainer's command in `hf-fsdp`: sft, dpo, kto, reward or grpo.
        plan: function that is called with the arguments, instead of training, if the recipe sets `dry_run`.
    """
    wait_for_gloo_at_exit()
    with exit_with_message():
        from hf_fsdp_recipes.training.arguments import parse_arguments

        # Checks everything that can be checked without the model. Every rank gets the same arguments.
        arguments = parse_arguments(trainer=name)
        # Imported after parse_arguments, which sets up CPU ranks: otherwise bitsandbytes would print a message on each of them.
        from hf_fsdp_recipes.training.build import build_trainer, find_resume, finish, train

        if arguments.recipe.dry_run and plan is not None:
            plan(arguments)
            return
        checkpoint = find_resume(arguments)  # locks output_dir; `auto` finds the newest complete checkpoint
        trainer = build_trainer(arguments)  # prepares the data; no rank holds weights yet
        failed_save = train(trainer, checkpoint)  # shards the model, loads its weights, trains, saves checkpoints
        finish(trainer, arguments)  # exports the final weights; each rank writes its own slices
        wait_for_gloo_workers()  # otherwise DDP could hang when the process group is destroyed
        trainer.accelerator.end_training()
        if failed_save is not None:
            raise failed_save  # the last checkpoint could not be written or uploaded
