"""What happens to a run's files when it starts twice, is finished, diverges, or loses its disk."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import build, losses_of


def _run(model, data, output, *, resume=False, events=(), metrics=False, keywords=None, **callback_keywords):
    from hf_fsdp_recipes import MetricsCallback, ShardedCheckpointCallback, latest_checkpoint

    callbacks = [*([MetricsCallback()] if metrics else []), *events, ShardedCheckpointCallback(**callback_keywords)]
    defaults = {"save_strategy": "steps", "save_steps": 2, "steps": 5}
    trainer = build(str(model), str(data), str(output), callbacks=callbacks, **(defaults | (keywords or {})))
    checkpoint = latest_checkpoint(output) if resume else None
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return trainer


def _train(*arguments, **keywords):
    return losses_of(_run(*arguments, **keywords))


def _two_runs(model, data, output):
    """Train, then start a second run in the same directory: once refused, once archiving; return the error."""
    from hf_fsdp_recipes.errors import CheckpointError

    _train(model, data, output, metrics=True)
    before = (output / "metrics.jsonl").read_bytes()
    try:
        _train(model, data, output, metrics=True)
    except CheckpointError as error:
        refused = str(error)
    assert (output / "metrics.jsonl").read_bytes() == before
    keywords = {"steps": 3, "save_steps": 1, "save_total_limit": 1}
    _train(model, data, output, metrics=True, previous_run="archive", keywords=keywords)
    return refused


def test_new_run_in_a_used_directory_is_refused_or_archives_it(tiny_model, text_file, tmp_path):
    errors = run_ranks(_two_runs, 2, tiny_model("llama"), text_file, tmp_path, environment=fsdp_environment(FSDP2))
    assert errors[0] == errors[1]
    assert "holds checkpoint-2 of another run" in errors[0]
    assert {path.name for path in (tmp_path / "previous-1").glob("checkpoint-*")} == {
        "checkpoint-2", "checkpoint-4", "checkpoint-5"
    }  # fmt: skip
    assert (tmp_path / "previous-1" / "metrics.jsonl").exists()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} <= {"checkpoint-2", "checkpoint-3"}
    assert (tmp_path / "checkpoint-3").is_dir()


def _resume_finished(model, data, output):
    export = output / "export"
    whole = _train(model, data, output, metrics=True, export_dir=export)
    torch.distributed.barrier()
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    again = _run(model, data, output, resume=True, metrics=True, export_dir=export)
    torch.distributed.barrier()
    after = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    changed = {path.name for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    weights = (export / "model.safetensors").read_bytes()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(export)
    torch.distributed.barrier()
    _run(model, data, output, resume=True, export_dir=export)
    is_equal = (export / "model.safetensors").read_bytes() == weights
    return changed, losses_of(again) == whole, again.state.global_step, is_equal


def test_finished_run_resumes_to_nothing_but_a_missing_export(tiny_model, text_file, tmp_path):
    results = run_ranks(
        _resume_finished, 2, tiny_model("llama"), text_file, tmp_path, environment=fsdp_environment(FSDP2)
    )
    for changed, has_same_losses, step, is_equal in results:
        assert changed <= {".writer.lease"}
        assert has_same_losses and step == 5 and is_equal


def _stop_early(model, data, output, keep_counter):
    """Stop early at step 4, resume with the same patience, then with more; return each last step and the saved patience."""
    from transformers import EarlyStoppingCallback

    from hf_fsdp_recipes import distributed
    from hf_fsdp_recipes.checkpointing import layout

    keywords = {
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "eval_strategy": "steps", "eval_steps": 2,
        "learning_rate": 0.0, "steps": 40, "restore_callback_states_from_checkpoint": keep_counter,
    }  # fmt: skip

    def run(patience, resume):
        stopper = EarlyStoppingCallback(patience)
        trainer = _run(
            model, data, output, resume=resume, events=[stopper], export_dir=output / "export", keywords=keywords
        )
        return trainer.state.global_step

    first = run(1, resume=False)
    manifest = distributed.run_on_main(lambda: layout.read_manifest(output / f"checkpoint-{first}"))
    return first, manifest["early_stopping_patience"], run(1, resume=True), run(2, resume=True)


@pytest.mark.parametrize("keep_counter", [False, True], ids=["", "with callback states"])
def test_run_that_stopped_early_is_finished(tiny_model, text_file, tmp_path, keep_counter):
    results = run_ranks(
        _stop_early, 2, tiny_model("llama"), text_file, tmp_path, keep_counter, environment=fsdp_environment(FSDP2)
    )
    # A restored callback gets the patience of the checkpoint back.
    assert results == [(4, 1, 4, 4 if keep_counter else 8)] * 2


class Poison(TrainerCallback):
    """Writes NaN into one rank's weights after a step."""

    def __init__(self, at_step):
        self.at_step = at_step

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.at_step - 1 and args.process_index == 1:
            with torch.no_grad():
                shards = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
                next(shard for shard in shards if shard.numel()).view(-1)[-1:] = float("nan")


def _diverge(model, data, output, at_step, keywords):
    from hf_fsdp_recipes.errors import DivergenceError

    try:
        _train(model, data, output, events=[Poison(at_step)], export_dir=output / "export", keywords=keywords)
    except DivergenceError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("fsdp", "at_step", "keywords"),
    [(FSDP2, 3, {"steps": 40}), (FSDP1, 5, {}), (FSDP2, 5, {"save_strategy": "no"})],
    ids=["early", "last step", "without saves"],
)
def test_diverged_weights_are_neither_saved_nor_exported(tiny_model, text_file, tmp_path, fsdp, at_step, keywords):
    errors = run_ranks(
        _diverge, 2, tiny_model("llama"), text_file, tmp_path, at_step, keywords | {"save_total_limit": 1},
        environment=fsdp_environment(fsdp),
    )  # fmt: skip
    assert errors[0] == errors[1]
    assert "the weights contain NaN or infinity at step" in errors[0]
    kept = [path.name for path in tmp_path.glob("checkpoint-*")]
    assert (
        kept
        == {"early": ["checkpoint-2"], "last": ["checkpoint-4"], "no": []}[
            "no" if "save_strategy" in keywords else "early" if at_step == 3 else "last"
        ]
    )
    assert all(f"{name}; a resumed run would keep the old learning rate" in errors[0] for name in kept)
    assert not (tmp_path / "export").exists() and not list(tmp_path.glob(".checkpoint-*"))


class Break(TrainerCallback):
    """Removes the output directory before the last save, and optionally keeps it from being created."""

    def on_step_end(self, args, state, control, **kwargs):
        torch.distributed.barrier()
        if state.global_step == 4 and args.process_index == 0:
            for path in Path(args.output_dir).iterdir():
                if path.name != "export":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            Path(args.output_dir).rmdir()
        torch.distributed.barrier()


def _lose_directory(model, data, output):
    trainer = _run(
        model, data, output, metrics=True, events=[Break()], export_dir=output / "export", keywords={"save_steps": 100}
    )
    return losses_of(trainer)


def test_run_survives_the_removal_of_its_directory(tiny_model, text_file, tmp_path):
    output = tmp_path / "run"
    losses = run_ranks(_lose_directory, 2, tiny_model("llama"), text_file, output, environment=fsdp_environment(FSDP2))
    assert len(losses[0]) == 5
    assert (output / "export" / "model.safetensors").is_file()
    assert (output / "checkpoint-5" / "manifest.json").is_file()


def _fail_last_save(model, data, output, where):
    from hf_fsdp_recipes.checkpointing import layout, small_files
    from hf_fsdp_recipes.errors import SaveError

    commit, collect = layout.commit, small_files.collect

    def fail(incomplete, final, *rest):
        if final.name == "checkpoint-5":
            raise OSError(28, "No space left on device")
        return commit(incomplete, final, *rest)

    def fail_on_main(args, state, *rest):
        if state.global_step == 5 and torch.distributed.get_rank() == 0:
            raise TypeError("Object of type set is not JSON serializable")
        return collect(args, state, *rest)

    if where == "commit":
        layout.commit = fail
    else:
        small_files.collect = fail_on_main
    try:
        _train(model, data, output, export_dir=output / "export")
    except SaveError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("where", "message"),
    [("commit", "the checkpoint of step 5 was not written"), ("collect", "rank 0: TypeError: Object of")],
)
def test_failed_last_save_still_exports_then_fails(tiny_model, text_file, tmp_path, where, message):
    errors = run_ranks(
        _fail_last_save, 2, tiny_model("llama"), text_file, tmp_path, where, environment=fsdp_environment(FSDP2)
    )
    assert errors[0] == errors[1] and message in errors[0]
    assert (tmp_path / "export" / "model.safetensors").is_file()
    assert not list(tmp_path.glob(".checkpoint-*"))  # deleted immediately


def _fill_disk_for_metrics(model, data, output, log):
    from hf_fsdp_recipes.metrics import metrics_file

    def fail(path, entry):
        raise OSError(28, "No space left on device")

    metrics_file.append = fail
    logging.getLogger("hf_fsdp_recipes").addHandler(logging.FileHandler(log))
    return _train(model, data, output, metrics=True)


def test_metrics_that_cannot_be_written_are_one_warning(tiny_model, text_file, tmp_path):
    losses = run_ranks(
        _fill_disk_for_metrics, 2, tiny_model("llama"), text_file, tmp_path / "run", tmp_path / "log",
        environment=fsdp_environment(FSDP2),
    )  # fmt: skip
    assert len(losses[0]) == 5
    assert (tmp_path / "log").read_text().count("metrics are incomplete") == 1


def _use_trainer_otherwise(model, data, output):
    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.errors import RecipeError

    found = []

    def make(name):
        callbacks = [ShardedCheckpointCallback()]
        return build(str(model), str(data), str(name), callbacks=callbacks, eval_strategy="epoch")

    trainer = make(output / "evaluated")
    try:
        trainer.evaluate()
        trainer.train()  # only FSDP1 gets here
    except RecipeError as error:
        found.append(str(error))
    trainer = make(output)
    trainer.train()
    trainer.evaluate()
    trainer.save_model(str(output / "mine"))
    trainer.save_model()
    try:
        callbacks = [ShardedCheckpointCallback(), ShardedCheckpointCallback()]
        build(str(model), str(data), str(output / "other"), callbacks=callbacks)
    except RecipeError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("fsdp", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)], ids=["FSDP2", "FSDP1"])
def test_save_model_exports_and_wrong_orders_are_named(tiny_model, text_file, tmp_path, fsdp):
    from transformers import AutoModelForCausalLM

    results = run_ranks(
        _use_trainer_otherwise, 2, tiny_model("llama"), text_file, tmp_path, environment=fsdp_environment(fsdp)
    )
    assert results[0] == results[1]
    evaluated, doubled = results[0]
    order = "train() was called after evaluate()" if fsdp is FSDP1 else "evaluate() was called before train()"
    assert order in evaluated
    assert "two ShardedCheckpointCallbacks" in doubled
    for name in ("mine", "export"):
        AutoModelForCausalLM.from_pretrained(tmp_path / name)
