"""A checkpoint's index and plain values are read without running code from them."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hf_fsdp_recipes.checkpointing.dcp_metadata import TensorFacts, find_mismatch, read_dcp_metadata, stored_tensors
from hf_fsdp_recipes.checkpointing.resume import describe_changes
from hf_fsdp_recipes.errors import CheckpointError
from tests.checkpointing.payload import Payload


@pytest.fixture
def directory(tmp_path):
    state = {"model": {"weight": torch.ones(3, 2), "half": torch.ones(2, dtype=torch.bfloat16), "note": ("plain", 1.5)}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    return tmp_path / "dcp"


def test_metadata_is_what_torch_reads(directory):
    with (directory / ".metadata").open("rb") as stream:
        expected = pickle.load(stream)
    metadata = read_dcp_metadata(directory)
    assert metadata == expected
    assert stored_tensors(metadata, "model") == {
        "weight": TensorFacts((3, 2), torch.float32),
        "half": TensorFacts((2,), torch.bfloat16),
    }


def test_metadata_that_would_run_code_is_refused(directory, tmp_path):
    (directory / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(
        CheckpointError, match=r"\.metadata cannot be read: it refers to .*\. Use another checkpoint\.$"
    ):
        read_dcp_metadata(directory)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["float32.__class__", "load", "_C", "Tensor.__reduce_ex__"])
def test_only_dtypes_and_sizes_of_torch_are_allowed(directory, name):
    (directory / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name.encode() + b"\x93.")
    with pytest.raises(CheckpointError, match=f"it refers to torch.{name}"):
        read_dcp_metadata(directory)


def test_damaged_metadata_is_one_error_class(directory):
    content = (directory / ".metadata").read_bytes()
    for damaged in (b"", b"\x80", b"{}", content[: len(content) // 2], content[:-1], pickle.dumps({"model": 1})):
        (directory / ".metadata").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="Use another checkpoint"):
            read_dcp_metadata(directory)


def test_torchs_own_reader_is_safe_once_patched(directory, tmp_path, monkeypatch):
    """In a process of its own: the patch stays for the life of a process."""
    code = f"""
import pickle, sys, torch, torch.distributed.checkpoint as dcp
from pathlib import Path
from hf_fsdp_recipes.patches import registry
from tests.checkpointing.payload import Payload, put_into_values
registry.apply("checkpointing")
directory = Path({str(directory)!r})
state = {{"model": {{"weight": torch.zeros(3, 2), "half": torch.zeros(2, dtype=torch.bfloat16), "note": None}}}}
dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
assert state["model"]["note"] == ("plain", 1.5) and state["model"]["weight"].sum() == 6
put_into_values(directory, "model.note", Payload(Path({str(tmp_path)!r}) / "ran"))
for _ in range(2):
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    except BaseException as error:  # with ranks, torch raises its CheckpointException, which is not an Exception
        assert "Use another checkpoint" in str(error), error
    else:
        raise SystemExit("not refused")
    (directory / ".metadata").write_bytes(pickle.dumps(Payload(Path({str(tmp_path)!r}) / "ran")))
"""
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert not (tmp_path / "ran").exists()


def facts(**shapes):
    return {name.replace("__", "."): TensorFacts(shape, torch.float32) for name, shape in shapes.items()}


ADAPTER = {"base_model.model.q.lora_A.weight": TensorFacts((4, 8), torch.float32)}


@pytest.mark.parametrize(
    ("stored", "model", "expected"),
    [
        (facts(a=(2, 3)), facts(a=(2, 3)), None),
        (facts(a=(2, 3)), facts(a=(2, 4)), "has a as (2, 3) float32, but in this run it is (2, 4) float32"),
        (facts(a=(2,), layer5=(3,)), facts(a=(2,)), "has 1 tensors that this run's model lacks, such as layer5"),
        (facts(a=(2,)), facts(a=(2,), layer5=(3,)), "lacks 1 tensors of this run's model, such as layer5"),
        (facts(a=(2,)), ADAPTER, "holds all parameters, but this run trains an adapter"),
        (ADAPTER, facts(a=(2,)), "holds an adapter, but this run trains all parameters"),
        (facts(a=(2,)), {"a": TensorFacts((2,), None)}, None),
        (
            facts(a=(2,)),
            {"a": TensorFacts((2,), torch.bfloat16)},
            "has a as (2,) float32, but in this run it is (2,) bfloat16",
        ),
    ],
)
def test_mismatch_names_both_values(stored, model, expected):
    assert find_mismatch(stored, model) == expected


def test_changes_that_matter_are_described():
    before = {"arguments": {"seed": 42, "output_dir": "a", "max_length": 512, "logging_steps": 1, "optim": "sgd"}}
    now = {"arguments": {"seed": 7, "output_dir": "b", "max_length": 256, "logging_steps": 5, "optim": "sgd"}}
    before |= {"recipe": {"dataset_name": "one.jsonl"}, "adapter": {"lora_alpha": 8}}
    now |= {"recipe": {"dataset_name": "two.jsonl", "report": False}, "adapter": {"lora_alpha": 16}}
    assert describe_changes(before, now) == (
        "dataset_name one.jsonl -> two.jsonl, lora_alpha 8 -> 16, max_length 512 -> 256, seed 42 -> 7"
    )
    assert describe_changes(before, before) == ""
