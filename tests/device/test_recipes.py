"""Recipes on the device: losses and exports equal those of CPU ranks."""

from tests.device.ranks import CPU, DEVICE, variant

SETTINGS = {
    "max_steps": 3,
    "save_steps": 2,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 1.0e-2,
    "max_length": 64,
    "report_to": "none",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def test_full(ranks, tiny_model, text_file, tmp_path):
    import time
    settings = SETTINGS | {"model_name_or_path": tiny_model("llama"), "dataset_name": text_file}
    template = variant("fsdp2_full_shard", tmp_path)
    for on, name in ((DEVICE, "device"), (CPU, "cpu")):
        started = time.monotonic()
        print(name, ranks.train(settings | {"output_dir": tmp_path / name}, template, on=on), time.monotonic() - started)
