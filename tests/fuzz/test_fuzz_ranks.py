"""A Trainer with our callback does what a stock Trainer does, but for what is announced."""

import json
import logging
from pathlib import Path

import pytest

from tests.fuzz.announced import (
    ANNOUNCED,
    is_config_refused,
    is_export_refused,
    is_finished,
    is_given_up,
    is_not_finite,
    is_refused,
    keeps_latest,
    makes_up,
    sets_aside,
)
from tests.fuzz.combinations import OPTIONS, read_cases
from tests.fuzz.drawing import draw
from tests.fuzz.driver import Fuzzer
from tests.fuzz.shrinking import Shrinker, kinds_of, surprises

LIST = Path(__file__).with_name("cases.txt")
SEEDS = range(2026, 2030)
# The loss falls, so the first checkpoint is the best one on every machine.
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
}
EPOCH = {"eval_strategy": "epoch", "max_steps": -1, "num_train_epochs": 1}
# A combination for each announced difference.
EXAMPLES = {
    is_refused: {"world": "fsdp2", "second": {"from": "none"}},
    is_finished: {"world": "ddp2", "rows": 10, "second": {"from": "newest"}},
    keeps_latest: {"world": "fsdp1", "save_steps": 1, "save_total_limit": 1, **BEST},
    sets_aside: {"world": "one", "second": {"from": "earlier", "args": {"save_steps": 3}}},
    is_export_refused: {"world": "one", "export": True, "after": ["other"]},
    is_not_finite: {"world": "fsdp1", "actors": [["on_step_end", 2, "nan"]], "lora": True},
    is_config_refused: {"world": "one", "sampling": True},
    is_given_up: {"world": "one", "actors": [["on_save", 1, "interrupt"]]},
    makes_up: {"world": "ddp2", **EPOCH, "after": ["train_true"]},
}
# Changes of our side only, and the kind of a difference that they make.
FAULTS = {
    ("on_save", 1, "weights"): "weights",
    ("on_step_end", 3, "lr"): "contents of pytorch_model_fsdp_N/.metadata",
    ("on_save", 2, "write"): "extra file extra.txt",
    ("on_step_end", 2, "unsave"): "missing out/checkpoint-N",
    ("on_step_begin", 2, "limit"): "args.save_total_limit",
    ("on_epoch_begin", 1, "raise"): "outcome of train",
}


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    logging.disable(logging.DEBUG)  # torch DCP would fill the output of failing tests
    yield Fuzzer(tmp_path_factory.mktemp("fuzz"))
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("case", read_cases(LIST.read_text()), ids=json.dumps)
def test_what_once_differed_from_a_stock_trainer_is_equal(case, fuzzer):
    assert surprises(fuzzer.run(case)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_random_runs_differ_from_a_stock_trainer_only_where_announced(seed, fuzzer):
    case = draw(seed)
    assert surprises(fuzzer.run(case)) == [], json.dumps(case)


@pytest.mark.parametrize("applies", EXAMPLES, ids=lambda function: function.__name__)
def test_an_announced_difference_is_there(applies, fuzzer):
    differences = fuzzer.run(EXAMPLES[applies])
    assert surprises(differences) == []
    assert ANNOUNCED[applies] in {found.announced for found in differences}


def test_each_announced_difference_has_an_example():
    assert list(EXAMPLES) == list(ANNOUNCED)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[2])
def test_a_fault_of_ours_is_seen(fault, fuzzer):
    differences = fuzzer.run({"world": "fsdp1", "faults": [fault]})
    assert FAULTS[fault] in kinds_of(surprises(differences))


def test_a_fault_is_shrunk_to_what_shows_it(fuzzer):
    fault = {"faults": [["on_save", 1, "write"]]}
    case = {"world": "fsdp2", "rows": 9, "tied": True, "after": ["evaluate"], **fault}
    shrinker = Shrinker(fuzzer, "extra file extra.txt", seconds=60)
    shrinker.shrink(case)
    assert shrinker.case == {"world": "fsdp1", **fault}


def test_every_option_is_drawn():
    drawn = {name for seed in range(500) for name in draw(seed)}
    assert OPTIONS.keys() - drawn == {"faults", "as_is"}
