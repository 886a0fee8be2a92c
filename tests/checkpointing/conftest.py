"""Runs, models and servers that several tests share."""

import pytest

from tests.conftest import make_tokenizer, tiny_config


@pytest.fixture(scope="session")
def run(tiny_model, text_file, tmp_path_factory):
    """An output directory with checkpoint-2 and its export; copy it before you change it."""
    from tests.checkpointing.test_save_ranks import train

    output = tmp_path_factory.mktemp("run")
    train(tiny_model("llama"), text_file, output, steps=2, save_steps=2, callback={"export_dir": output / "export"})
    return output


@pytest.fixture(scope="session")
def changed_model(tmp_path_factory):
    """Return a function that makes a tiny Llama with changed config values."""
    from transformers import AutoModelForCausalLM

    def make(**changes):
        config = tiny_config("llama")
        for name, value in changes.items():
            setattr(config, name, value)
        directory = tmp_path_factory.mktemp("changed")
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        make_tokenizer(directory)
        return directory

    return make


@pytest.fixture(params=["Moto", "SeaweedFS"])
def storage(monkeypatch, request):
    """An S3 server; sets the environment variables with which s3fs finds it."""
    from s3fs import S3FileSystem

    from tests.checkpointing import object_storage

    if request.param == "SeaweedFS" and object_storage.WEED is None:
        pytest.skip("SeaweedFS is not installed")
    S3FileSystem.clear_instance_cache()  # forget the server of an earlier test
    server = object_storage.ObjectStorage(getattr(object_storage, request.param))
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()
