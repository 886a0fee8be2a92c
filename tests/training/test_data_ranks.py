"""Data on several ranks is prepared once without timeouts, streamed without overlap, and resumed at the right row."""

import pytest

from hf_fsdp_recipes.training.data.cache import prepare_directory
from tests.conftest import SENTENCES
from tests.ranks.data_runs import train, train_with_slow_tokenizing, write_rows
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks

COMMON = {
    "max_steps": 4, "per_device_train_batch_size": 1, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2,
    "max_length": 64, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    "bf16": False, "dataloader_pin_memory": False, "report": False,
}  # fmt: skip


@pytest.fixture
def argv(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def make(name, **settings):
        defaults = {"model_name_or_path": tiny_model("llama"), "dataset_name": name, "output_dir": tmp_path / "run"}
        return [part for key, value in (defaults | COMMON | settings).items() for part in (f"--{key}", str(value))]

    return make


def ranks_environment(tmp_path):
    return fsdp_environment(FSDP2) | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}


def launch(argv, tmp_path, world_size=2, **keywords):
    return run_ranks(train, world_size, argv, environment=ranks_environment(tmp_path), **keywords)


@pytest.mark.slow
def test_losses_from_prepared_data_equal_those_from_raw_data(argv, text_file, tmp_path, monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    packed = {"packing": True, "eval_strategy": "steps", "eval_steps": 2, "validation_split_percentage": 10}
    raw = launch(argv(text_file, **packed), tmp_path)
    prepare_directory(argv(text_file, **packed), tmp_path / "prepared")
    prepared = launch(argv(tmp_path / "prepared", **packed), tmp_path)
    assert (len(raw[0]["losses"]), len(raw[0]["evaluations"])) == (4, 2)
    assert prepared == raw


@pytest.mark.slow
def test_ranks_wait_for_tokenizing_longer_than_the_collective_timeout(argv, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    rows = [{"text": f"{sentence} in {tmp_path}"} for sentence in SENTENCES]  # not tokenized by an earlier test
    arguments = argv(write_rows(tmp_path / "rows.jsonl", rows), ddp_timeout=6, max_steps=2)
    results = run_ranks(
        train_with_slow_tokenizing,
        2,
        arguments,
        str(notes),
        10 / len(SENTENCES),
        environment=ranks_environment(tmp_path),
    )
    assert len(results[0]["losses"]) == 2
    # Only rank 0 tokenized; the other rank read rank 0's cache.
    assert [path.name for path in notes.iterdir()] == ["rank-0"]
    assert (notes / "rank-0").stat().st_size == len(SENTENCES)


STREAM = {"dataset_streaming": True, "shuffle_buffer_size": 10, "max_steps": 12}


def numbered(count):
    return [{"text": f"row {number} of the stream"} for number in range(count)]


def test_ranks_stream_disjoint_rows(argv, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", numbered(24))
    results = run_ranks(train_recording, 2, argv(file, **STREAM), environment=ranks_environment(tmp_path))
    first, second = ([tuple(row) for batch in result["batches"] for row in batch] for result in results)
    assert len(set(first)) == len(set(second)) == 12
    assert not set(first) & set(second)


def train_recording(argv):
    return train(argv, record="batches")


@pytest.mark.parametrize("packing", [False, True])
def test_rows_of_any_length_are_evaluated_from_a_stream(packing, argv, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    write_rows(folder / "train.jsonl", numbered(24))
    write_rows(folder / "test.jsonl", [{"text": "row" + " again" * number} for number in range(1, 13)])
    settings = STREAM | {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 1,
        "packing": packing,
        "max_length": 32,
    }
    results = launch(argv(folder, **settings, per_device_eval_batch_size=2, report=True), tmp_path)
    assert results[0]["evaluations"] and results[0]["evaluations"] == results[1]["evaluations"]


@pytest.mark.slow
def test_evaluation_on_a_stream_equals_evaluation_on_a_dataset(argv, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    write_rows(folder / "train.jsonl", numbered(24))
    write_rows(folder / "test.jsonl", numbered(9))  # one more than a global batch; no row is counted twice
    at_start = {"eval_strategy": "steps", "eval_on_start": True, "max_steps": 1, "per_device_eval_batch_size": 4}
    streamed = launch(argv(folder, **STREAM | at_start, report=True), tmp_path)
    loaded = launch(argv(folder, **at_start), tmp_path)
    assert streamed[0]["evaluations"][0] == loaded[0]["evaluations"][0]


def test_resumed_stream_continues_at_the_row_where_it_stopped(argv, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", numbered(61))  # passes and blocks end in the middle of the run
    settings = STREAM | {"packing": True, "max_length": 48, "gradient_accumulation_steps": 2, "max_steps": 9}
    uninterrupted = run_ranks(
        train_recording,
        2,
        argv(file, **settings, output_dir=tmp_path / "uninterrupted"),
        environment=ranks_environment(tmp_path),
    )
    part = [*argv(file, **settings), "--save_strategy", "steps", "--save_steps", "5"]
    run_ranks(train_until, 2, part, 5, environment=ranks_environment(tmp_path))
    resumed = run_ranks(
        train_recording, 2, [*part, "--resume_from_checkpoint", "auto"], environment=ranks_environment(tmp_path)
    )
    for rank in range(2):
        assert len(uninterrupted[rank]["batches"]) == 18
        assert resumed[rank]["batches"] == uninterrupted[rank]["batches"][10:]
    assert resumed[0]["losses"] == uninterrupted[0]["losses"]
    assert resumed[0]["epochs"] == uninterrupted[0]["epochs"]


def train_until(argv, stop):
    """Train up to a step and its checkpoint, then stop."""
    from hf_fsdp_recipes.training import build

    upstream = build.build_trainer

    def build_trainer(arguments):
        from transformers import TrainerCallback

        class Stop(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_training_stop = state.global_step >= stop

        trainer = upstream(arguments)
        trainer.add_callback(Stop())
        return trainer

    build.build_trainer = build_trainer
    return train(argv)


def test_row_that_one_rank_cannot_use_is_an_error_on_all_ranks(argv, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    good = [{"input_ids": [5, 6, 7]}] * 40
    write_rows(folder / "a.jsonl", good * 2)
    write_rows(folder / "b.jsonl", [*good, {"input_ids": [5, -7]}])  # rank 1 reads this file, one block ahead
    settings = STREAM | {"max_steps": 60, "gradient_accumulation_steps": 2}
    found = run_ranks(train, 2, argv(folder, **settings), environment=ranks_environment(tmp_path), expect_failure=True)
    assert found[0] == found[1]
    assert found[0][0] == "DataError"
    assert "rows (rank 1's part), row 41: input_ids has -7" in found[0][1]
