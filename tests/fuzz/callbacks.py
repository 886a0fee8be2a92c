"""The callbacks of a combination's trainer, besides ours."""

import functools
import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from tests.fuzz.drawing import EVENTS
from tests.fuzz.values import plain, relative

# The attribute of TrainerControl that an action sets.
FLAGS = {
    "save": ("should_save", True),
    "unsave": ("should_save", False),
    "evaluate": ("should_evaluate", True),
    "epoch_stop": ("should_epoch_stop", True),
    "stop": ("should_training_stop", True),
    "untrain": ("should_training_stop", False),
    "log": ("should_log", True),
}


class Recorder(TrainerCallback):
    """Notes every event in `events`, with the state and what Trainer shall do next."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        for event in EVENTS:
            setattr(self, event, functools.partial(self._note, event))

    def _note(self, event: str, args: Any, state: Any, control: Any, **found: Any) -> None:
        facts = {
            "step": state.global_step,
            "epoch": state.epoch,
            "next": [name for name, is_set in vars(control).items() if is_set],
            "best": [
                state.best_metric,
                state.best_global_step,
                relative(state.best_model_checkpoint, Path.cwd()),
            ],
            "logs": found.get("logs") or found.get("metrics") or {},
        }
        if event == "on_train_begin":
            facts["max_steps"] = state.max_steps
        if event == "on_save" and args.should_save:
            checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
            facts["can be read"] = Path(checkpoint, "trainer_state.json").exists()
        self.events.append([event, plain(facts)])


class Actor(TrainerCallback):
    """Acts when it gets an event for the n-th time."""

    def __init__(self, event: str, n: int, action: str) -> None:
        self._num_left = n
        self._action = action
        setattr(self, event, self._count)

    def _count(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            act(self._action, args, state, control, found)


class Counter(TrainerCallback, ExportableState):
    """Counts steps, and keeps the count in checkpoints."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


def act(action: str, args: Any, state: Any, control: Any, found: dict[str, Any]) -> None:
    """Do what an actor does: change flags, arguments, weights, rates or files, or raise."""
    if action in FLAGS:
        setattr(control, *FLAGS[action])
    elif action == "raise":
        raise RuntimeError("raised by an actor")
    elif action == "interrupt":
        raise KeyboardInterrupt("by an actor")
    elif action == "limit":
        args.save_total_limit = 1
    elif action == "lr":
        for group in found["optimizer"].param_groups:
            group["lr"] *= 0.5
    elif action == "weights":
        scale_weights(found["model"], 0.9)
    elif action == "nan":
        scale_weights(found["model"], float("nan"))
    elif args.should_save:
        write(action, Path(args.output_dir, f"checkpoint-{state.global_step}"), found["model"])


@torch.no_grad()
def scale_weights(model: torch.nn.Module, factor: float) -> None:
    for value in model.parameters():
        value.mul_(factor)


def write(action: str, checkpoint: Path, model: Any) -> None:
    """Write into a checkpoint: a note, or the config as PEFT's and transformers' functions do."""
    if action == "write":
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "extra.txt").write_text("written in on_save")
    else:
        model = getattr(model, "module", model)  # of DDP
        config = getattr(model, "peft_config", {}).get("default", model.config)
        config.save_pretrained(checkpoint)


def text_of(error: BaseException) -> str:
    """Return an error's text without what differs from run to run."""
    text = str(error).replace(os.getcwd(), "<cwd>")
    text = re.sub(r"\bFSDP(?=[A-Z][a-z])", "", text)  # our sharded models keep their class's name
    return re.sub(r"0x[0-9a-f]+", "0x", text)[:400]
