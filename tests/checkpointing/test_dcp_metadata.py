"""A checkpoint's index and plain values are read without running code from them."""

import gc
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from hf_fsdp_recipes.checkpointing.dcp_metadata import TensorFacts, find_mismatch, read_dcp_metadata, stored_tensors
from hf_fsdp_recipes.checkpointing.resume import describe_changes
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.patches import torch as torch_patches
from tests.checkpointing.payload import Payload, put_into_values
from tests.ranks.harness import run_ranks


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


def test_metadata_that_alters_a_class_is_refused(directory):
    """A pickle could set attributes of any class that it is allowed to refer to."""
    reference = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
    attributes = b"N}(X\x01\x00\x00\x00xK\x01X\x08\x00\x00\x00__init__K\x01u\x86b."  # (None, {"x": 1, "__init__": 1})
    (directory / ".metadata").write_bytes(reference + attributes)
    before = dict(vars(Metadata))
    with pytest.raises(CheckpointError, match="it alters the class Metadata"):
        read_dcp_metadata(directory)
    assert dict(vars(Metadata)) == before


@pytest.mark.parametrize("path", ["/etc/hostname", "../elsewhere.distcp"])
def test_metadata_that_refers_to_other_files_is_refused(directory, path):
    with (directory / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    (index, *_) = metadata.storage_data
    metadata.storage_data[index] = replace(metadata.storage_data[index], relative_path=path)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"refers to {path}, which is outside the checkpoint"):
        read_dcp_metadata(directory)


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


@pytest.mark.parametrize("is_collecting", [True, False])
def test_garbage_is_not_collected_while_metadata_is_read(directory, is_collecting, monkeypatch):
    """With a million chunks, garbage collection took most of the time. The setting is restored, even after an error."""
    seen = []

    class Unpickler(torch_patches._MetadataUnpickler):
        def load(self):
            seen.append(gc.isenabled())
            return super().load()

    monkeypatch.setattr(torch_patches, "_MetadataUnpickler", Unpickler)
    try:
        if not is_collecting:
            gc.disable()
        read_dcp_metadata(directory)
        assert gc.isenabled() is is_collecting
        (directory / ".metadata").write_bytes(b"")
        with pytest.raises(CheckpointError):
            read_dcp_metadata(directory)
        assert gc.isenabled() is is_collecting
    finally:
        gc.enable()
    assert seen == [False, False]


def _read_with_torch(directory, mark):
    """Load the checkpoint with torch's own reader; then put payloads into its values and its index. Return the errors."""
    from hf_fsdp_recipes.patches import registry

    registry.apply("checkpointing")
    state = {"model": {"weight": torch.zeros(3, 2), "half": torch.zeros(2, dtype=torch.bfloat16), "note": None}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    assert state["model"]["note"] == ("plain", 1.5) and state["model"]["weight"].sum() == 6
    put_into_values(directory, "model.note", Payload(mark))
    errors = []
    for _ in range(2):
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
        except BaseException as error:  # with ranks, torch raises its CheckpointException, which is not an Exception
            errors.append(str(error))
        (directory / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    return errors


@pytest.mark.ranks
def test_torchs_own_reader_is_safe_once_patched(directory, tmp_path):
    """Runs in a separate process, because the patch stays for the life of a process."""
    [errors] = run_ranks(_read_with_torch, 1, directory, tmp_path / "ran")
    assert len(errors) == 2 and all("Use another checkpoint" in error for error in errors)
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
