"""A resumed run of streamed rows trains on those of an uninterrupted run."""

import json
import shutil

import pytest

from tests.conftest import SENTENCES
from tests.ranks.harness import run_ranks, template_environment
from tests.recipes.launching import CPU, SETTINGS, run_recipe, write_recipe

STREAM = {
    "dataset_streaming": True,
    "per_device_train_batch_size": 2,
    "max_steps": 8,
    "save_steps": 2,
}


def _train(argv):
    """Run a recipe on this rank.

    Return the losses of the steps, and the first tokens of each step's rows on this rank.
    """
    from transformers import Trainer

    rows, trainers, upstream = {}, [], Trainer.training_step

    def training_step(self, model, inputs, *args, **kwargs):
        trainers[:] = [self]
        starts = [tuple(row[:12].tolist()) for row in inputs["input_ids"]]
        rows.setdefault(self.state.global_step + 1, []).extend(starts)
        return upstream(self, model, inputs, *args, **kwargs)

    Trainer.training_step = training_step
    run_recipe(argv)
    return {
        e["step"]: e["loss"]
        for e in trainers[0].state.log_history
        if "loss" in e and e["step"] in rows
    }, rows


@pytest.fixture
def train(tiny_model, tmp_path):
    """Return a function that trains with changed settings.

    It returns the losses and each step's rows over all ranks.
    """

    def run(name, num_ranks=2, resumed_from=None, **changes):
        output, resume = tmp_path / name, []
        if resumed_from is not None:
            shutil.copytree(tmp_path / "whole" / resumed_from, output / resumed_from)
            resume = ["--resume_from_checkpoint", "auto"]
        values = (
            SETTINGS
            | STREAM
            | {"model_name_or_path": tiny_model("llama"), "output_dir": output}
            | changes
        )
        argv = [*write_recipe(tmp_path / f"{name}.yaml", values), *resume]
        found = run_ranks(_train, num_ranks, argv, environment=template_environment(CPU))
        return found[0][0], {
            step: sorted(row for _, rows in found for row in rows[step]) for step in found[0][1]
        }

    return run


def _files(folder, num_files, num_rows):
    folder.mkdir()
    for number in range(num_files):
        rows = SENTENCES[number * num_rows : (number + 1) * num_rows]
        (folder / f"part-{number}.jsonl").write_text(
            "".join(json.dumps({"text": row}) + "\n" for row in rows)
        )
    return folder


CASES = {
    "in the second pass over 20 rows": lambda folder: {
        "dataset_name": _files(folder / "rows", 1, 20)
    },
    "with workers and a file for each": lambda folder: {
        "dataset_name": _files(folder / "rows", 4, 12),
        "dataloader_num_workers": 2,
    },
    "packed": lambda folder: {"dataset_name": _files(folder / "rows", 1, 72), "packing": True},
    "of a mixture": lambda folder: {
        "dataset_streaming": None,
        "streaming": True,
        "datasets": [
            {
                "path": "json",
                "data_files": str(next(_files(folder / name, 1, 8).iterdir())),
                "split": "train",
            }
            for name in ("a", "b")
        ],
    },
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if "pass" in case else pytest.mark.slow) for case in CASES]
)
def test_a_resumed_stream_continues_with_the_very_next_row(case, train, tmp_path):
    changes = CASES[case](tmp_path)
    losses, rows = train("whole", **changes)
    resumed_losses, resumed_rows = train("resumed", resumed_from="checkpoint-6", **changes)
    assert set(losses) == set(range(1, 9)) and set(resumed_losses) == {7, 8}
    assert resumed_rows == {step: rows[step] for step in (7, 8)}
    assert resumed_losses == {step: losses[step] for step in (7, 8)}


@pytest.mark.slow
def test_a_stream_resumes_on_another_number_of_ranks(train, tmp_path):
    data = {"dataset_name": _files(tmp_path / "rows", 1, 40)}
    losses, rows = train("whole", **data)
    resumed_losses, resumed_rows = train(
        "resumed", num_ranks=1, resumed_from="checkpoint-6", **data
    )
    assert resumed_rows == {step: rows[step] for step in (7, 8)}
    assert list(resumed_losses.values()) == pytest.approx([losses[7], losses[8]], abs=1e-4)
