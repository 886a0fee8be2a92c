"""A checkpoint's tensors are verified while they are read, so any change is an error."""

import json
import shutil

import pytest
import torch

from hf_fsdp_recipes.checkpointing import dcp_reader, layout
from hf_fsdp_recipes.checkpointing.dcp_writer import DirectWriter
from hf_fsdp_recipes.checkpointing.direct_io import CHECKSUM_BLOCK_BYTES
from hf_fsdp_recipes.checkpointing.layout import MODEL_DIRECTORY
from hf_fsdp_recipes.errors import ExportError

NUM_BLOCKS = 5  # of the big tensor; more blocks than the reader keeps in memory


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    return {
        "small": torch.randn(3, 7),
        "big": torch.randn(NUM_BLOCKS * 1024, CHECKSUM_BLOCK_BYTES // 4096),
        "last": torch.randn(11),
    }


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    import torch.distributed.checkpoint as dcp

    incomplete = layout.start(tmp_path_factory.mktemp("run"), 4)
    directory = incomplete / MODEL_DIRECTORY
    writer = DirectWriter(directory)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    (incomplete / "config.json").write_text("{}")
    files = {f"{MODEL_DIRECTORY}/{name}": entry for name, entry in writer.manifest_entries.items()}
    files |= layout.manifest_entries(incomplete, ["config.json", f"{MODEL_DIRECTORY}/.metadata"])
    final = incomplete.parent / "checkpoint-4"
    layout.commit(incomplete, final, files, {"step": 4})
    return final


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / saved.name)


def read_all(checkpoint, step=1_000_000):
    tensors = {}
    for name, tensor in dcp_reader.read_index(dcp_reader.find_directory(checkpoint)).items():
        count = torch.Size(tensor.shape).numel()
        parts = [tensor.read(start, min(step, count - start)) for start in range(0, count, step)]
        tensors[name] = torch.cat(parts).reshape(tensor.shape)
    return tensors


def assert_equal(tensors, state):
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], state[name]) for name in state)


def edit_manifest(checkpoint, edit):
    manifest = json.loads((checkpoint / layout.MANIFEST).read_text())
    edit(manifest)
    (checkpoint / layout.MANIFEST).write_text(json.dumps(manifest))


@pytest.fixture
def distcp(checkpoint):
    (file,) = (checkpoint / MODEL_DIRECTORY).glob("*.distcp")
    return file


def flip(file, at):
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("step", [1_000_000, 3_333_333, 10**9])
def test_intact_checkpoint_is_read_block_by_block(checkpoint, state, step):
    assert_equal(read_all(checkpoint, step), state)


def test_every_block_is_read_once_and_few_are_kept(checkpoint, state, distcp, monkeypatch):
    read_raw, blocks, kept = dcp_reader.StoredFile._read_raw, [], set()

    def count(self, offset, target):
        blocks.append(offset)
        kept.add(len(self._recent))
        read_raw(self, offset, target)

    monkeypatch.setattr(dcp_reader.StoredFile, "_read_raw", count)
    read_all(checkpoint)
    assert sorted(blocks) == list(range(0, distcp.stat().st_size, CHECKSUM_BLOCK_BYTES))
    assert max(kept) <= dcp_reader.NUM_RECENT_BLOCKS


def test_only_archives_of_tensors_that_are_read_are_opened(checkpoint, state, monkeypatch):
    """With 512 ranks, a checkpoint has so many archives that opening all of them takes minutes."""
    find, opened = dcp_reader._data_start, []

    def data_start(file, name, *arguments):
        opened.append(name)
        return find(file, name, *arguments)

    monkeypatch.setattr(dcp_reader, "_data_start", data_start)
    tensor = dcp_reader.read_index(dcp_reader.find_directory(checkpoint))["big"]
    assert not opened
    for start in range(0, 2_000_000, 1_000_000):
        assert torch.equal(tensor.read(start, 1_000_000), state["big"].view(-1)[start : start + 1_000_000])
    assert opened == ["big"]


def test_any_flipped_byte_of_an_archive_is_an_error_that_names_the_file(checkpoint, distcp):
    directory = checkpoint / MODEL_DIRECTORY
    chunks = [chunk for tensor in dcp_reader.read_index(directory).values() for chunk in tensor.chunks]
    places = [place for c in chunks for place in (c.offset + 30, c.start(), c.start() + 7, c.offset + c.length - 1)]
    for at in [*places, *range(0, distcp.stat().st_size, 5_000_011)]:
        flip(distcp, at)
        with pytest.raises(ExportError, match=distcp.name):
            read_all(checkpoint)
        flip(distcp, at)
    read_all(checkpoint)


@pytest.mark.parametrize("name", ["config.json", f"{MODEL_DIRECTORY}/.metadata"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damaged_small_file_is_an_error_that_names_it(checkpoint, name, damage):
    file = checkpoint / name
    if damage == "flip":
        flip(file, 1)
    elif damage == "truncate":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    with pytest.raises(ExportError, match=file.name):
        read_all(checkpoint)


def test_file_that_the_manifest_does_not_list_is_not_read(checkpoint, distcp):
    edit_manifest(checkpoint, lambda manifest: manifest["files"].pop(f"{MODEL_DIRECTORY}/{distcp.name}"))
    with pytest.raises(ExportError, match=f"{distcp.name} is not in"):
        read_all(checkpoint)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_manifest_without_blocks_is_verified_before(checkpoint, state, distcp, is_damaged):
    edit_manifest(checkpoint, lambda manifest: [entry.pop("blocks", None) for entry in manifest["files"].values()])
    if not is_damaged:
        assert_equal(read_all(checkpoint), state)
    else:
        flip(distcp, distcp.stat().st_size // 2)
        with pytest.raises(ExportError, match=distcp.name):
            dcp_reader.read_index(checkpoint / MODEL_DIRECTORY)


def test_checkpoint_without_manifest_is_read_with_a_warning(checkpoint, state, caplog):
    (checkpoint / layout.MANIFEST).unlink()
    assert_equal(read_all(checkpoint), state)
    assert "without integrity checks" in caplog.text


@pytest.mark.parametrize(
    "edit",
    [
        lambda manifest: manifest.pop("files"),
        lambda manifest: manifest.update(files=[]),
        lambda manifest: manifest.update(files={"config.json": 3}),
        lambda manifest: [entry["blocks"].pop() for entry in manifest["files"].values() if "blocks" in entry],
        lambda manifest: [entry.update(blocks=3) for entry in manifest["files"].values() if "blocks" in entry],
    ],
)
def test_damaged_manifest_is_one_error(checkpoint, edit):
    edit_manifest(checkpoint, edit)
    with pytest.raises(ExportError, match=layout.MANIFEST):
        read_all(checkpoint)
