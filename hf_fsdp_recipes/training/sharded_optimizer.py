"""Makes bitsandbytes' paged and 8-bit optimizers work under FSDP2."""

from typing import TYPE_CHECKING, Any

from hf_fsdp_recipes.configs.optimizers import is_bitsandbytes_optimizer, optimizer_errors, optimizer_name
from hf_fsdp_recipes.environment import fsdp_version
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.patches.bitsandbytes import shard_optimizer_class

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments


def sharded_optimizer(args: "TrainingArguments") -> "tuple[type[torch.optim.Optimizer], dict[str, Any]] | None":
    """Make `optim: adamw_8bit` and bitsandbytes' other optimizers work under FSDP2.

    Unchanged, these optimizers fail on sharded parameters in the first step. On each rank, the returned class updates the rank's
    own rows of every parameter. Checkpoints include the optimizer's state. Pass the result to any Trainer:

        trainer = SFTTrainer(..., args=args, optimizer_cls_and_kwargs=sharded_optimizer(args))

    Args:
        args: Trainer's arguments; `optim`, `optim_args`, `learning_rate`, `weight_decay`, `adam_beta1` and so on apply.

    Returns:
        A value for Trainer's `optimizer_cls_and_kwargs`, or None if `args.optim` is not a bitsandbytes optimizer.

    Raises:
        ImportError: bitsandbytes is not installed.
        RecipeError: the optimizer does not work under the launched FSDP version, or bitsandbytes' interface has changed.
    """
    name = optimizer_name(args)
    if not is_bitsandbytes_optimizer(name):
        return None
    if errors := optimizer_errors(name, fsdp_version()):
        raise RecipeError(" ".join(errors))
    from transformers import Trainer

    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    return shard_optimizer_class(optimizer_class), kwargs
