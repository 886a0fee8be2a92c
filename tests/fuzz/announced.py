"""The differences between this package and a stock Trainer that the documentation announces."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.combinations import Case
from tests.fuzz.compare import Difference, compare_steps, difference
from tests.fuzz.files import Files
from tests.fuzz.session import Step
from tests.fuzz.trainers import EXPORT_DIR
from tests.fuzz.values import NOT_FINITE

CHECKPOINT_PATH = re.compile(r'"?[\w/.-]*checkpoint-\d+"?')
EARLIER_RUN = re.compile(r"holds (checkpoint-\d+) of an earlier run")
MODEL_FILES = (
    "pytorch_model_fsdp_0/.metadata",
    "model.safetensors",
    "adapter_model.safetensors",
)


@dataclass(frozen=True)
class Context:
    """A call on both sides.

    Args:
        case: the complete combination.
        stock: what stock did.
        ours: what this package did.
        before: our side's files before the call.
    """

    case: Case
    stock: Step
    ours: Step
    before: Files

    @property
    def actors(self) -> list[list[Any]]:
        second = self.case.get("second", {}).get("args", {})
        return [*self.case["actors"], *second.get("actors", [])]

    @property
    def actions(self) -> set[str]:
        return {actor[2] for actor in self.actors}


def is_refused(context: Context, _: Difference) -> bool:
    """Whether a run began at step 0 in a directory that holds checkpoints."""
    if context.ours.outcome != "CheckpointError":
        return False
    found = EARLIER_RUN.search(context.ours.value)
    return found is not None and any(name.endswith(found[1]) for name in context.before)


def is_finished(context: Context, found: Difference) -> bool:
    """Whether a run that had all of its steps was started again.

    In the middle of an epoch, stock trains one more step. Otherwise only the flag differs that ends
    our run, and stock may delete checkpoints because of a lower limit, or export again.
    """
    begins = [facts for event, facts in context.ours.events if event == "on_train_begin"]
    has_all_steps = bool(begins) and begins[-1]["step"] >= begins[-1]["max_steps"]
    is_of_flag = found.kind.endswith((" sees: next", ".should_training_stop"))
    is_of_files = found.kind.startswith(("extra ", "contents of "))
    is_kept = is_of_files and context.ours.files == context.before
    is_expected = trains(context.stock) or is_of_flag or is_kept
    return has_all_steps and is_expected and not trains(context.ours)


def keeps_latest(context: Context, found: Difference) -> bool:
    """Whether an extra checkpoint is the latest, and stock keeps only the best one."""
    facts = context.ours.facts
    if not found.kind.startswith("extra ") or facts.get("args.save_total_limit") != "1":
        return False
    directory = found.ours.rpartition("/")[0]
    steps = [
        int(name.rpartition("-")[2])
        for name in context.ours.files
        if name.startswith(f"{directory}/checkpoint-")
    ]
    is_latest = bool(steps) and found.ours == f"{directory}/checkpoint-{max(steps)}"
    is_set_late = "limit" in context.actions  # to 1, after the last save
    return (is_latest or is_set_late) and facts["state.best_model_checkpoint"] is not None


def sets_aside(context: Context, found: Difference) -> bool:
    """Whether later checkpoints were renamed, which stock writes over, or leaves and counts.

    If stock leaves one, it may later take it for the best one of that step.
    """
    is_of_files = found.kind.startswith(("missing ", "extra ")) or "can be read" in found.kind
    is_of_best = "best" in found.kind and without_paths(found.stock) == without_paths(found.ours)
    return (is_of_files or is_of_best) and has_set_aside(context)


def without_paths(text: str) -> str:
    return CHECKPOINT_PATH.sub("null", text).replace("None", "null")


def is_export_refused(context: Context, _: Difference) -> bool:
    """Whether a run would write over the export of another run."""
    is_error = context.ours.outcome == "ExportError"
    is_there = any(Path(name).name == EXPORT_DIR for name in context.before)
    return is_error and is_there and "no export of this run" in context.ours.value


def is_not_finite(context: Context, found: Difference) -> bool:
    """Whether weights are not finite, with which stock trains on.

    A callback's error may end the run before ours does.
    """
    is_error = context.ours.outcome in ("CheckpointError", "ExportError")
    is_ours = is_error and "NaN" in context.ours.value
    is_raised = not context.actions.isdisjoint({"raise", "interrupt"})
    is_of_save = found.kind.startswith(("missing ", "what ", "state.best"))
    return "nan" in context.actions and (is_ours or (is_raised and is_of_save))


def is_config_refused(context: Context, _: Difference) -> bool:
    """Whether transformers refuses to save the generation config, which ends a stock run.

    Only rank 0 saves with DDP, and the other ranks wait for it for ever.
    """
    value = str(context.stock.value).lower()
    is_error = "generation" in value or "hung" in value
    return bool(context.case.get("sampling")) and is_error


def is_given_up(context: Context, found: Difference) -> bool:
    """Whether a callback's `on_save` has raised an error before its checkpoint was completed."""
    is_raised = any(
        event == "on_save" and action in ("raise", "interrupt")
        for event, _, action in context.actors
    )
    return is_raised and found.kind.startswith("missing ")


def makes_up(context: Context, _: Difference) -> bool:
    """Whether a resumed run begins with the evaluation that was due after its checkpoint."""
    return evaluates_first(context.ours) and not evaluates_first(context.stock)


def evaluates_first(step: Step) -> bool:
    """Whether a run evaluates before its first epoch."""
    names = [event for event, _ in step.events]
    begin = names.index("on_train_begin") if "on_train_begin" in names else len(names)
    end = names.index("on_epoch_begin", begin) if "on_epoch_begin" in names[begin:] else len(names)
    return "on_evaluate" in names[begin:end]


# Each difference, with the sentence in docs/own_script.md that announces it.
ANNOUNCED: dict[Callable[[Context, Difference], bool], str] = {
    is_refused: "A run that starts at step 0 refuses an output_dir that holds checkpoints.",
    is_finished: "A finished run that is started again adds no step, no checkpoint and no export, "
    "and deletes none.",
    keeps_latest: "With save_total_limit=1 and a best model, the latest checkpoint is kept too.",
    sets_aside: "A run that resumes from an earlier checkpoint renames the later ones.",
    is_export_refused: "A run does not begin if export_dir holds the export of another run.",
    is_not_finite: "A run ends with an error when it would save or export weights that are not "
    "finite.",
    is_config_refused: "A generation config that transformers refuses to save is written as the "
    "model came with it.",
    is_given_up: "A checkpoint is given up if a callback's on_save raises an error.",
    makes_up: "A run that resumes after the last step of an epoch begins with the evaluation "
    "that was due then.",
}
TOUCH_NOTHING = (is_refused, is_export_refused, is_finished)


def judge(case: Case, stock: list[Step], ours: list[Step]) -> list[Difference]:
    """Return the differences of the first call that has any. Later ones only follow from it."""
    before: Files = {}
    for left, right in zip(stock, ours, strict=False):
        if "hung" in str(left.value) and "hung" in str(right.value):
            return []  # epochs without a step, for ever
        context = Context(case, left, right, before)
        differences = list(compare_steps(left, right))
        for found in differences:
            found.announced = announcement(context, found)
        differences += faults(context, differences)
        for found in differences:
            found.call = right.name
        if differences:
            return differences
        before = right.files
    return []


def announcement(context: Context, found: Difference) -> str | None:
    sentences = (text for applies, text in ANNOUNCED.items() if applies(context, found))
    return next(sentences, None)


def faults(context: Context, differences: list[Difference]) -> Iterator[Difference]:
    """Yield what must not be, whatever stock does."""
    sentences = {found.announced for found in differences}
    must_stay = any(ANNOUNCED[applies] in sentences for applies in TOUCH_NOTHING)
    is_changed = context.ours.files != context.before and not has_set_aside(context)
    if must_stay and is_changed:
        names = [sorted(context.before), sorted(context.ours.files)]
        yield difference("files changed by a run that must change none", *names)
    uses_stock = "stock" in context.case.get("second", {})
    for directory in sorted(context.ours.files.keys() - context.before.keys()):
        files = context.ours.files[directory]
        if not is_checkpoint(directory, files) or uses_stock:
            continue
        if "manifest.json" not in files:
            yield difference("checkpoint without a manifest", "", directory)
        if any(NOT_FINITE in str(files.get(name)) for name in MODEL_FILES):
            yield difference("checkpoint with weights that are not finite", "", directory)


def has_set_aside(context: Context) -> bool:
    """Whether the call has renamed checkpoints or an export."""
    new = context.ours.files.keys() - context.before.keys()
    return any("_set-aside" in name for name in new)


def is_checkpoint(directory: str, files: dict[str, Any]) -> bool:
    """Whether a directory is a checkpoint, and not one that only a callback wrote to."""
    return Path(directory).name.startswith("checkpoint-") and "trainer_state.json" in files


def trains(step: Step) -> bool:
    return any(event == "on_step_begin" for event, _ in step.events)
