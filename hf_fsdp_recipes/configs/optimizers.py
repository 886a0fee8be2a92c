"""Lists Trainer's optimizers that can train, save and resume under FSDP."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainingArguments

ELEMENTWISE = ("adamw_torch_fused", "adamw_torch", "sgd", "rmsprop")
# For each FSDP version, the optimizers with which a run has the same losses on one and two ranks, and resumes exactly.
# Under FSDP2, Adagrad fails, because it creates its state while the parameters are on meta.
SHARDABLE = {1: (*ELEMENTWISE, "adagrad"), 2: ELEMENTWISE}


def optimizer_name(args: "TrainingArguments") -> str:
    """Return the name of the optimizer in `args.optim`, which may be an enum."""
    return str(getattr(args.optim, "value", args.optim))


def is_bitsandbytes_optimizer(name: str) -> bool:
    """Return whether Trainer takes this optimizer from bitsandbytes."""
    return name in ("adamw_8bit", "adamw_bnb_8bit") or name.startswith(("paged_", "lion_", "ademamix", "rmsprop_bnb"))


def optimizer_errors(name: str, version: int | None) -> list[str]:
    """Return why an optimizer does not work under an FSDP version; [] if it works, and without FSDP (`version` is None)."""
    if version is None or name in SHARDABLE[version]:
        return []
    # AdEMAMix keeps two averages in one tensor, which cannot be sharded like the parameter. Under FSDP1, bitsandbytes 0.50 nests
    # the states in a dict, which `optim_state_dict` compares as if it were a number.
    if version == 2 and is_bitsandbytes_optimizer(name) and "ademamix" not in name:
        return []
    others = "adamw_8bit or paged_adamw_32bit, or " if version == 2 else ""
    return [
        f"optim: {name} fails to train, save or resume under FSDP{version}. Use {others}one of {', '.join(SHARDABLE[version])}."
    ]
