"""Pushing to the Hub, with a local substitute for its API."""

import json
import os
import sys

import pytest
from huggingface_hub import constants

from tests.export.hub_standin import serve
from tests.ranks.harness import printed_by, run_ranks, template_environment
from tests.recipes.launching import run, run_recipe
from tests.recipes.test_sft import CPU, assert_clear_failure, recipe

HUB_VARIABLES = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "HF_TOKEN", "HF_HOME")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serve() as standin:
        monkeypatch.setenv("HF_ENDPOINT", standin.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_TOKEN", "hf_standin")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield standin


def test_weights_of_an_earlier_push_are_deleted(hub, tmp_path, monkeypatch):
    from hf_fsdp_recipes.export.hub import upload

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    pushes = [
        ["notes.txt", "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
         "model.safetensors.index.json"],
        ["config.json", "model.safetensors"],
    ]  # fmt: skip
    for number, names in enumerate(pushes):
        source = tmp_path / f"export-{number}"
        source.mkdir()
        for name in names:
            (source / name).write_text(f"{name} {number}")
        upload(source, "someone/tuned", "end", True, tmp_path)
    files = hub.files["someone/tuned"]
    assert {name: body.decode() for name, body in files.items()} == {
        "notes.txt": "notes.txt 0", "config.json": "config.json 1", "model.safetensors": "model.safetensors 1"
    }  # fmt: skip


@pytest.mark.parametrize(("name", "retry"), [("export", "hf upload"), ("checkpoint-10", "hf-fsdp export")])
def test_failed_push_that_prints_much_ends_with_a_command_to_retry(tmp_path, monkeypatch, caplog, name, retry):
    from hf_fsdp_recipes.export.hub import HubTarget, Pusher

    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nhead -c 200000 /dev/zero | tr '\\000' x\necho\necho the reason\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert not Pusher(HubTarget("someone/tuned"), tmp_path).push_export(tmp_path / name)
    assert "push to someone/tuned failed (the reason)" in caplog.text
    assert f"To retry: {retry} " in caplog.text and f"hf upload someone/tuned {tmp_path / name}" in caplog.text


def run_online(arguments):
    """Run the recipe on a forked rank in online mode; huggingface_hub was imported in offline mode before the fork."""
    constants.HF_HUB_OFFLINE = False
    run_recipe(arguments)


def pushing_recipe(tmp_path, model, data, **changes):
    settings = {"model_name_or_path": model, "dataset_name": data, "push_to_hub": True, "hub_model_id": "someone/tuned"}
    return recipe(tmp_path, **(settings | changes))


def test_every_save_and_the_export_are_pushed_to_a_private_repository(hub, tiny_model, text_file, tmp_path):
    from safetensors.torch import load

    config = pushing_recipe(
        tmp_path,
        tiny_model("llama_tied"),
        text_file,
        hub_strategy="every_save",
        export_dtype="bfloat16",
        max_steps=1,
        save_steps=1,
        report=False,
    )
    environment = template_environment(CPU) | {name: os.environ[name] for name in HUB_VARIABLES}
    printed = run_ranks(printed_by, 2, run_online, ["--config", config], environment=environment, timeout_seconds=150)[
        0
    ]
    assert "pushed: export to" in printed, printed
    files = hub.files["someone/tuned"]
    assert hub.private == {"someone/tuned": True}
    exported = {path.name: path.read_bytes() for path in (tmp_path / "run" / "export").iterdir()}
    assert {name: files[name] for name in exported} == exported
    assert [message for _, message in hub.commits][-1] == "End of training"
    assert hub.commits[0][1].startswith("Training in progress, checkpoint ")
    assert load(files["model.safetensors"])
    assert not (tmp_path / "run" / ".hub").exists()


@pytest.mark.slow
def test_a_hub_that_fails_causes_only_a_warning(hub, tiny_model, text_file, tmp_path):
    hub.refuse_commits = 10**6
    config = pushing_recipe(tmp_path, tiny_model("llama_tied"), text_file, hub_strategy="every_save", max_steps=3)
    result = run(CPU, ["--config", config])
    assert result.returncode == 0, result.stdout
    assert "push to someone/tuned failed" in result.stdout and "hf upload someone/tuned" in result.stdout
    assert json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert list((tmp_path / "run").glob("checkpoint-*/manifest.json"))


@pytest.mark.slow
def test_an_interrupted_push_continues_where_it_stopped(hub, tiny_model, tmp_path):
    from hf_fsdp_recipes.export.hub import HubTarget, Pusher

    pusher = Pusher(HubTarget("someone/again", "end", False, None), tmp_path)
    hub.refuse_commits = 10**6
    assert not pusher.push_export(tiny_model("llama"))
    sent = hub.uploads
    hub.refuse_commits = 0
    assert pusher.push_export(tiny_model("llama"))
    assert sent == hub.uploads == 1  # the weights were not sent a second time
    assert hub.private == {"someone/again": False}


@pytest.mark.slow
def test_pushing_without_a_token_is_refused_before_anything_is_loaded(
    hub, tiny_model, text_file, tmp_path, monkeypatch
):
    monkeypatch.delenv("HF_TOKEN")
    config = pushing_recipe(tmp_path, tiny_model("llama_tied"), text_file)
    result = run(CPU, ["--config", config], timeout_seconds=90)
    assert_clear_failure(result, "RecipeError")
    assert "no Hub token" in result.stdout
