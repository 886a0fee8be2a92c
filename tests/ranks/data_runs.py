"""Functions that the data tests run on ranks: parts of a recipe that record what each rank did."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def train(argv: Sequence[str], *, record: str | None = None) -> dict[str, Any]:
    """Run a recipe; return its losses, and with `record` the `input_ids` of every batch of this rank."""
    from hf_fsdp_recipes.patches import cpu_ranks

    cpu_ranks.enable()
    from hf_fsdp_recipes.training.build import build_trainer, find_resume

    from hf_fsdp_recipes.training.arguments import parse_arguments

    arguments = parse_arguments(argv)
    checkpoint = find_resume(arguments)
    trainer = build_trainer(arguments)
    batches: list[Any] = []
    if record:
        upstream = trainer.training_step

        def training_step(model: Any, inputs: Any, *more: Any) -> Any:
            batches.append(inputs["input_ids"].tolist())
            return upstream(model, inputs, *more)

        trainer.training_step = training_step
    trainer.train(resume_from_checkpoint=checkpoint)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in entries],
        "epochs": [entry["epoch"] for entry in entries],
        "evaluations": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "batches": batches,
    }


def train_with_slow_tokenizing(argv: Sequence[str], notes: str, seconds: float) -> dict[str, Any]:
    """Run a recipe in which tokenizing takes `seconds` per row; the file `rank-<n>` in `notes` gets a dot per row."""
    from hf_fsdp_recipes.training.data.row_tokenizer import RowTokenizer

    upstream = RowTokenizer.__call__

    def tokenize_slowly(self: RowTokenizer, row: Any) -> dict[str, Any]:
        time.sleep(seconds)
        with (Path(notes) / f"rank-{os.environ['RANK']}").open("a") as file:
            file.write(".")
        return upstream(self, row)

    RowTokenizer.__call__ = tokenize_slowly  # type: ignore[method-assign]
    return train(argv)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
