"""Our metrics in the files of the trackers themselves: TensorBoard, MLflow, trackio and wandb, each on local disk."""

import importlib.util
import json
import math
import struct

import pytest

from hf_fsdp_recipes.metrics.metrics_file import read_metrics
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import build

LOGGED = {"tokens_per_second", "tokens_per_second_per_device", "step_seconds", "host_memory_gb", "load_seconds"}
LOGGED |= {"save_seconds", "average_tokens_per_second"}


def train(model, data, output, tracker):
    """Train 6 steps with a save after the third; `build` loads with load_model."""
    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.metrics.metrics_callback import MetricsCallback, place_before_reporters

    callbacks = [MetricsCallback(throughput_warmup_steps=1), ShardedCheckpointCallback()]
    settings = {"steps": 6, "save_strategy": "steps", "save_steps": 3, "report_to": [tracker]}
    trainer = build(str(model), str(data), str(output), callbacks=callbacks, **settings)
    place_before_reporters(trainer)
    trainer.train()
    if tracker == "wandb":
        import wandb

        wandb.finish()  # wandb does this at exit, which forked ranks skip


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [file] = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    return {
        name.removeprefix("train/"): [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def read_mlflow(folder):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    [run] = client.search_runs(["0"])
    found = {}
    for name in run.data.metrics:
        found[name] = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
    return found


def read_trackio(folder):
    import sqlite3

    import orjson

    [file] = (folder / "trackio").glob("*.db")
    found = {}
    with sqlite3.connect(file) as database:
        for (text,) in database.execute("SELECT metrics FROM metrics ORDER BY id"):
            row = orjson.loads(text)
            for name, value in row.items():
                found.setdefault(name.removeprefix("train/"), []).append((row["train/global_step"], value))
    return found


def wandb_records(data):
    """Yield the records of a LevelDB log: 32 KiB blocks of chunks with checksum, length and type (1 full, 4 last)."""
    position, record = 7, b""  # after wandb's own header
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768  # padding
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def read_wandb(folder):
    from wandb.proto import wandb_internal_pb2

    [file] = folder.rglob("*.wandb")
    found = {}
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in row.items():
            found.setdefault(name.removeprefix("train/"), []).append((row.get("train/global_step"), value))
    return found


READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "trackio": read_trackio, "wandb": read_wandb}


@pytest.mark.parametrize("tracker", READERS)
def test_metrics_are_in_the_trackers_own_files(tracker, tiny_model, text_file, tmp_path):
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    output = tmp_path / "run"
    environment = fsdp_environment(FSDP2) | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
    }
    run_ranks(train, 2, tiny_model("llama"), text_file, output, tracker, environment=environment, timeout_seconds=240)
    logged = READERS[tracker](tmp_path)
    assert logged.keys() >= LOGGED | {"loss", "learning_rate", "grad_norm"}
    steps = [entry for entry in read_metrics(output / "metrics.jsonl") if "loss" in entry]
    for name in ("loss", "tokens_per_second", "step_seconds"):
        assert [step for step, _ in logged[name]] == [1, 2, 3, 4, 5, 6]
        assert [value for _, value in logged[name]] == pytest.approx([entry[name] for entry in steps], rel=1e-5)
    assert [value for _, value in logged["host_memory_gb"]] == pytest.approx(
        [max(entry["host_bytes"]) / 1e9 for entry in steps], rel=1e-5
    )
    [(first, load_seconds)] = logged["load_seconds"]
    assert first == 1 and 0 < load_seconds < 60
    assert 4 in [step for step, _ in logged["save_seconds"]]  # the step after the save
    assert math.isfinite(logged["average_tokens_per_second"][-1][1])
