"""Breaks models, datasets, checkpoints and output directories, for the table of bad inputs.

Every function breaks one thing. It takes the `Inputs` of a test and returns the changes to the
recipe's settings.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import SENTENCES

Changes = dict[str, Any]
Maker = Callable[["Inputs"], Changes]
Change = Callable[[Path], Any]

TEXT_ROWS = [{"text": sentence} for sentence in SENTENCES[:8]]
CHAT_ROWS = [
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
] * 8


@dataclass(frozen=True)
class Inputs:
    """What a test passes to the functions of this module.

    Attributes:
        folder: an empty folder for broken copies.
        output: the run's output_dir.
        model: makes a tiny model.
        checkpoint: returns the checkpoint of a full or LoRA run.
    """

    folder: Path
    output: Path
    model: Callable[..., Path]
    checkpoint: Callable[[str], Path]


def model(change: Change, **options: Any) -> Maker:
    """Copy a tiny model and change its directory."""

    def make(inputs: Inputs) -> Changes:
        directory = inputs.folder / "model"
        shutil.copytree(inputs.model("llama", **options), directory)
        change(directory)
        return {"model_name_or_path": directory}

    return make


def new_model(**changes: Any) -> Maker:
    """Train a new model with the config of a tiny model."""
    return lambda inputs: {
        "model_name_or_path": None,
        "config_name": inputs.model("llama"),
        "tokenizer_name": inputs.model("llama"),
        **changes,
    }


def config(**changes: Any) -> Change:
    """Change fields of config.json; None removes one."""

    def change(directory: Path) -> None:
        file = directory / "config.json"
        fields = json.loads(file.read_text()) | changes
        kept = {name: value for name, value in fields.items() if value is not None}
        file.write_text(json.dumps(kept))

    return change


def write(name: str, content: str) -> Change:
    return lambda directory: (directory / name).write_text(content)


def remove(pattern: str) -> Change:
    return lambda directory: [file.unlink() for file in directory.glob(pattern)]


def truncate(name: str, num_bytes: int) -> Change:
    """Shorten a file; a negative number counts from its end."""

    def change(directory: Path) -> None:
        file = next(directory.glob(name))
        os.truncate(file, num_bytes if num_bytes >= 0 else file.stat().st_size + num_bytes)

    return change


def protect(name: str = ".") -> Change:
    return lambda directory: (directory / name).chmod(0)


def weights(change_tensors: Callable[[dict[str, Any]], Any]) -> Change:
    """Change the tensors of model.safetensors."""

    def change(directory: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(directory / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return change


def rename_all(tensors: dict[str, Any]) -> None:
    for name in list(tensors):
        tensors[f"x.{name}"] = tensors.pop(name)


def rows(content: list[Any] | str | bytes, name: str = "rows.jsonl", **changes: Any) -> Maker:
    """Write a dataset: rows as JSON lines, or a file's exact content."""

    def make(inputs: Inputs) -> Changes:
        if isinstance(content, bytes):
            data = content
        elif isinstance(content, str):
            data = content.encode()
        else:
            data = "".join(json.dumps(row) + "\n" for row in content).encode()
        (inputs.folder / name).write_bytes(data)
        return {"dataset_name": inputs.folder / name} | changes

    return make


def chat_rows(change: Change, **changes: Any) -> Maker:
    """Write conversations, and change the directory of the model."""
    return lambda inputs: rows(CHAT_ROWS)(inputs) | model(change)(inputs) | changes


def output(change: Change, name: str = "") -> Maker:
    """Change the path of the output directory, which does not exist yet, or of one in it."""

    def make(inputs: Inputs) -> Changes:
        inputs.output.parent.mkdir(exist_ok=True)
        change(inputs.output)
        return {"output_dir": inputs.output / name}

    return make


def used_output(inputs: Inputs) -> Changes:
    """Let a new run, which does not resume, use the directory of an earlier run."""
    shutil.copytree(inputs.checkpoint("full").parent, inputs.output)
    return {}


def resume(change: Change = lambda _: None, kind: str = "full", **changes: Any) -> Maker:
    """Copy a checkpoint, change it and resume from it."""

    def make(inputs: Inputs) -> Changes:
        directory = inputs.folder / "checkpoint-2"
        shutil.copytree(inputs.checkpoint(kind), directory)
        change(directory)
        return {"resume_from_checkpoint": directory} | changes

    return make


def resume_with_model(kind: str = "llama", **config_changes: Any) -> Maker:
    """Resume a checkpoint into a valid model of another architecture or size."""

    def make(inputs: Inputs) -> Changes:
        from transformers import AutoModelForCausalLM

        from tests.conftest import make_tokenizer, tiny_config

        fields = tiny_config(kind)
        for name, value in config_changes.items():
            setattr(fields, name, value)
        directory = inputs.folder / "model"
        AutoModelForCausalLM.from_config(fields).save_pretrained(directory)
        make_tokenizer(directory)
        return resume()(inputs) | {"model_name_or_path": directory}

    return make


def flip_byte(directory: Path) -> None:
    """Flip a byte in the middle of a file of the weights."""
    file = min(directory.glob("pytorch_model_fsdp_0/*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()
