"""The oracle's comparison sees what differs."""

import torch

from tests.oracle.compare import differing_logs, differing_names, errors_of
from tests.oracle.table import table

LOGS = {"loss": [2.0], "grad_norm": [1.0], "eval_loss": []}


def _values(change):
    return {"before": {"weight": torch.ones(4)}, "after": {"weight": 1 + torch.tensor(change)}}


def test_a_change_that_is_not_finite_is_wrong():
    ranks = _values([0.1, float("nan"), 0.1, 0.1])
    assert list(errors_of(ranks, _values([0.1] * 4), 1).wrong(1e-3)) == ["weight"]


def test_a_change_that_the_reference_has_not_made_is_wrong():
    errors = errors_of(_values([0.1] * 4), _values([0.0] * 4), 1)
    assert list(errors.wrong(1e-3)) == ["weight"]


def test_a_change_of_the_size_of_rounding_is_not_judged():
    errors = errors_of(_values([2e-7] * 4), _values([1e-7] * 4), 1)
    assert errors.silent == ["weight"] and not errors.found


def test_an_error_of_one_percent_is_wrong_and_rounding_is_not():
    reference = _values([0.1] * 4)
    assert errors_of(_values([0.101] * 4), reference, 1).wrong(1e-3)
    assert not errors_of(_values([0.100001] * 4), reference, 1).wrong(1e-3)


def test_a_parameter_that_only_one_run_trains_is_named():
    assert differing_names({"a": 0, "b": 0}, {"a": 0}) == ["only the ranks train 1 parameters: b"]


def test_losses_and_norms_that_differ_are_named():
    assert differing_logs(LOGS, LOGS, 1e-3) == []
    assert len(differing_logs(LOGS | {"loss": [2.1]}, LOGS, 1e-3)) == 1
    assert len(differing_logs(LOGS | {"loss": [float("nan")]}, LOGS, 1e-3)) == 1
    assert len(differing_logs(LOGS | {"grad_norm": []}, LOGS, 1e-3)) == 1


def test_the_table_counts_verdicts_and_reasons():
    results = {
        "llama full": {"verdict": "equal"},
        "git full": {"verdict": "upstream", "why": "ValueError: no images"},
        "blip full": {"verdict": "upstream", "why": "ValueError: no images"},
    }
    lines = table(results).splitlines()
    assert lines[0].split() == ["3", "cases"]
    assert "         2 ValueError: no images" in lines
