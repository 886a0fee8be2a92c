"""What a rank does in a session: it makes the calls, and notes what they did."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.machinery
import logging
import os
import pkgutil
import random
import signal
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from transformers.trainer_utils import (
    HPSearchBackend,
    default_compute_objective,
    get_last_checkpoint,
)

from hf_fsdp_recipes import ShardedCheckpointCallback, distributed, latest_checkpoint
from hf_fsdp_recipes.upstream import patches
from tests.fuzz.callbacks import Recorder, text_of
from tests.fuzz.combinations import Case, Session, output_dir
from tests.fuzz.files import Files, describe
from tests.fuzz.trainers import EXPORT_DIR, build_trainer
from tests.fuzz.values import hash_tensor, plain, trainer_state
from tests.oracle.runs import LAUNCHER

RETURNED = "returned"
# The methods that copy and write a save, which `slow` delays.
SLOWED = (
    "hf_fsdp_recipes.saving.host_copy:HostCopy.take",
    "hf_fsdp_recipes.saving.saver:Saver._write",
    "hf_fsdp_recipes.saving.saver:Saver._complete",
)
DELAY_SECONDS = 0.3


@dataclasses.dataclass
class Step:
    """What one call did.

    Args:
        name: the call.
        outcome: `returned`, or the exception's class.
        value: what it returned, or the exception's text.
        events: the callbacks' events.
        facts: the trainer's state and arguments, and the state of the process and of the weights.
        files: all files afterwards.
        other_ranks: the outcomes on the other ranks.
    """

    name: str
    outcome: str
    value: Any = None
    events: list[Any] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: Files = dataclasses.field(default_factory=dict)
    other_ranks: list[str] = dataclasses.field(default_factory=list)


def run_session(session: Session, place: str, models: str) -> list[Step]:
    """Make the calls of a session in the directory `place`. Runs on every rank."""
    os.chdir(place)
    if session.case["world"] == "one":
        for name in LAUNCHER:
            os.environ.pop(name)  # otherwise there would be a process group
    be_quiet()
    patches.enable_cpu_ranks()
    if session.is_ours and session.case.get("slow"):
        slow_down()
    torch.manual_seed(0)
    steps = Run(session, models).calls()
    for thread in threading.enumerate():  # as at the end of a script
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    return steps


def be_quiet() -> None:
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module="hf_fsdp_recipes")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def slow_down() -> None:
    """Let each save of ours be copied and written later, as with a large model."""
    for name in SLOWED:
        class_name, _, attribute = name.rpartition(".")
        owner = pkgutil.resolve_name(class_name)
        setattr(owner, attribute, delayed(getattr(owner, attribute)))


def delayed(original: Any) -> Any:
    @functools.wraps(original)
    def method(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(DELAY_SECONDS)
        return original(*arguments, **keywords)

    return method


class Run:
    """The trainer of a session, and the calls."""

    def __init__(self, session: Session, models: str) -> None:
        self._case: Case = session.case
        self._calls = session.calls
        self._is_ours = session.is_ours
        self._models = models
        self._recorder = Recorder()
        self._callback: ShardedCheckpointCallback | None = None
        self._trainer: Any = None
        self._num_trials = 0

    def calls(self) -> list[Step]:
        """Make all calls."""
        steps = []
        for name in self._calls:
            self._recorder.events = []
            try:
                step = Step(name, RETURNED, plain(self._call(name)))
            except BaseException as error:
                step = Step(name, type(error).__name__, text_of(error))
            step.events = self._recorder.events
            if self._trainer is not None:
                step.facts = self._facts()
            wait_for_ranks()
            if distributed.is_main():
                step.files = describe(Path.cwd())
            wait_for_ranks()
            steps.append(step)
            if step.outcome != RETURNED and (name == "build" or not self._case.get("go_on")):
                break
        return steps

    def _call(self, name: str) -> Any:
        if name == "build":
            self._trainer = self._build(output_dir(self._case), self._new_callback())
            return None
        if name.startswith("other"):
            return self._train_other(self._callback if name == "other_shared" else None)
        if name.startswith("train"):
            return self._train(self._trainer, self._checkpoint(name))
        if name == "predict":
            return self._trainer.predict(self._trainer.eval_dataset).metrics
        if name == "save_model":
            return self._trainer.save_model("saved")
        return getattr(self._trainer, name)()

    def _new_callback(self) -> ShardedCheckpointCallback | None:
        if not self._is_ours:
            return None
        export_dir = EXPORT_DIR if self._case.get("export") else None
        self._callback = ShardedCheckpointCallback(export_dir=export_dir)
        return self._callback

    def _build(self, directory: str, callback: ShardedCheckpointCallback | None) -> Any:
        return build_trainer(self._case, self._models, directory, self._recorder, callback)

    def _train_other(self, callback: ShardedCheckpointCallback | None) -> Any:
        """Train a second trainer, which writes to another directory."""
        return self._train(self._build("other", callback or self._new_callback()), None)

    def _checkpoint(self, name: str) -> str | bool | None:
        """Return the `resume_from_checkpoint` of a call."""
        directory = Path(self._trainer.args.output_dir)
        if name == "train_true":
            return True
        if name == "train_newest" and self._is_ours:
            return latest_checkpoint(directory)
        if name == "train_newest":
            return get_last_checkpoint(directory) if directory.is_dir() else None
        if name == "train_earlier":
            paths = directory.glob("checkpoint-*")
            found = sorted(paths, key=lambda path: int(path.name.split("-")[1]))
            return str(found[0]) if found else None
        return None

    def _train(self, trainer: Any, checkpoint: str | bool | None) -> Any:
        if not self._case.get("trial"):
            return trainer.train(resume_from_checkpoint=checkpoint)
        prepare_search(trainer)
        trial = types.SimpleNamespace(number=self._num_trials, params={"learning_rate": 0.01})
        self._num_trials += 1
        return trainer.train(resume_from_checkpoint=checkpoint, trial=trial)

    def _facts(self) -> dict[str, Any]:
        trainer = self._trainer
        facts = {
            f"args.{name}": repr(value).replace(os.getcwd(), "<cwd>")
            for name, value in trainer.args.to_dict().items()
        }
        state = trainer_state(dataclasses.asdict(trainer.state), Path.cwd())
        facts |= {f"state.{name}": value for name, value in state.items()}
        facts |= {f"control.{name}": value for name, value in vars(trainer.control).items()}
        callbacks = trainer.callback_handler.callbacks
        facts["counters"] = [found.count for found in callbacks if hasattr(found, "count")]
        return facts | process_state() | {"weights": self._weights()}

    def _weights(self) -> dict[str, str] | None:
        """Return a hash of each full parameter, or None while there are no values. Collective."""
        model = self._trainer.model
        if model is None or patches.find_loader(model):
            return None
        with contextlib.suppress(Exception):
            return {
                name: hash_tensor(value.full_tensor() if hasattr(value, "full_tensor") else value)
                for name, value in model.named_parameters()
            }
        return None


def wait_for_ranks() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def prepare_search(trainer: Any) -> None:
    """Prepare a trainer as `hyperparameter_search` with Optuna does. Optuna need not be there."""
    optuna = types.ModuleType("optuna")
    optuna.__spec__ = importlib.machinery.ModuleSpec("optuna", None)
    optuna.trial = types.SimpleNamespace(BaseTrial=types.SimpleNamespace)  # type: ignore
    sys.modules.setdefault("optuna", optuna)
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = lambda trial: {"learning_rate": 0.01}
    trainer.hp_name = None
    trainer.compute_objective = default_compute_objective


def process_state() -> dict[str, str]:
    """Return the signal handlers and a hash of all random states."""
    random_states = (
        random.getstate(),
        numpy.random.get_state()[1].tolist(),  # type: ignore[index]
        torch.get_rng_state().tolist(),
    )
    return {
        "process.SIGTERM": repr(signal.getsignal(signal.SIGTERM)).split(" at ")[0],
        "process.SIGUSR1": repr(signal.getsignal(signal.SIGUSR1)).split(" at ")[0],
        "process.random": hashlib.sha1(repr(random_states).encode()).hexdigest()[:12],
    }
