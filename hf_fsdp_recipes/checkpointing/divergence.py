"""Finds NaN and infinity in weights and logs, so that a diverged run is not saved or exported as a good one."""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.checkpointing.state import local_tensors
from hf_fsdp_recipes.errors import DivergenceError
from hf_fsdp_recipes.loading.verify import find_non_finite

if TYPE_CHECKING:
    from transformers import TrainerState


def check_weights(tensors: Iterable[tuple[str, torch.Tensor]], step: int, output_dir: Path) -> None:
    """Check this rank's weights for NaN and infinity. Synchronizes each device once if all are finite. Not a collective.

    Args:
        tensors: names and values of this rank's weights (shards or full tensors).
        step: number of steps trained, for the message.
        output_dir: the run's output directory; the message names the newest complete checkpoint in it.

    Raises:
        DivergenceError: a weight is NaN or infinite; the message names the first such tensor.
    """
    names = find_non_finite(tensors)
    if not names:
        return
    complete = [checkpoint.path for checkpoint in layout.list_checkpoints(output_dir) if checkpoint.is_complete]
    advice = "Start again with a lower learning rate."
    if complete:
        advice = (
            f"Start a new run with a lower learning rate, for example from an export of {complete[-1]}; a resumed run would keep "
            f"the old learning rate."
        )
    raise DivergenceError(
        f"the weights contain NaN or infinity at step {step} (first tensor: {names[0]}), so training stopped and they were neither "
        f"saved nor exported. {advice}"
    )


def check_run(model: torch.nn.Module, state: "TrainerState", output_dir: str | os.PathLike[str]) -> None:
    """Check the trained weights, the last logged loss and the last logged gradient norm for NaN and infinity.

    Raises a DivergenceError for the weights, and warns for the loss and the gradient norm. Call it when
    training ends. Collective: every rank must call this.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with distributed.sync_errors():
        check_weights(local_tensors(trained), state.global_step, Path(output_dir))
    logged = [entry for entry in state.log_history if "loss" in entry or "grad_norm" in entry]
    entry = logged[-1] if logged else {}
    for name in ("loss", "grad_norm"):
        value = entry.get(name, 0.0)
        if isinstance(value, float) and not math.isfinite(value):
            distributed.warn_main(
                f"{name} is {value} at step {entry['step']}, although the weights are finite. Check the loss curve before "
                f"you use the weights."
            )
