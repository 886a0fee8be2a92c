"""Draws random combinations."""

import random
from typing import Any

from tests.fuzz.combinations import ABSOLUTE, OUTPUT_DIRS, Case

WORLD_WEIGHTS = {"fsdp2": 35, "fsdp1": 30, "full2": 5, "ddp2": 15, "one": 15}
# Where a second session may run instead.
OTHER_WORLDS = {
    "fsdp1": "fsdp2",
    "fsdp2": "fsdp1",
    "full2": "full2",
    "ddp2": "one",
    "one": "ddp2",
}
# The chance that an option is set, and its values. A value that stands twice is twice as likely.
CHANCES: dict[str, tuple[float, list[Any]]] = {
    "rows": (0.4, [5, 6, 7, 9, 11]),
    "batch": (0.3, [2]),
    "gradient_accumulation_steps": (0.2, [2, 3]),
    "save_strategy": (0.65, ["steps", "epoch", "epoch", "best", "best", "no"]),
    "save_steps": (0.5, [1, 1, 3, 0.3, 0.5]),
    "save_total_limit": (0.55, [1, 1, 2, 2, 3, -1, 0]),
    "eval_strategy": (0.55, ["steps", "epoch"]),
    "eval_on_start": (0.1, [True]),
    "metric_for_best_model": (0.45, ["loss", "eval_loss", "odd", "odd", "odd"]),
    "load_best_model_at_end": (0.35, [True]),
    "save_only_model": (0.04, [True]),
    "logging_strategy": (0.25, ["epoch", "no", "steps"]),
    "logging_steps": (0.25, [2, 3, 0.5]),
    "logging_first_step": (0.1, [True]),
    "dataloader_drop_last": (0.15, [True]),
    "ignore_data_skip": (0.12, [True]),
    "restore_callback_states_from_checkpoint": (0.12, [True]),
    "lr_scheduler_type": (
        0.35,
        ["cosine", "constant", "reduce_lr_on_plateau", "constant_with_warmup"],
    ),
    "optim": (0.3, ["sgd", "sgd", "adamw_torch", "schedule_free_adamw", "adafactor"]),
    "weight_decay": (0.15, [0.1]),
    "max_grad_norm": (0.1, [0]),
    "include_num_input_tokens_seen": (0.1, ["all"]),
    "activation_checkpointing": (0.06, [True]),
    "tied": (0.2, [True]),
    "lora": (0.25, [True]),
    "frozen": (0.1, [True]),
    "sampling": (0.04, [True]),
    "groups": (0.1, [True]),
    "stream": (0.1, [True]),
    "early_stop": (0.12, [1]),
    "counter": (0.15, [True]),
    "out": (0.3, [*OUTPUT_DIRS, ABSOLUTE]),
    "trial": (0.1, [True]),
    "export": (0.2, [True]),
    "first": (0.2, [True]),
    "slow": (0.4, [True]),
    "go_on": (0.4, [True]),
}
EVENTS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_save",
    "on_epoch_end",
    "on_train_end",
    "on_prediction_step",
    "on_predict",
)
FREQUENT_EVENTS = (
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_step_end",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_save",
    "on_epoch_end",
    "on_epoch_begin",
)
ACTIONS_IN_ON_SAVE = ("write", "describe")
ACTIONS = (
    "save",
    "save",
    "evaluate",
    "stop",
    "epoch_stop",
    "log",
    "raise",
    "interrupt",
    "weights",
    "weights",
    "nan",
    "lr",
    "unsave",
    "untrain",
    "limit",
    *ACTIONS_IN_ON_SAVE,
)
CALLS_AFTER = (
    "evaluate",
    "predict",
    "save_model",
    "save_state",
    "train",
    "train_true",
    "train_newest",
    "other",
    "other_shared",
)
NOT_IN_ROTATIONS = (
    "num_train_epochs",
    "stream",
    "optim",
    "save_only_model",
    "before",
    "trial",
    "early_stop",
)


def draw(seed: int) -> Case:
    """Return the combination of a seed. About 9 in 10 pass the checks of TrainingArguments."""
    rng = random.Random(seed)
    case: Case = {"world": rng.choices([*WORLD_WEIGHTS], [*WORLD_WEIGHTS.values()])[0]}
    for name, (chance, values) in CHANCES.items():
        if rng.random() < chance:
            case[name] = rng.choice(values)
    draw_length(case, rng)
    if case.get("eval_strategy") == "steps":
        case["eval_steps"] = rng.choice([1, 1, 2, 3])
    if "metric_for_best_model" in case and rng.random() < 0.4:
        case["greater_is_better"] = rng.choice([True, False])
    if rng.random() < 0.08:
        case |= {"auto_find_batch_size": True, "batch": 2, "oom_at": rng.choice([0, 1, 2, 3])}
    draw_calls(case, rng)
    if rng.random() < 0.5:
        case["second"] = draw_second(case, rng)
    if rng.random() < 0.25:
        draw_rotation(case, rng)
    if rng.random() < 0.9:
        make_valid(case, rng)
    return case


def draw_length(case: Case, rng: random.Random) -> None:
    if rng.random() < 0.4:
        case["max_steps"] = -1
        case["num_train_epochs"] = rng.choice([1, 2, 1.5, 0.6])
    elif rng.random() < 0.6:
        case["max_steps"] = rng.choice([3, 5, 6, 7])


def draw_calls(case: Case, rng: random.Random) -> None:
    if rng.random() < 0.45:
        case["actors"] = [draw_actor(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
    if rng.random() < 0.05:
        case["before"] = [rng.choice(["evaluate", "predict"])]
    if rng.random() < 0.4:
        case["after"] = [rng.choice(CALLS_AFTER) for _ in range(rng.choice([1, 1, 2]))]


def draw_actor(rng: random.Random) -> list[Any]:
    """Return a random [event, n, action]."""
    action = rng.choice(ACTIONS)
    events = ["on_save"] if action in ACTIONS_IN_ON_SAVE else [*FREQUENT_EVENTS, *EVENTS]
    event = rng.choice(events)
    return [event, rng.choice([1, 1, 2, 3]), action]


def draw_second(case: Case, rng: random.Random) -> Case:
    """Return a random second session."""
    changed: Case = {}
    if rng.random() < 0.35:
        if case.get("max_steps", 4) > 0:
            changed["max_steps"] = rng.choice([2, 3, 6, 8])
        else:
            changed["num_train_epochs"] = rng.choice([1, 3])
    if rng.random() < 0.15:
        changed["save_total_limit"] = rng.choice([1, 2])
    if rng.random() < 0.3:
        changed["actors"] = []
    if rng.random() < 0.15:
        changed["world"] = OTHER_WORLDS[case["world"]]
    start = rng.choice(["newest", "newest", "newest", "earlier", "true", "none"])
    if rng.random() < 0.2:
        return {
            "from": rng.choice(["true", "earlier"]),
            "args": changed,
            "stock": rng.choice([0, 1]),
        }
    return {"from": start, "args": changed}


def draw_rotation(case: Case, rng: random.Random) -> None:
    """Change a combination so that many checkpoints are saved, deleted and chosen as the best."""
    for name in NOT_IN_ROTATIONS:
        case.pop(name, None)
    case["max_steps"] = rng.choice([5, 6, 7, 8])
    case["save_total_limit"] = rng.choice([1, 2, 2, 3])
    case["eval_strategy"] = "steps"
    case["eval_steps"] = 1
    case["metric_for_best_model"] = "odd"
    case["save_strategy"] = rng.choice(["steps", "steps", "best", "epoch"])
    case["save_steps"] = rng.choice([1, 1, 2])
    case["load_best_model_at_end"] = case["save_strategy"] != "epoch" and rng.random() < 0.5
    if rng.random() < 0.6:
        start = rng.choice(["newest", "newest", "true", "earlier"])
        changed = {"max_steps": rng.choice([9, 10]), "actors": []}
        case["second"] = {"from": start, "args": changed}


def make_valid(case: Case, rng: random.Random) -> None:
    """Change options that TrainingArguments or Trainer would refuse."""
    follows_metric = case.get("lr_scheduler_type") == "reduce_lr_on_plateau"
    if follows_metric or case.get("save_strategy") == "best" or case.get("early_stop"):
        case.setdefault("eval_strategy", "steps")
        case.setdefault("metric_for_best_model", "odd")
    if case.get("load_best_model_at_end"):
        make_best_model_valid(case, rng)
    if case.get("metric_for_best_model") == "odd":
        case.setdefault("eval_strategy", "steps")
    if case.get("eval_strategy") == "steps":
        case.setdefault("eval_steps", 1)
    if case.get("stream") and case.get("max_steps", 4) < 0:
        case["max_steps"] = 5
        case.pop("num_train_epochs", None)
    if case["world"].startswith("f") and rng.random() < 0.7:
        case.pop("save_only_model", None)
    if case.get("lora"):
        case.pop("groups", None)


def make_best_model_valid(case: Case, rng: random.Random) -> None:
    """Let the combination save and evaluate at the same steps."""
    case.setdefault("eval_strategy", "steps")
    if case.get("save_strategy") in ("no", "best"):
        case["save_strategy"] = "best"
        case.setdefault("metric_for_best_model", "odd")
    else:
        case["save_strategy"] = case["eval_strategy"]
    if case["save_strategy"] == "steps":
        case["eval_steps"] = rng.choice([1, 2])
        case["save_steps"] = case["eval_steps"] * rng.choice([1, 1, 2])
