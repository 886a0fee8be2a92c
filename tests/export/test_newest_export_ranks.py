"""`export_dir` is the newest export of its run, and nothing else there is ever touched."""

import functools
import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model

from tests.export.cases import assert_same_tensors, load
from tests.ranks.harness import start_ranks
from tests.saving.damage import damage
from tests.saving.runs import (
    BEST,
    contents_of,
    digests_in,
    names_in,
    on,
    search,
    steps_in,
    train,
    wait_for,
)

SINGLE = pytest.mark.parametrize("world", ["fsdp", "one"])


def _set_aside(folder, name):
    """Return what was set aside of the exports of this name."""
    return list(folder.glob(f"_set-aside-*-{name}"))


def _described(directory):
    return json.loads((directory / "run.json").read_text())


@SINGLE
def test_after_more_steps_the_export_is_the_newest_and_the_one_before_is_set_aside(
    run, tmp_path, world
):
    options = {"world": world, "callback": {"export_dir": tmp_path / "export"}}
    (first,) = run(tmp_path / "run", 1, **options)
    assert _described(tmp_path / "export")["step"] == 4
    (second,) = run(tmp_path / "run", 1, max_steps=6, **options)
    assert digests_in(tmp_path / "export") == second["trained"] != first["trained"]
    (before,) = _set_aside(tmp_path, "export")
    assert digests_in(before) == first["trained"]
    described = [_described(directory) for directory in (before, tmp_path / "export")]
    assert [facts["step"] for facts in described] == [4, 6]
    assert described[0]["run"] == described[1]["run"]
    assert names_in(tmp_path) == [before.name, "export", "run"]


def test_the_merged_export_is_the_newest_too(run, tmp_path):
    options = {"sft": True, "lora": True}
    options["callback"] = {"export_dir": tmp_path / "export", "merge_adapter": True}
    run(tmp_path / "run", **options)
    merged = contents_of(tmp_path / "export_merged")
    run(tmp_path / "run", max_steps=6, **options)
    (before,) = _set_aside(tmp_path, "export_merged")
    assert contents_of(before) == merged
    newest = contents_of(tmp_path / "export_merged")
    assert newest["model.safetensors"] != merged["model.safetensors"]
    assert len(_set_aside(tmp_path, "export")) == 1


def _end_before_the_export(trainer, how):
    """Let step 2 be the best; end the run in its last step, or before it exports."""
    scores = {2: 1, 4: 3}
    trainer.compute_metrics = lambda _: {"score": scores[trainer.state.global_step]}

    def send(state, control):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    if how == "signal":
        on(trainer, "on_pre_optimizer_step", send)
    if how == "kill":
        on(trainer, "on_train_end", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


@SINGLE
@pytest.mark.parametrize("how", ["signal", "kill"])
def test_a_requeued_run_with_all_of_its_steps_exports_the_best_model(
    worlds, run, tmp_path, world, how
):
    options = BEST | {"callback": {"export_dir": tmp_path / "export"}}
    options["prepare"] = functools.partial(_end_before_the_export, how=how)
    ended = functools.partial(train, tmp_path / "run", **options)
    processes, _ = start_ranks(ended, 1, environment=worlds[world])
    processes[0].join(60)
    assert not (tmp_path / "export").exists() and steps_in(tmp_path / "run") == [2, 4]
    options["prepare"] = functools.partial(_end_before_the_export, how="no way")
    (result,) = run(tmp_path / "run", 1, world=world, **options)
    assert result["resumed"] == "checkpoint-4" and result["best"][1] == 2
    assert digests_in(tmp_path / "export") == digests_in(tmp_path / "run" / "checkpoint-2")
    assert names_in(tmp_path) == ["export", "run"]


def _export(directory, target, tokenizer=None):
    from hf_fsdp_recipes import export_model

    return export_model(load(directory), target, tokenizer=tokenizer).name


@pytest.fixture
def others(run, tiny_model, tmp_path):
    """Return folders in each of which something is where a run would export."""
    names = ("file", "of a person", "by hand", "of another run", "merged of another run")
    folders = {name: tmp_path / name for name in names}
    folders["of a person"].joinpath("export").mkdir(parents=True)
    folders["of a person"].joinpath("export", "note.txt").write_text("mine")
    folders["file"].mkdir()
    folders["file"].joinpath("export").write_text("mine")
    by_hand = folders["by hand"] / "export"
    run(tiny_model(), world="one", function=_export, target=by_hand)
    for name, export in (("of another run", "export"), ("merged of another run", "export_merged")):
        callback = {"export_dir": folders[name] / export}
        run(tmp_path / "other" / name, world="one", callback=callback)
    return folders


def _train_in_each(output, folders):
    """Return what comes of a run in each folder, and whether the folder is as it was."""
    found = {}
    for name, folder in folders.items():
        before = contents_of(folder)
        callback = {"export_dir": folder / "export", "merge_adapter": True}
        result = train(output / name, lora=True, callback=callback)
        found[name] = result, contents_of(folder) == before
    return found


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_what_is_no_export_of_the_run_is_refused_before_training(run, others, tmp_path, world):
    options = {"function": _train_in_each, "folders": others}
    for found in run(tmp_path / "runs", world=world, **options):
        for name, (result, is_untouched) in found.items():
            assert str(others[name] / "export") in (result["error"] or ""), name
            assert result["step"] == 0 and result["optimizer"] == [] and is_untouched, name
    assert contents_of(tmp_path / "runs").keys() <= others.keys()


@SINGLE
def test_an_empty_directory_is_exported_to(run, tmp_path, world):
    (tmp_path / "export").mkdir()
    callback = {"export_dir": tmp_path / "export"}
    (result,) = run(tmp_path / "run", 1, world=world, callback=callback)
    assert digests_in(tmp_path / "export") == result["trained"]
    assert names_in(tmp_path) == ["export", "run"]


def _resume_where_something_is(folder):
    """Resume from an earlier checkpoint, with an export directory that holds something else."""
    export_dir = folder / "export"
    train(folder / "run")
    export_dir.mkdir()
    (export_dir / "note.txt").write_text("mine")
    before = contents_of(folder)
    checkpoint = str(folder / "run" / "checkpoint-2")
    result = train(folder / "run", resume=checkpoint, callback={"export_dir": export_dir})
    return result["error"], contents_of(folder) == before


@SINGLE
def test_a_refused_export_leaves_the_checkpoints_as_they_are(run, tmp_path, world):
    ((error, is_untouched),) = run(tmp_path, 1, world=world, function=_resume_where_something_is)
    assert str(tmp_path / "export") in error and is_untouched


@SINGLE
def test_each_trial_of_a_search_has_an_export_of_its_own(run, tmp_path, world):
    options = {"function": search, "export_dir": tmp_path / "elsewhere" / "export"}
    assert run(tmp_path / "search", 1, world=world, **options) == [None]
    exports = [tmp_path / "search" / f"run-{number}" / "export" for number in (0, 1)]
    for export in exports:
        assert digests_in(export) == digests_in(export.with_name("checkpoint-4"))
    assert _described(exports[0])["run"] != _described(exports[1])["run"]
    assert not (tmp_path / "elsewhere").exists()


@SINGLE
def test_a_finished_run_that_is_started_again_exports_only_what_is_not_there(run, tmp_path, world):
    options = BEST | {"callback": {"export_dir": tmp_path / "export"}, "world": world}
    options["prepare"] = functools.partial(_end_before_the_export, how="no way")
    run(tmp_path / "run", 1, **options | {"load_best_model_at_end": False})
    assert digests_in(tmp_path / "export") == digests_in(tmp_path / "run" / "checkpoint-4")
    run(tmp_path / "run", 1, **options)
    best = digests_in(tmp_path / "run" / "checkpoint-2")
    assert digests_in(tmp_path / "export") == best and len(_set_aside(tmp_path, "export")) == 1
    before = contents_of(tmp_path)
    run(tmp_path / "run", 1, **options)
    assert contents_of(tmp_path) == before
    (tmp_path / "export" / "model.safetensors").unlink()
    run(tmp_path / "run", 1, **options)
    assert digests_in(tmp_path / "export") == best


@SINGLE
def test_an_export_of_an_adapter_stays_though_peft_orders_its_modules_anew(run, tmp_path, world):
    options = {"world": world, "lora": True, "callback": {"export_dir": tmp_path / "export"}}
    run(tmp_path / "run", 1, **options)
    config = json.loads((tmp_path / "export" / "adapter_config.json").read_text())
    config["target_modules"] = sorted(config["target_modules"], reverse=True)
    (tmp_path / "export" / "adapter_config.json").write_text(json.dumps(config))
    before = contents_of(tmp_path)
    run(tmp_path / "run", 1, **options)
    assert contents_of(tmp_path) == before


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_an_export_that_cannot_be_written_is_refused_before_training(run, tmp_path, world):
    (tmp_path / "file").write_text("mine")
    callback = {"export_dir": tmp_path / "file" / "export"}
    for result in run(tmp_path / "run", world=world, callback=callback):
        assert result["error"].startswith(f"{tmp_path}/file/export cannot be written")
        assert result["step"] == 0
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def _damage_the_best(trainer, file):
    """Let the disk damage the best checkpoint while step 4 is saved. Without a file, it is gone."""
    _end_before_the_export(trainer, "no way")
    best = Path(trainer.args.output_dir, "checkpoint-2")

    def damage_best(state, control):
        if state.global_step == 4 and trainer.is_world_process_zero():
            if file:
                damage(best / file, "flip", random.Random(0))
            else:
                shutil.rmtree(best)

    on(trainer, "on_save", damage_best)


@pytest.mark.parametrize(
    ("world", "file"),
    [
        ("fsdp", "pytorch_model_fsdp_0/__0_0.distcp"),
        ("full state", "pytorch_model_fsdp.bin"),
        ("one", "model.safetensors"),
        ("one", ""),
    ],
)
def test_a_best_checkpoint_that_is_damaged_or_gone_is_not_exported(run, tmp_path, world, file):
    options = BEST | {"callback": {"export_dir": tmp_path / "export"}, "world": world}
    options["prepare"] = functools.partial(_damage_the_best, file=file)
    for result in run(tmp_path / "run", **options):
        reason = f"{file} is damaged" if file else "No such file"
        assert "checkpoint-2" in result["error"] and reason in result["error"]
    assert names_in(tmp_path) == ["run"]
    assert names_in(tmp_path / "run")[-1] == "checkpoint-4"


def _lose(best):
    shutil.rmtree(best)


def _damage_without_manifest(best):
    (best / "manifest.json").unlink()
    damage(best / "model.safetensors", "flip", random.Random(0))


@pytest.mark.parametrize("spoil", [_lose, _damage_without_manifest])
def test_without_the_best_checkpoint_a_run_is_not_resumed(run, tmp_path, spoil):
    options = BEST | {"world": "one", "prepare": functools.partial(_end_before_the_export, how="")}
    run(tmp_path / "run", **options)
    spoil(tmp_path / "run" / "checkpoint-2")
    callback = {"export_dir": tmp_path / "export"}
    (result,) = run(tmp_path / "run", max_steps=6, callback=callback, **options)
    assert "the best checkpoint" in result["error"] and "checkpoint-2" in result["error"]
    assert result["step"] == 4 and names_in(tmp_path) == ["run"]
    (result,) = run(tmp_path / "run", max_steps=6, callback=callback, world="one")
    assert result["error"] is None and result["step"] == 6


def _wrap(model):
    return torch.nn.Sequential(model)


def _add_head(model):
    model.head = torch.nn.Linear(2, 2)
    return model


def _add_prompt(model):
    config = {"num_virtual_tokens": 2, "num_layers": 2, "token_dim": 32}
    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", **config))


def _train_another(output, make, **options):
    def change(trainer):
        trainer.model = trainer.model_wrapped = make(trainer.model)

    return train(output, prepare=change, **options)


@pytest.mark.parametrize(
    ("world", "make", "message"),
    [
        ("one", _wrap, "Sequential is no transformers model"),
        ("one", _add_head, "the weights do not fit the config of LlamaForCausalLM: ['head."),
        ("fsdp", _add_head, "the weights do not fit the config of LlamaForCausalLM: ['head."),
        ("ddp", _add_prompt, "it computes ['prompt_embeddings']"),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused_before_training(
    run, tmp_path, world, make, message
):
    options = {"callback": {"export_dir": tmp_path / "export"}, "make": make}
    for result in run(tmp_path / "run", world=world, function=_train_another, **options):
        assert message in result["error"] and result["losses"] == {}
    assert names_in(tmp_path / "run") == []


@pytest.mark.parametrize("export_dir", ["run", "."])
def test_an_export_directory_that_holds_the_checkpoints_is_refused(run, tmp_path, export_dir):
    callback = {"export_dir": tmp_path / export_dir}
    (result,) = run(tmp_path / "run", world="one", callback=callback)
    assert "which holds the checkpoints" in result["error"] and result["losses"] == {}


class WaitingTokenizer:
    """Is saved when the test says so."""

    def save_pretrained(self, directory):
        folder = directory.parent
        (folder / "waits").touch()
        wait_for(folder / "goes on")


def test_two_exports_of_one_name_at_the_same_time_are_both_complete(
    tiny_model, run, worlds, tmp_path
):
    export = functools.partial(_export, tiny_model(), tmp_path / "export", WaitingTokenizer())
    processes, results = start_ranks(export, 1, environment=worlds["one"])
    wait_for(tmp_path / "waits")
    (second,) = run(tiny_model(), world="one", function=_export, target=tmp_path / "export")
    (tmp_path / "goes on").touch()
    _, kind, first = results.get(timeout=60)
    processes[0].join()
    assert kind == "result" and {first, second} == {"export", "export-1"}
    for name in (first, second):
        assert_same_tensors(tiny_model(), tmp_path / name)
    assert names_in(tmp_path) == ["export", "export-1", "goes on", "waits"]
