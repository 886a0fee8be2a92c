"""Breaks models, datasets, checkpoints and output directories in one way each, for the table of bad inputs.

Every function takes the `Inputs` of a test and returns the changes to the recipe's settings.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import SENTENCES

Changes = dict[str, Any]
Maker = Callable[["Inputs"], Changes]


@dataclass(frozen=True)
class Inputs:
    """The arguments that a test passes to the functions of this module.

    Attributes:
        folder: an empty folder for broken copies.
        output: the run's output_dir, which has a few files of a user.
        model: makes a valid tiny model of the given kind.
        checkpoint: returns the last checkpoint of a run of the given kind, which is trained once.
        mount: mounts a file system of the given size in bytes in a directory.
    """

    folder: Path
    output: Path
    model: Callable[..., Path]
    checkpoint: Callable[[str], Path]
    mount: Callable[[Path, int], None]


# Models.


def model(change: Callable[[Path], None], kind: str = "llama", **options: Any) -> Maker:
    """Copy a tiny model and change its directory."""

    def make(inputs: Inputs) -> Changes:
        directory = inputs.folder / "model"
        shutil.copytree(inputs.model(kind, **options), directory)
        change(directory)
        return {"model_name_or_path": directory}

    return make


def sharded_model(change: Callable[[Path], None]) -> Maker:
    """Like `model`, but with an index and several weight files."""
    return model(change, max_shard_size="60KB")


def new_model(**changes: Any) -> Maker:
    """Train a new model with the config of a tiny model."""

    def make(inputs: Inputs) -> Changes:
        directory = inputs.model("llama")
        return {"model_name_or_path": None, "config_name": directory, "tokenizer_name": directory} | changes

    return make


def config(**changes: Any) -> Callable[[Path], None]:
    """Change fields of config.json; None removes one."""

    def change(directory: Path) -> None:
        file = directory / "config.json"
        fields = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))

    return change


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Replace a file."""

    def change(directory: Path) -> None:
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def remove(*names: str) -> Callable[[Path], None]:
    """Remove the files that match the patterns."""

    def change(directory: Path) -> None:
        for name in names:
            for file in directory.glob(name):
                file.unlink()

    return change


def truncate(name: str, num_bytes: int) -> Callable[[Path], None]:
    """Shorten a file; a negative number counts from its end."""

    def change(directory: Path) -> None:
        file = next(directory.glob(name))
        size = file.stat().st_size
        os.truncate(file, size + num_bytes if num_bytes < 0 else num_bytes)

    return change


def protect(name: str = ".") -> Callable[[Path], None]:
    """Take away all permissions."""

    def change(directory: Path) -> None:
        (directory / name).chmod(0)

    return change


def header(change_header: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change the header of model.safetensors, but not the bytes of its tensors."""

    def change(directory: Path) -> None:
        file = directory / "model.safetensors"
        content = file.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        fields = json.loads(content[8 : 8 + size])
        change_header(fields)
        text = json.dumps(fields).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return change


def weights(change_tensors: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change the tensors of model.safetensors."""

    def change(directory: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(directory / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return change


def index(change_map: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    """Change the weight map of a sharded model."""

    def change(directory: Path) -> None:
        file = directory / "model.safetensors.index.json"
        fields = json.loads(file.read_text())
        change_map(fields["weight_map"])
        file.write_text(json.dumps(fields))

    return change


def fill_with_nan(tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"].fill_(float("nan"))


def overlap(fields: dict[str, Any]) -> None:
    first, second = [name for name in fields if name != "__metadata__"][:2]
    begin = fields[first]["data_offsets"][0]
    size = fields[second]["data_offsets"][1] - fields[second]["data_offsets"][0]
    fields[second]["data_offsets"] = [begin, begin + size]


def model_of_other_config(directory: Path) -> None:
    """Give Llama's weights the config of a GPT-2."""
    from tests.conftest import tiny_config

    tiny_config("gpt2").save_pretrained(directory)


def encoder_decoder_config(directory: Path) -> None:
    from transformers import T5Config

    T5Config(vocab_size=307, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8).save_pretrained(directory)


def custom_code(directory: Path) -> None:
    """Make the config ask for model code from its directory."""
    (directory / "modeling_own.py").write_text("raise SystemExit('ran')\n")
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config(model_type="own", auto_map=names)(directory)


def chat_template(text: str) -> Callable[[Path], None]:
    return write("chat_template.jinja", text)


# Data.

TEXT_ROWS = [{"text": sentence} for sentence in SENTENCES[:8]]
USER, ASSISTANT = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is."}


def rows(rows_or_text: Iterable[Any] | str | bytes, name: str = "rows.jsonl", **changes: Any) -> Maker:
    """Write a dataset: rows as JSON lines, or a file's exact content."""

    def make(inputs: Inputs) -> Changes:
        file = inputs.folder / name
        file.write_bytes(_content(rows_or_text))
        return {"dataset_name": file} | changes

    return make


def folder(files: dict[str, Any], **changes: Any) -> Maker:
    """Write a folder of dataset files."""

    def make(inputs: Inputs) -> Changes:
        directory = inputs.folder / "rows"
        directory.mkdir()
        for name, content in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(_content(content))
        return {"dataset_name": directory} | changes

    return make


def _content(rows_or_text: Iterable[Any] | str | bytes) -> bytes:
    if isinstance(rows_or_text, bytes):
        return rows_or_text
    if isinstance(rows_or_text, str):
        return rows_or_text.encode()
    return "".join(json.dumps(row) + "\n" for row in rows_or_text).encode()


def unreadable_rows(inputs: Inputs) -> Changes:
    changes = rows(TEXT_ROWS)(inputs)
    changes["dataset_name"].chmod(0)
    return changes


def chat_rows(change: Callable[[Path], None], **changes: Any) -> Maker:
    """Write chat rows, and change the directory of the model."""

    def make(inputs: Inputs) -> Changes:
        return rows([{"messages": [USER, ASSISTANT]}] * 8)(inputs) | model(change)(inputs) | changes

    return make


# Output directories.


def foreign_export(name: str, files: tuple[str, ...] = ("config.json", "notes.txt"), **changes: Any) -> Maker:
    """At the path of an export, put a directory that another program wrote."""

    def make(inputs: Inputs) -> Changes:
        (inputs.output / name).mkdir()
        for file in files:
            (inputs.output / name / file).write_text("{}")
        return dict(changes)

    return make


def export_is_a_file(inputs: Inputs) -> Changes:
    (inputs.output / "export").write_text("my notes")
    return {}


def output_is_a_file(inputs: Inputs) -> Changes:
    file = inputs.output.parent / "file"
    file.write_text("my notes")
    return {"output_dir": file}


def output_in_a_file(inputs: Inputs) -> Changes:
    return {"output_dir": output_is_a_file(inputs)["output_dir"] / "run"}


def dangling_link(inputs: Inputs) -> Changes:
    link = inputs.output.parent / "link"
    link.symlink_to(inputs.output.parent / "gone" / "run")
    return {"output_dir": link}


def unwritable_output(inputs: Inputs) -> Changes:
    inputs.output.chmod(0o500)
    return {}


def unwritable_parent(inputs: Inputs) -> Changes:
    parent = inputs.output.parent / "parent"
    parent.mkdir(mode=0o500)
    return {"output_dir": parent / "run"}


def full_disk(num_bytes: int, fill: bool = False, **changes: Any) -> Maker:
    """Mount a small file system as output_dir."""

    def make(inputs: Inputs) -> Changes:
        output = inputs.output.parent / "small"
        output.mkdir()
        inputs.mount(output, num_bytes)
        if fill:
            with (output / "fill").open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
        return {"output_dir": output} | changes

    return make


def used_output(inputs: Inputs) -> Changes:
    """Let a new run, which does not resume, use the directory of an earlier run."""
    shutil.copytree(inputs.checkpoint("full").parent, inputs.output, dirs_exist_ok=True)
    return {"report": True}


# Checkpoints.


def resume(
    change: Callable[[Path], None] = lambda _: None, kind: str = "full", name: str | None = None, **changes: Any
) -> Maker:
    """Copy a checkpoint, change it and resume from it."""

    def make(inputs: Inputs) -> Changes:
        checkpoint = inputs.checkpoint(kind)
        directory = inputs.folder / (name or checkpoint.name)
        shutil.copytree(checkpoint, directory)
        change(directory)
        return {"resume_from_checkpoint": directory} | changes

    return make


def resume_with_model(kind: str = "llama", **config_changes: Any) -> Maker:
    """Resume a checkpoint into a valid model of another architecture or size."""

    def make(inputs: Inputs) -> Changes:
        import torch
        from transformers import AutoModelForCausalLM

        from tests.conftest import make_tokenizer, tiny_config

        fields = tiny_config(kind)
        for name, value in config_changes.items():
            setattr(fields, name, value)
        torch.manual_seed(0)
        directory = inputs.folder / "model"
        AutoModelForCausalLM.from_config(fields).save_pretrained(directory)
        make_tokenizer(directory)
        return resume()(inputs) | {"model_name_or_path": directory}

    return make


def flip_byte(pattern: str) -> Callable[[Path], None]:
    """Flip a byte in the middle of the first file that matches."""

    def change(directory: Path) -> None:
        file = min(directory.glob(pattern))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)

    return change


def half_written(directory: Path) -> None:
    """Keep only the files that remain when a run is killed during a stock save."""
    (directory / "manifest.json").unlink()
    for file in directory.glob("*/.metadata"):
        file.unlink()


def empty(directory: Path) -> None:
    """Remove everything in a checkpoint."""
    shutil.rmtree(directory)
    directory.mkdir()


def foreign(directory: Path) -> None:
    """Replace a checkpoint with an export from another tool."""
    empty(directory)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(8))
