"""MetricsCallback in real runs on two ranks.

Its counts, its files, and its place among other callbacks.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_fsdp_recipes.metrics.metrics_file import read_metrics
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build


class Reporter(TrainerCallback):
    """Stands for the callbacks of `report_to`.

    Trainer calls them before the callbacks that it is given.
    """

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def train(model, data, output, settings):
    """Train with the callback.

    Return the logs that reporters get and the lengths of the sequences in each batch.
    """
    from hf_fsdp_recipes.metrics.callback import MetricsCallback

    reporter = Reporter()
    callbacks = [reporter, MetricsCallback(throughput_warmup_steps=2)]
    trainer = build(str(model), str(data), str(output), callbacks=callbacks, **settings)
    trainer.callback_handler.callbacks.sort(
        key=lambda callback: not isinstance(callback, MetricsCallback)
    )
    lengths, collate = [], trainer.data_collator

    def recording(examples):
        rows = [example.get("seq_lengths") or [len(example["input_ids"])] for example in examples]
        lengths.append([length for row in rows for length in row if length > 1])
        return collate(examples)

    trainer.data_collator = recording
    trainer.train()
    return reporter.logs, lengths


def run(model, data, output, settings):
    results = run_ranks(
        train, 2, model, data, output, settings, environment=fsdp_environment(FSDP2)
    )
    return results, read_metrics(output / "metrics.jsonl")


@pytest.mark.parametrize(
    "lora", [None, pytest.param(LORA, marks=pytest.mark.slow)], ids=["full", "lora"]
)
def test_every_logged_step_is_measured(lora, tiny_model, text_file, tmp_path):
    settings = {"steps": 4, "lora": lora, "eval_strategy": "steps", "eval_steps": 2}
    results, entries = run(tiny_model("llama"), text_file, tmp_path, settings)
    start, steps = entries[0], [entry for entry in entries if "loss" in entry]
    adapters = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 52)) if lora else 0
    assert start["matmul_parameters"] == 25952 + adapters
    assert (start["num_ranks"], start["num_rows"], start["no_mfu"]) == (
        2,
        72,
        "no float32 peak FLOP/s known for cpu",
    )
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4]
    assert [entry.get("is_warmup", False) for entry in steps] == [True, True, False, False]
    for entry in steps:
        assert (
            entry["tokens_per_second"] > 0
            and len(entry["host_bytes"]) == 2
            and min(entry["host_bytes"]) > 10**7
        )
        seconds = entry["seconds"]
        assert seconds["forward_backward"] > 0 and seconds["optimizer"] > 0
        assert entry["step_seconds"] == pytest.approx(
            sum(seconds.values()) - seconds["evaluation"] - seconds["save"]
        )
    assert steps[2]["seconds"]["evaluation"] > 0 == steps[1]["seconds"]["evaluation"]
    assert {file.name for file in tmp_path.iterdir()} >= {
        "report.md",
        "report.png",
        f"{start['run']}.txt",
    }
    assert start["run"].startswith("fsdp_training_") and start["run"].endswith("_1_2_4steps_1")
    logged = [line for line in results[0][0] if "loss" in line]  # what reporters get
    assert [line["tokens_per_second"] for line in logged] == [
        entry["tokens_per_second"] for entry in steps
    ]


COUNTED = {
    "packing": {"per_device_train_batch_size": 2, "packing": True, "max_length": 80},
    "padding": {"per_device_train_batch_size": 3, "include_num_input_tokens_seen": "non_padding"},
    "accumulation": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 2,
    },
}


@pytest.mark.parametrize(
    "kind",
    ["packing", *(pytest.param(k, marks=pytest.mark.slow) for k in COUNTED if k != "packing")],
)
def test_tokens_of_all_ranks_are_counted_without_padding(kind, tiny_model, text_file, tmp_path):
    settings = COUNTED[kind] | {"steps": 4}
    results, entries = run(tiny_model("llama"), text_file, tmp_path, settings)
    steps = [entry for entry in entries if "loss" in entry]
    batches = settings.get("gradient_accumulation_steps", 1) * settings.get("logging_steps", 1)
    for number, entry in enumerate(steps):
        rows = [
            batch
            for _, lengths in results
            for batch in lengths[number * batches : (number + 1) * batches]
        ]
        assert entry["tokens"] == sum(map(sum, rows))
    if kind == "padding":  # with an attention mask, Trainer counts right too
        assert sum(entry["tokens"] for entry in steps) == steps[-1]["num_input_tokens_seen"]


def test_a_logging_interval_that_begins_in_the_warm_up_measures_the_steps_after_it(
    tiny_model, text_file, tmp_path
):
    results, entries = run(
        tiny_model("llama"), text_file, tmp_path, {"steps": 5, "logging_steps": 5}
    )
    (entry,) = [entry for entry in entries if "loss" in entry]
    assert entry["num_steps"] == 3 and "is_warmup" not in entry
    assert entry["tokens"] == sum(sum(batch) for _, lengths in results for batch in lengths[2:5])


def train_stream(model, data, output):
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    from hf_fsdp_recipes import MetricsCallback

    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokenize(row):
        found = tokenizer(row["text"], padding="max_length", truncation=True, max_length=24)
        return {"labels": found["input_ids"], **found}

    stream = load_dataset("json", data_files=str(data), split="train", streaming=True)
    rows = stream.map(tokenize, remove_columns=["text"])
    args = TrainingArguments(
        output_dir=str(output),
        max_steps=3,
        per_device_train_batch_size=1,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
    )
    model = AutoModelForCausalLM.from_pretrained(model)
    Trainer(model, args, train_dataset=rows, callbacks=[MetricsCallback()]).train()


def test_an_own_script_may_stream_its_rows_on_two_ranks(tiny_model, text_file, tmp_path):
    run_ranks(train_stream, 2, tiny_model("llama"), text_file, tmp_path)
    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert "num_rows" not in entries[0]
    assert [entry["tokens"] > 0 for entry in entries if "loss" in entry] == [True] * 3


def train_with_faults(model, data, output):
    """Train while tokens cannot be counted and metrics.jsonl cannot be written."""
    from hf_fsdp_recipes.metrics import callback

    callback.flops.count_tokens = lambda inputs: inputs["no such input"]
    Path(output, "metrics.jsonl").mkdir(exist_ok=True)
    trainer = build(
        str(model), str(data), str(output), callbacks=[callback.MetricsCallback()], steps=3
    )
    trainer.train()
    return trainer.state.global_step


def test_faults_of_the_metrics_do_not_stop_a_run(tiny_model, text_file, tmp_path):
    environment = fsdp_environment(FSDP2)
    assert run_ranks(
        train_with_faults, 2, tiny_model("llama"), text_file, tmp_path, environment=environment
    ) == [3, 3]


def test_figures_are_in_the_files_of_a_tracker(tiny_model, text_file, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, entries = run(
        tiny_model("llama"), text_file, tmp_path, {"steps": 3, "report_to": ["tensorboard"]}
    )
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    for name in ("tokens_per_second", "step_seconds", "loss"):
        values = [event.value for event in events.Scalars(f"train/{name}")]
        assert values == pytest.approx(
            [entry[name] for entry in entries if "loss" in entry], rel=1e-5
        )


def test_device_memory_is_that_of_the_devices_own_counters(monkeypatch):
    from types import SimpleNamespace

    from hf_fsdp_recipes.metrics import memory

    resets = []
    module = SimpleNamespace(
        memory_allocated=lambda: 8,
        max_memory_allocated=lambda: 74,
        reset_peak_memory_stats=lambda: resets.append(1),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    found = memory.pop_device_bytes(torch.device("meta"))
    assert json.dumps(found) == json.dumps(
        {"device_valley_bytes": 8, "device_peak_bytes": 74, "device_reserved_peak_bytes": 0}
    )
    assert resets == [1]


def count_collectives(model, data, output, are_ours):
    """Return how many collectives of each kind six steps take that are not logged."""
    from collections import Counter

    from hf_fsdp_recipes import MetricsCallback, ShardedCheckpointCallback

    callbacks = [MetricsCallback(), ShardedCheckpointCallback()] if are_ours else []
    trainer = build(
        str(model), str(data), str(output), callbacks=callbacks, steps=8, logging_steps=100
    )

    class Profiler(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                self.profile = torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CPU]
                ).__enter__()
            if state.global_step == 7:
                self.profile.__exit__(None, None, None)

    profiler = Profiler()
    trainer.callback_handler.callbacks.insert(0, profiler)
    trainer.train()
    return Counter(
        event.name for event in profiler.profile.events() if event.name.startswith("c10d::")
    )


def test_a_step_that_is_not_logged_adds_one_exchange_of_flags_to_trainers_own(
    tiny_model, text_file, tmp_path
):
    environment, arguments = fsdp_environment(FSDP2), (tiny_model("llama"), text_file, tmp_path)
    (ours, _), (plain, _) = (
        run_ranks(count_collectives, 2, *arguments, are_ours, environment=environment)
        for are_ours in (True, False)
    )
    assert plain and ours - plain == {"c10d::allreduce_": 6}
