"""A run that several tests take apart."""

import pytest


@pytest.fixture(scope="session")
def run(tiny_model, text_file, tmp_path_factory):
    """An output directory with checkpoint-2 and its export; copy it before you change it."""
    from tests.checkpointing.test_save_ranks import train

    output = tmp_path_factory.mktemp("run")
    train(tiny_model("llama"), text_file, output, steps=2, save_steps=2, callback={"export_dir": output / "export"})
    return output


@pytest.fixture
def storage(monkeypatch):
    """An S3 server, and the environment that leads s3fs to it."""
    from s3fs import S3FileSystem

    from tests.checkpointing.object_storage import ObjectStorage

    S3FileSystem.clear_instance_cache()  # of another test's server
    server = ObjectStorage()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()
