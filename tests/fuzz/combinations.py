"""What a combination says, and the sessions and calls that follow from it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Case = dict[str, Any]

# Each world's number of ranks: FSDP2 with sharded state on one and two ranks, and with full state,
# DDP, and no process group at all.
WORLDS = {"fsdp1": 1, "fsdp2": 2, "full2": 2, "ddp2": 2, "one": 1}
FEWER_RANKS = {"fsdp2": "fsdp1", "full2": "fsdp1", "ddp2": "one"}
OUTPUT_DIRS = {
    "plain": "out",
    "dot": "./out",
    "slash": "out/",
    "spaces": "my out dir",
    "up": "nested/../out",
}
ABSOLUTE = "absolute"
DEFAULTS: Case = {
    "world": "fsdp2",
    "rows": 8,
    "batch": 1,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "logging_steps": 1,
    "learning_rate": 0.02,
    "out": "plain",
    "actors": [],
    "faults": [],
    "before": [],
    "after": [],
}
# The options that are not arguments of TrainingArguments.
OPTIONS = {
    "world": f"one of {', '.join(WORLDS)}",
    "rows": "rows of the training set",
    "batch": "rows per rank and micro-batch",
    "tied": "the model's embeddings are tied",
    "lora": "adapters on all linear layers",
    "frozen": "the embeddings do not train",
    "sampling": "the model has a generation config that transformers refuses to save",
    "groups": "two parameter groups with different learning rates",
    "stream": "the training set is an IterableDataset",
    "early_stop": "an EarlyStoppingCallback with this patience",
    "counter": "a callback with a state of its own",
    "faults": "actors of our side only, so that a difference must be found",
    "actors": "[[event, n, action], ...]: what callbacks do at the n-th of their events",
    "oom_at": "with auto_find_batch_size: from this step on, batches of several rows need too much",
    "out": f"how output_dir is written: {', '.join(OUTPUT_DIRS)} or {ABSOLUTE}",
    "trial": "train(trial=...) as a hyperparameter search calls it",
    "export": "the model is exported when training ends",
    "first": "ShardedCheckpointCallback is the first callback, not the last",
    "slow": "our saves take 0.3 s longer to copy and to write, so that races show",
    "before": "calls before train()",
    "after": "calls after train()",
    "go_on": "the calls go on after an exception",
    "second": '{"from": newest, earlier, true or none, "args": changed options, "stock": session}: '
    "a second session in new processes; our side uses stock in session 0 or 1 if it is named",
    "as_is": "the faults of stock that would hide others are not mended",
}


@dataclass(frozen=True)
class Session:
    """What one side does in new processes.

    Args:
        case: the combination, with the changes of this session.
        calls: the calls, in order.
        is_ours: whether this package is used.
    """

    case: Case
    calls: list[str]
    is_ours: bool


def complete(case: Case) -> Case:
    return DEFAULTS | case


def training_arguments(case: Case) -> Case:
    return {name: value for name, value in case.items() if name not in OPTIONS}


def output_dir(case: Case) -> str:
    """Return `output_dir` for a session that runs in the current directory."""
    return str(Path("out").absolute()) if case["out"] == ABSOLUTE else OUTPUT_DIRS[case["out"]]


def sessions(case: Case, is_ours: bool) -> list[Session]:
    """Return the sessions of one side of a complete combination."""
    calls = ["build", *case["before"], "train", *case["after"]]
    second = case.get("second")
    if second is None:
        return [Session(case, calls, is_ours)]
    changed = case | second.get("args", {})
    train = "train" if second["from"] == "none" else f"train_{second['from']}"
    stock = second.get("stock")
    return [
        Session(case, calls, is_ours and stock != 0),
        Session(changed, ["build", train], is_ours and stock != 1),
    ]


def read_cases(text: str) -> list[Case]:
    """Return the combinations of a file with one JSON object a line, and comments."""
    lines = [line.strip() for line in text.splitlines()]
    return [json.loads(line) for line in lines if line and not line.startswith("#")]
