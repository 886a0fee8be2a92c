"""An export never changes its sources. Runs in one process."""

import errno
import fcntl
import shutil

import pytest
from safetensors.torch import load_file

from hf_fsdp_recipes import export_checkpoint, export_model
from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.errors import ExportError, UnexpectedError
from hf_fsdp_recipes.export import export_directory
from hf_fsdp_recipes.export.from_model import check_export
from tests.ranks.training import LORA


@pytest.fixture
def base(tiny_model, tmp_path):
    """Return an earlier export with a valid marker, which a new export may replace."""
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "base")
    export_directory.write_marker(directory, [])
    return directory


@pytest.fixture
def trained(base):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**LORA))


@pytest.fixture
def adapter(trained, tmp_path):
    trained.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_adapter_is_not_merged_into_its_base_models_directory(base, adapter, tmp_path, monkeypatch):
    before = content(base)
    (tmp_path / "link").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    for target, base_model in ((base, None), ("base", "base"), ("link", base)):
        with pytest.raises(ExportError, match=r"is the model that this export is based on.* Choose another output"):
            export_checkpoint(adapter, target, base_model=base_model, merge_adapter=True)
    assert content(base) == before
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "link"}


def test_trained_model_does_not_replace_the_model_that_it_was_loaded_from(base, trained, tmp_path, monkeypatch):
    before = content(base)
    monkeypatch.chdir(tmp_path)
    for model in (trained, trained.get_base_model()):
        for refused in (check_export, export_model):
            with pytest.raises(ExportError, match="base is the model that this export is based on"):
                refused(model, "base")
    assert content(base) == before
    check_export(trained, "export")


def test_output_directory_with_the_name_of_a_hub_model_is_no_source(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("", "company/model"):
        trained.get_base_model().config.name_or_path = name
        check_export(trained, "company/model")


def test_link_as_a_target_stays_and_its_directory_is_filled(adapter, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "target")
    for _ in range(2):  # creates the directory, then replaces the export in it
        assert export_checkpoint(adapter, tmp_path / "link", merge_adapter=True) == tmp_path / "link"
        assert (tmp_path / "link").is_symlink()
        assert load_file(tmp_path / "disk" / "target" / "model.safetensors")
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["target"]


def test_export_while_another_writes_to_the_same_place_is_refused_and_disturbs_nothing(adapter, tmp_path):
    target = tmp_path / "model"
    with export_directory.lock(target):
        export_directory.start(target)
        (export_directory.incomplete_directory_for(target) / "half").touch()
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ExportError, match=r"another export to .*model is running. Wait for it"):
            export_checkpoint(adapter, target, merge_adapter=True)
        assert sorted(tmp_path.rglob("*")) == before
    export_checkpoint(adapter, target, merge_adapter=True)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "model"}


def test_interrupted_export_neither_blocks_the_next_nor_leaves_a_trace(base, adapter, tmp_path, monkeypatch):
    (tmp_path / ".model.export.lock").touch()  # as after a kill
    monkeypatch.setattr(export_directory, "write_marker", lambda *arguments: 1 / 0)
    with pytest.raises(UnexpectedError, match="division"):
        export_checkpoint(adapter, tmp_path / "model", merge_adapter=True)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


def test_export_without_file_locks_is_written(adapter, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    export_checkpoint(adapter, tmp_path / "model", merge_adapter=True)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "model"}


def test_save_of_a_step_is_not_deleted_by_an_export_to_its_place(adapter, tmp_path):
    save = layout.start(tmp_path, 4)
    export_checkpoint(adapter, tmp_path / "checkpoint-4", merge_adapter=True)
    assert save.is_dir()
