"""Headers are checked for everything that could make a later read return wrong bytes."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.safetensors_index import open_index, read_header

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(3.0),
}


def write(path, name="model.safetensors"):
    save_file(TENSORS, path / name)
    return path / name


def rewrite(file, change):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_every_run_of_bytes_is_read_as_stored(tmp_path):
    write(tmp_path)
    checkpoint = open_index(tmp_path)
    for name, expected in TENSORS.items():
        stored = checkpoint.tensors[name]
        assert (stored.dtype, stored.shape) == (expected.dtype, tuple(expected.shape))
        buffer = torch.empty(stored.num_bytes, dtype=torch.uint8)
        checkpoint.read_into(buffer, stored, 0)
        assert torch.equal(buffer.view(expected.dtype).reshape(expected.shape), expected)
    part = torch.empty(8, dtype=torch.uint8)
    checkpoint.read_into(part, checkpoint.tensors["a"], 16)
    assert part.view(torch.float32).tolist() == [4.0, 5.0]


def test_file_truncated_while_it_is_read_is_an_error(tmp_path):
    file = write(tmp_path)
    checkpoint = open_index(tmp_path)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 40)
    with pytest.raises(LoadError, match="ended at byte"):
        for stored in checkpoint.tensors.values():
            checkpoint.read_into(torch.empty(stored.num_bytes, dtype=torch.uint8), stored, 0)


@pytest.mark.parametrize("keep", [0, 4, 20, 100, -1])
def test_truncated_file_is_named(tmp_path, keep):
    file = write(tmp_path)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(LoadError, match=r"model\.safetensors is broken"):
        read_header(file)


def lie(key, value):
    def change(header):
        header["a"][key] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lie("shape", [3, 5]),
        lie("shape", [-3, -4]),
        lie("dtype", "F99"),
        lie("data_offsets", [0, 4]),
        lie("data_offsets", [40, 88]),
        lie("data_offsets", "x"),
        lambda header: header.pop("a"),
    ],
)
def test_header_that_does_not_match_its_file_is_named(tmp_path, change):
    file = write(tmp_path)
    rewrite(file, change)
    with pytest.raises(LoadError, match="is broken"):
        read_header(file)


def test_pickle_is_refused_with_advice(tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin.*save_pretrained"):
        open_index(tmp_path)


def test_directory_without_weights_is_an_error(tmp_path):
    with pytest.raises(LoadError, match="neither"):
        open_index(tmp_path)


@pytest.mark.parametrize("target", ["/etc/passwd", "../x.safetensors", "sub/x.safetensors", "", "none.safetensors"])
def test_index_that_points_outside_the_directory_is_refused(tmp_path, target):
    write(tmp_path, "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": target}}))
    with pytest.raises(LoadError, match=r"index\.json is broken"):
        open_index(tmp_path)


def test_single_file_is_read_rather_than_the_index_as_in_from_pretrained(tmp_path):
    write(tmp_path, "part.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    assert open_index(tmp_path).tensors["a"].file.name == "model.safetensors"


def test_index_that_lists_a_tensor_its_file_lacks_is_refused(tmp_path):
    write(tmp_path, "part.safetensors")
    weight_map = {"a": "part.safetensors", "ghost": "part.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(LoadError, match="ghost"):
        open_index(tmp_path)


def test_prefetcher_requests_a_bounded_number_of_bytes_ahead(tmp_path, monkeypatch):
    from hf_fsdp_recipes.loading import safetensors_index

    save_file(
        {"a": torch.zeros(5000, dtype=torch.uint8), "b": torch.zeros(300, dtype=torch.uint8)},
        tmp_path / "model.safetensors",
    )
    checkpoint = safetensors_index.open_index(tmp_path)
    tensors = checkpoint.tensors
    monkeypatch.setattr(safetensors_index, "PREFETCH_BYTES", 2500)
    monkeypatch.setattr(safetensors_index, "PREFETCH_REQUEST_BYTES", 1000)
    requested = []
    monkeypatch.setattr(checkpoint, "prefetch", lambda *part: requested.append((part[0].name, *part[1:])))
    ahead = safetensors_index.Prefetcher(checkpoint, [(tensors["a"], 10, 4500), (tensors["b"], 0, 300)])
    assert requested == [("a", 10, 1000), ("a", 1010, 1000), ("a", 2010, 1000)]
    ahead.advance(400)
    assert len(requested) == 3
    ahead.advance(200)
    assert requested[3:] == [("a", 3010, 1000)]
    ahead.advance(5000)
    assert requested[4:] == [("a", 4010, 500), ("b", 0, 300)]


@pytest.mark.parametrize("known", ["cached", "not cached", "unknown"])
def test_only_bytes_that_are_not_cached_are_prefetched(tmp_path, monkeypatch, known):
    import os

    from hf_fsdp_recipes.loading import safetensors_index

    save_file({"a": torch.arange(5000, dtype=torch.float32)}, tmp_path / "model.safetensors")
    checkpoint = safetensors_index.open_index(tmp_path)
    tensor = checkpoint.tensors["a"]

    def preadv(descriptor, buffers, offset, flags):
        assert flags == os.RWF_NOWAIT
        if known == "cached":
            return 1
        raise BlockingIOError

    requested = []
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *arguments: requested.append(arguments))
    if known == "unknown":
        monkeypatch.delattr(os, "RWF_NOWAIT")
    checkpoint.prefetch(tensor, 40, 400)
    assert requested == ([] if known == "cached" else [(tensor.start + 40, 400, os.POSIX_FADV_WILLNEED)])
