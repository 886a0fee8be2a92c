"""Rows that teach nothing are refused by every rank or said by rank 0, before training."""

import json
import re

import pytest

from tests.ranks import refusals
from tests.ranks.harness import template_environment
from tests.recipes.launching import CPU, SETTINGS, write_recipe

GOOD = {"prompt": "Why? ", "completion": "So."}
LONG = {"prompt": "The big fox runs over the fence. " * 9, "completion": "So."}
MASKED = {"input_ids": [7, 8, 9], "labels": [7, -100, -100]}
CUT = "no token counts for the loss.* max_length: 32 cuts these tokens off"
EMPTY = "no token counts for the loss. They are empty, have no label but -100"
STREAM = {"dataset_streaming": True}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 1}


def _run(train, test, changes, tiny_model, folder):
    data = folder / "data"
    data.mkdir()
    for name, rows in (("train", train), ("test", test)):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = SETTINGS | {
        "model_name_or_path": tiny_model("llama"),
        "dataset_name": data,
        "output_dir": folder / "run",
        "max_length": 32,
        "max_steps": 2,
        "export": False,
    }
    argv = write_recipe(folder / "recipe.yaml", values | changes)
    return refusals.run(argv, folder, template_environment(CPU))


@pytest.mark.parametrize(
    ("train", "test", "changes", "says"),
    [
        ([LONG] * 8, [GOOD], {}, f"the training rows teach nothing: {CUT}"),
        pytest.param(
            [LONG] * 8,
            [GOOD],
            {"packing": True},
            f"training rows .*: {CUT}",
            marks=pytest.mark.slow,
        ),
        ([LONG] * 8, [GOOD], STREAM, f"the training rows teach nothing: {CUT}"),
        ([GOOD] * 8, [LONG] * 2, EVALUATION, f"the evaluation rows teach nothing: {CUT}"),
        pytest.param([MASKED] * 8, [MASKED], {}, EMPTY, marks=pytest.mark.slow),
        pytest.param([{"text": ""}] * 8, [{"text": ""}], {}, EMPTY, marks=pytest.mark.slow),
        pytest.param([MASKED] * 8, [MASKED], STREAM, EMPTY, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_would_learn_nothing_is_refused(
    train, test, changes, says, tiny_model, tmp_path
):
    found = _run(train, test, changes, tiny_model, tmp_path)
    faults = refusals.find_faults(found, says)
    assert not faults, "\n".join([*faults, *(one.output[-2500:] for one in found)])


@pytest.mark.parametrize(
    ("train", "changes", "says"),
    [
        ([GOOD] * 6 + [LONG] * 2, {}, f"note: 2 of 8 training rows teach nothing: {CUT}"),
        ([GOOD] * 6 + [LONG] * 2, {"packing": True}, f"note: 2 of 8 training rows .*: {CUT}"),
        ([{"text": "a b"}] * 6 + [{"text": ""}], {}, f"note: 1 of 7 training rows .*: {EMPTY}"),
        ([GOOD] * 8, {}, ""),
        ([GOOD] * 6 + [LONG] * 2, {"packing": True, "packing_strategy": "wrapped"}, ""),
    ],
)
def test_rows_that_teach_nothing_are_said_once_before_training(
    train, changes, says, tiny_model, tmp_path
):
    main, other = _run(train, train[:2], changes, tiny_model, tmp_path)
    assert (main.status, other.status) == (0, 0), main.output[-2500:]
    notes = re.findall("note: .* teach nothing.*", main.output)
    assert len(notes) == bool(says) and re.match(says, "".join(notes))
    assert "teach nothing" not in other.output
    assert main.output.find("teach nothing") < main.output.find("'loss'")
