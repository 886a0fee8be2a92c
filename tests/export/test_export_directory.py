"""An export replaces only an export, and only the files that it wrote."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from hf_fsdp_recipes.errors import ExportError, LoadError
from hf_fsdp_recipes.export import export_directory
from hf_fsdp_recipes.export.export_directory import check_target, parse_shard_size
from hf_fsdp_recipes.export.verify_files import has_weights
from hf_fsdp_recipes.loading import export_marker
from hf_fsdp_recipes.loading.export_marker import MARKER, check_files


def write(final, *names, **keywords):
    """Write an export with these files."""
    export_directory.start(final)
    for name in names:
        file = export_directory.incomplete_directory_for(final) / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(name)
    export_directory.write_marker(export_directory.incomplete_directory_for(final), [])
    return export_directory.replace(final, **keywords)


def tree(directory):
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}


@pytest.fixture
def export(tmp_path):
    write(tmp_path / "export", "config.json", "model.safetensors", "additional_chat_templates/tool.jinja")
    return tmp_path / "export"


def test_earlier_export_is_replaced_with_its_subfolders(export):
    check_target(export, "5GB")
    write(export, "config.json", "adapter.safetensors")
    assert tree(export.parent) == {
        "export", "export/config.json", "export/adapter.safetensors", f"export/{MARKER}",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["notes.txt", "notes/", "additional_chat_templates/mine.jinja", ".hidden"])
def test_export_with_other_files_is_not_replaced(export, name):
    path = export / name
    path.mkdir() if name.endswith("/") else path.write_text("precious")
    before = tree(export.parent)
    with pytest.raises(ExportError, match=name.rstrip("/").split("/")[-1]):
        check_target(export, "5GB")
    with pytest.raises(ExportError):
        write(export, "config.json")
    shutil.rmtree(export_directory.incomplete_directory_for(export))
    assert tree(export.parent) == before


def test_finished_export_gets_a_free_name_if_its_place_is_taken(export, caplog):
    (export / "notes.txt").write_text("precious")
    (export.parent / "export-1").mkdir()
    before = tree(export)
    check_target(export, "5GB", use_free_name=True)
    directory = write(export, "config.json", use_free_name=True)
    assert directory == export.parent / "export-2"
    assert tree(directory) == {"config.json", MARKER}
    assert tree(export) == before
    assert f"{export} contains notes.txt" in caplog.text and f"The export is in {directory} instead." in caplog.text
    (export / "notes.txt").unlink()
    assert write(export, "config.json", use_free_name=True) == export


def test_link_to_another_directory_inside_an_export_is_not_followed(export, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    (export / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(ExportError, match="link"):
        check_target(export, "5GB")


@pytest.mark.parametrize("place", ["export", ".export.replaced"])
def test_folder_of_an_export_that_became_a_link_is_not_emptied(export, tmp_path, place):
    export = export.rename(tmp_path / place)
    (export / "additional_chat_templates").rename(tmp_path / "mine")
    (export / "additional_chat_templates").symlink_to(tmp_path / "mine")
    if place == "export":
        with pytest.raises(ExportError, match="contains additional_chat_templates, which is not part"):
            write(tmp_path / "export", "config.json")
    else:
        (tmp_path / "export").mkdir()
        write(tmp_path / "export", "config.json")
        assert (export / "additional_chat_templates").is_symlink()
    assert (tmp_path / "mine" / "tool.jinja").read_text()


@pytest.mark.parametrize("names", [["config.json"], ["adapter_config.json", "notes.txt"], ["checkpoint-4/.metadata"]])
def test_directory_without_marker_is_not_replaced(tmp_path, names):
    target = tmp_path / "model"
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text("{}")
    with pytest.raises(ExportError, match="is not an export"):
        check_target(target, "5GB")


def test_source_itself_is_not_replaced(export, tmp_path):
    (tmp_path / "link").symlink_to(export)
    with pytest.raises(ExportError, match="is the directory to export"):
        check_target(tmp_path / "link", "5GB", source=export)


@pytest.mark.parametrize(
    "marker",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"format": 2, "files": {}}',
        '{"format": 1, "files": {"config.json": {"bytes": 1e999, "xxh3": []}}}',
        '{"format": 1, "files": {"config.json": {"bytes": 1, "xxh3": [[1e999, 1, ""]]}}}',
        '{"format": 1, "files": {"config.json": {"bytes": 1, "xxh3": [[0, 1]]}}}',
        '{"format": 1, "files": {"config.json": {"bytes": 1}}}',
        '{"format": 1, "files": {"config.json": 5}}',
        '{"format": 1, "files": {"../thesis.txt": {"bytes": 1}}}',
        '{"format": 1, "files": {"/etc/passwd": {"bytes": 1}}}',
    ],
)
def test_damaged_marker_replaces_nothing(export, marker):
    (export / MARKER).write_text(marker)
    (export.parent / "thesis.txt").write_text("x")
    with pytest.raises(ExportError, match=MARKER):
        check_target(export, "5GB")
    with pytest.raises(LoadError, match=MARKER):
        check_files(export)


@pytest.mark.parametrize("exists", [True, False])
def test_link_stays_and_its_target_is_filled(tmp_path, exists):
    if exists:
        write(tmp_path / "disk" / "target", "old.json")
    (tmp_path / "export").symlink_to(tmp_path / "disk" / "target")
    check_target(tmp_path / "export", "5GB")
    write((tmp_path / "export").resolve(), "config.json")
    assert (tmp_path / "export").is_symlink()
    assert tree(tmp_path / "export") == {"config.json", MARKER}


def test_unusable_places_are_one_error(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for target in (tmp_path / "file", tmp_path / "file" / "export", tmp_path / "loop", "/"):
        with pytest.raises(ExportError):
            check_target(target, "5GB")


def test_empty_directory_is_filled(tmp_path):
    (tmp_path / "export").mkdir()
    check_target(tmp_path / "export", "5GB")
    write(tmp_path / "export", "config.json")
    assert tree(tmp_path) == {"export", "export/config.json", f"export/{MARKER}"}


def test_crash_between_the_renames_keeps_the_earlier_export(export, monkeypatch):
    rename, before = os.rename, tree(export)
    monkeypatch.setattr(export_directory, "sync_path", lambda path: None)
    monkeypatch.setattr(type(export), "rename", lambda self, target: rename(self, target) if self == export else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(export, "config.json")
    monkeypatch.undo()
    assert not export.exists()
    check_target(export, "5GB")
    export_directory.start(export)
    assert tree(export) == before


def test_crash_while_the_earlier_export_is_deleted_does_not_stop_the_next(export, monkeypatch):
    replaced = export.with_name(".export.replaced")
    shutil.copytree(export, replaced)
    (replaced / "config.json").unlink()
    write(export, "config.json")
    assert tree(export.parent) == {"export", "export/config.json", f"export/{MARKER}"}


@pytest.mark.parametrize("has_marker", [True, False])
def test_replaced_export_that_cannot_be_deleted_does_not_stop_the_next(export, has_marker):
    """On NFS, a file that another process still reads is renamed to `.nfs...`, and its directory cannot be deleted."""
    replaced = export.with_name(".export.replaced")
    shutil.copytree(export, replaced)
    (replaced / ".nfs0001").write_text("open")
    (replaced / "config.json").unlink()
    if not has_marker:
        (replaced / MARKER).unlink()
    for name in ("first.json", "second.json"):
        write(export, name)
        assert tree(export) == {name, MARKER}
    assert sorted(path.name for path in export.parent.iterdir()) == [".export.replaced", "export"]
    assert (replaced / MARKER).is_file() == has_marker
    (replaced / ".nfs0001").unlink()
    export_directory.start(export)
    assert replaced.exists() != has_marker


def test_marker_is_deleted_last(export, monkeypatch):
    unlink = Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda self, **keywords: unlink(self, **keywords) if self.name != "config.json" else None
    )
    write(export, "other.json")
    replaced = export.with_name(".export.replaced")
    assert tree(replaced) == {"config.json", MARKER}
    monkeypatch.undo()
    export_directory.start(export)
    assert not replaced.exists()


@pytest.mark.parametrize("size", ["5GiB", "tiny", -1, 0, "-1", "0GB", "-5GB", "nanGB", "infGB", "", "GB", 1.5, None])
def test_bad_size_is_one_error_with_the_value_and_an_example(tmp_path, size):
    with pytest.raises(ExportError) as error:
        check_target(tmp_path / "export", size)
    assert f"max_shard_size is {size!r}" in str(error.value) and "5GB" in str(error.value)


@pytest.mark.parametrize(
    ("size", "num_bytes"), [("5GB", 5 * 10**9), ("5000000000", 5 * 10**9), (20, 20), (" 2kb", 2000)]
)
def test_sizes_are_read_as_save_pretrained_reads_them(size, num_bytes):
    assert parse_shard_size(size) == num_bytes


def test_full_disk_is_known_before_the_export(tmp_path):
    with pytest.raises(ExportError, match=r"needs 1,000,000,000,000,000,000 bytes"):
        check_target(tmp_path / "new" / "export", "5GB", num_bytes=10**18)
    assert not (tmp_path / "new").exists()


def remove(export):
    (export / "config.json").unlink()


def truncate(export):
    (export / "config.json").write_text("x")


def move_range(export):
    marker = json.loads((export / MARKER).read_text())
    marker["files"]["config.json"]["xxh3"][0][0] = 10**30
    (export / MARKER).write_text(json.dumps(marker))


def add_index(export):
    (export / "model.safetensors.index.json").write_text(
        "{}"
    )  # an earlier export's index; transformers would read the files that it names


def flip(export):
    (export / "config.json").write_text("Config.json")


DAMAGES = {
    remove: r"config\.json is missing",
    truncate: r"config\.json has 1 bytes, not 11",
    flip: r"config\.json differs from its checksum",
    move_range: r"config\.json differs from its checksum",
    add_index: r"model\.safetensors\.index\.json was added",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_changed_export_is_not_loaded(export, damage):
    check_files(export)
    (export / "README.md").write_text("notes")
    (export / "._model.safetensors").write_text("of macOS")
    check_files(export)
    damage(export)
    with pytest.raises(LoadError, match=DAMAGES[damage]):
        check_files(export)


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_parts_cover_every_range_once(tmp_path, num_parts, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(bytes(range(200)))
    ranges = [(10 * n, 10, xxhash.xxh3_64_hexdigest(bytes(range(10 * n, 10 * n + 10)))) for n in range(20)]
    export_directory.write_marker(tmp_path, [{"model.safetensors": ranges}])
    read, is_intact = [], export_marker._is_intact
    monkeypatch.setattr(export_marker, "_is_intact", lambda *written: read.append(written[1]) or is_intact(*written))
    for part in range(num_parts):
        check_files(tmp_path, part, num_parts)
    assert sorted(read) == [start for start, _, _ in ranges]


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ([0, 20], "bytes 10 to 20 were not written"),
        ([10, 20], "bytes 0 to 10 were not written"),
        ([0, 10], "bytes 20 to 30 were not written"),
        ([0, 10, 10, 20], "bytes 10 to 20 were written twice"),
    ],
)
def test_weights_that_are_not_written_exactly_once_are_no_export(tmp_path, starts, words):
    (tmp_path / "model.safetensors").write_bytes(bytes(30))
    with pytest.raises(ExportError, match=words):
        export_directory.write_marker(tmp_path, [{"model.safetensors": [(start, 10, "") for start in starts]}])
    assert not (tmp_path / MARKER).exists()


def test_hidden_files_are_not_weights(tmp_path):
    (tmp_path / "._model.safetensors").write_bytes(b"\x00\x05\x16\x07")
    assert not has_weights(tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert has_weights(tmp_path)


def test_directory_without_marker_can_be_loaded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    check_files(tmp_path)
