"""What a rank does: trains, and returns what it has seen."""

import os
import sys
import time
from typing import Any

import transformers

from tests.oracle.adapters import plain_name
from tests.oracle.cases import Case
from tests.oracle.trainers import Run, build_trainer

LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
LOGGED = ("loss", "grad_norm", "eval_loss")


def train(case: Case, run: Run) -> dict[str, Any]:
    """Train on this rank; return losses and norms.

    Rank 0 writes the values before and after to `run.output` with an ending.
    """
    import torch

    # Errors come back through the harness.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stdout
    if run.is_reference:
        for name in LAUNCHER:
            os.environ.pop(name)  # otherwise Accelerate would use DDP
    else:
        from hf_fsdp_recipes import patches

        patches.enable_cpu_ranks()
    trainer, checkpoint = build_trainer(case, run, callbacks_of(case, run))
    found: dict[str, Any] = {}
    if run.is_reference and has_fused_loss(case):
        found["fused"] = compare_losses(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    write(trained_values(trainer.model), f"{run.output}-after.pt")
    log = trainer.state.log_history
    found |= {key: [entry[key] for entry in log if key in entry] for key in LOGGED}
    modules = list(trainer.model.modules())
    found["units"] = sum(isinstance(part, torch.distributed.fsdp.FSDPModule) for part in modules)
    found["distributed"] = trainer.accelerator.distributed_type.value
    found["step"] = trainer.state.global_step
    found["resumed"] = checkpoint is not None
    found["cpu_seconds"] = round(time.process_time(), 2)  # of this rank, since its start
    return found


def has_fused_loss(case: Case) -> bool:
    # bitsandbytes repacks the weights when a 4-bit model is evaluated on a CPU.
    return not case.is_plain and not case.method.startswith("qlora") and not case.stream


def callbacks_of(case: Case, run: Run) -> list[Any]:
    """Return the run's callbacks, with the one that saves as the last."""
    callbacks: list[Any] = []
    if case.fault and not run.is_reference:
        callbacks.append(Fault(case.fault, run.part))
    if run.part != "second":
        callbacks.append(Watch(run.output))
    if run.part != "whole":
        from hf_fsdp_recipes import ShardedCheckpointCallback

        if run.part == "first":
            callbacks.append(Stop())
        callbacks.append(ShardedCheckpointCallback())
    return callbacks


class Watch(transformers.TrainerCallback):
    """Writes the values before the first step."""

    def __init__(self, output: str) -> None:
        self._output = output

    def on_train_begin(self, *_: Any, model: Any = None, **options: Any) -> None:
        write(trained_values(model), f"{self._output}-before.pt")


class Stop(transformers.TrainerCallback):
    """Stops the run after its first save, with the schedule of a longer run."""

    def on_save(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        control.should_training_stop = True


class Fault(transformers.TrainerCallback):
    """Spoils the ranks' run a little, for tests of the oracle.

    Args:
        kind: `head` changes the gradient of the output head by 1 %, `start` a weight before the
            first step, and `state` drops the optimizer's state when a run goes on.
    """

    def __init__(self, kind: str, part: str) -> None:
        self._kind = kind
        self._part = part

    def on_train_begin(self, *_: Any, model: Any = None, **options: Any) -> None:
        import torch

        if self._kind == "start":
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).mul_(1.0001)
        if self._kind == "state" and self._part == "second":
            for state in options["optimizer"].state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name].zero_()

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **options: Any) -> None:
        if self._kind == "head":
            for parameter in model.get_output_embeddings().parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.99)


def trained_values(model: Any) -> dict[str, Any]:
    """Return full copies of all parameters that are trained. Collective."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            found[plain_name(name)] = full.detach().float().cpu().clone()
    return found


def write(values: dict[str, Any], path: str) -> None:
    import torch

    if os.environ.get("RANK", "0") == "0":
        torch.save(values, path)


def compare_losses(trainer: Any) -> float:
    """Return how TRL's fused loss differs from the model's own on the first batch, relatively.

    Both runs use the fused loss, so no other check sees such a difference.
    """
    import torch

    batch = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.eval()
    with torch.no_grad():
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits.float()
        labels = batch["labels"][:, 1:].flatten()
        own = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)
        fused = trainer.compute_loss(model, dict(batch))
    model.train()
    return abs(float(fused - own)) / float(own)
