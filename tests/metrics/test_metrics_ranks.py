"""MetricsCallback in real runs on two ranks: its counts, its order among other callbacks, its files."""

import pytest
from transformers import TrainerCallback

from hf_fsdp_recipes.metrics.metrics_file import read_metrics
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build


class Reporter(TrainerCallback):
    """Stands for the callbacks of `report_to`, which Trainer calls before the callbacks that it is given."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def train(model, data, output, settings):
    """Train with the callback; return the logs that reporters get and the sequence lengths of each batch."""
    from hf_fsdp_recipes.metrics.metrics_callback import MetricsCallback, place_before_reporters

    reporter = Reporter()
    callbacks = [reporter, MetricsCallback(throughput_warmup_steps=2)]
    trainer = build(str(model), str(data), str(output), callbacks=callbacks, **settings)
    place_before_reporters(trainer)
    lengths, collate = [], trainer.data_collator

    def recording(examples):
        rows = [example.get("seq_lengths") or [len(example["input_ids"])] for example in examples]
        lengths.append([length for row in rows for length in row if length > 1])
        return collate(examples)

    trainer.data_collator = recording
    trainer.train()
    return reporter.logs, lengths


SETTINGS = {
    "padding": {"per_device_train_batch_size": 3},
    "packing": {"per_device_train_batch_size": 2, "packing": True, "max_length": 80},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 2},
}


@pytest.mark.parametrize(
    "kind", ["packing", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("padding", "accumulation"))]
)
def test_token_counts_exclude_padding(kind, tiny_model, text_file, tmp_path):
    settings = SETTINGS[kind] | {"steps": 4, "include_num_input_tokens_seen": "non_padding"}
    results = run_ranks(
        train, 2, tiny_model("llama"), text_file, tmp_path, settings, environment=fsdp_environment(FSDP2)
    )
    steps = [entry for entry in read_metrics(tmp_path / "metrics.jsonl") if "loss" in entry]
    batches = settings.get("gradient_accumulation_steps", 1) * settings.get("logging_steps", 1)
    for i, entry in enumerate(steps):
        rows = [lengths for _, batched in results for lengths in batched[i * batches : (i + 1) * batches]]
        assert entry["tokens"] == sum(length for lengths in rows for length in lengths)
    if kind == "padding":  # with an attention mask, the upstream counts are right too
        assert sum(entry["tokens"] for entry in steps) == steps[-1]["num_input_tokens_seen"] == steps[-1]["num_tokens"]


@pytest.mark.parametrize(
    ("fsdp", "lora"),
    [
        pytest.param(FSDP2, None, id="fsdp2"),
        pytest.param(FSDP1, None, id="fsdp1", marks=pytest.mark.slow),
        pytest.param(FSDP2, LORA, id="lora", marks=pytest.mark.slow),
    ],
)
def test_metrics_of_every_step_are_written(fsdp, lora, tiny_model, text_file, tmp_path):
    model = tiny_model("llama")
    settings = {"steps": 4, "lora": lora, "eval_strategy": "steps", "eval_steps": 2}
    results = run_ranks(train, 2, model, text_file, tmp_path, settings, environment=fsdp_environment(fsdp))
    entries = read_metrics(tmp_path / "metrics.jsonl")
    (start,) = [entry for entry in entries if "run" in entry]
    adapters = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 52)) if lora else 0
    assert start["matmul_parameters"] == 25952 + adapters
    assert start["num_ranks"] == 2 and start["no_mfu"] == "no float32 peak FLOP/s known for cpu"
    steps = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4]
    assert [entry.get("is_warmup", False) for entry in steps] == [True, True, False, False]
    for entry in steps:
        assert entry["tokens_per_second"] > 0 and len(entry["host_bytes"]) == 2 and min(entry["host_bytes"]) > 10**7
        split = entry["seconds"]
        assert split["forward_backward"] > 0 and split["optimizer"] > 0
        training = sum(split.values()) - split["evaluation"] - split["save"]
        assert entry["step_seconds"] == pytest.approx(training, abs=1e-4)
    assert steps[2]["seconds"]["evaluation"] > 0 and steps[1]["seconds"]["evaluation"] == 0
    assert {path.name for path in tmp_path.iterdir()} >= {"report.md", "loss.png", "throughput.png", "memory.png"}
    for logs, _ in results:  # the logs that wandb and similar reporters get, on every rank
        logged = [line for line in logs if "loss" in line]
        assert [line["tokens_per_second"] for line in logged] == [entry["tokens_per_second"] for entry in steps]
        final = logs[-1]["average_tokens_per_second"]
        assert min(e["tokens_per_second"] for e in steps[2:]) <= final <= max(e["tokens_per_second"] for e in steps[2:])


def test_logging_interval_that_starts_in_the_warm_up_measures_the_steps_after_it(tiny_model, text_file, tmp_path):
    settings = {"steps": 5, "logging_steps": 5}
    results = run_ranks(
        train, 2, tiny_model("llama"), text_file, tmp_path, settings, environment=fsdp_environment(FSDP2)
    )
    (entry,) = [entry for entry in read_metrics(tmp_path / "metrics.jsonl") if "loss" in entry]
    assert entry["num_steps"] == 3 and "is_warmup" not in entry
    assert entry["tokens"] == sum(length for _, batched in results for lengths in batched[2:5] for length in lengths)


def print_model(model, data, output, capture, max_lines):
    import contextlib

    from hf_fsdp_recipes.metrics import metrics_callback

    metrics_callback.MAX_LINES_PRINTED = max_lines
    with open(capture, "a") as stream, contextlib.redirect_stdout(stream):
        build(str(model), str(data), str(output), callbacks=[metrics_callback.MetricsCallback()], steps=1).train()


@pytest.mark.parametrize(
    "is_long", [pytest.param(False, id="short"), pytest.param(True, id="long", marks=pytest.mark.slow)]
)
def test_wrapped_model_is_printed_once_with_repeated_layers_folded(is_long, tiny_model, text_file, tmp_path):
    printed = tmp_path / "printed.txt"
    run_ranks(
        print_model, 2, tiny_model("llama"), text_file, tmp_path / "run", printed, 5 if is_long else 60,
        environment=fsdp_environment(FSDP2),
    )  # fmt: skip
    text = printed.read_text()
    assert text.count("FSDPLlamaForCausalLM") == 1
    shown = (tmp_path / "run" / "model.txt").read_text() if is_long else text
    assert "(0-1): 2 x FSDPLlamaDecoderLayer(" in shown
    assert (tmp_path / "run" / "model.txt").exists() == is_long


def train_with_a_failing_count(model, data, output):
    from hf_fsdp_recipes.metrics import metrics_callback

    def fail(inputs, window):
        raise KeyError("input_ids")

    metrics_callback.count_tokens = fail
    trainer = build(str(model), str(data), str(output), callbacks=[metrics_callback.MetricsCallback()], steps=3)
    trainer.train()
    return trainer.state.global_step


def test_failing_token_count_does_not_stop_the_run(tiny_model, text_file, tmp_path):
    steps = run_ranks(
        train_with_a_failing_count, 2, tiny_model("llama"), text_file, tmp_path, environment=fsdp_environment(FSDP2)
    )
    assert steps == [3, 3]
    entries = [entry for entry in read_metrics(tmp_path / "metrics.jsonl") if "loss" in entry]
    assert len(entries) == 3 and not any("tokens_per_second" in entry for entry in entries)
