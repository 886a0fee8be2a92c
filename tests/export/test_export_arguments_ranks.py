"""Exports from ranks that disagree, fail alone or do not use FSDP, and the comparison of logits in each precision."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import build
from tests.recipes.launching import run_recipe

NO_FSDP = {"ACCELERATE_USE_FSDP": "false"}
DIFFERENT = [
    ("output_dir", "a", "b"),
    ("dtype", None, "bfloat16"),
    ("max_shard_size", "5GB", "20KB"),
    ("method", "direct", "gather"),
    ("merge_adapter", False, True),
    ("use_free_name", False, True),
]


def _plain_model(model):
    from transformers import AutoModelForCausalLM

    torch.distributed.init_process_group("gloo")
    return AutoModelForCausalLM.from_pretrained(model)


def _export_differently(model, output):
    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.errors import ExportError

    plain, messages = _plain_model(model), []
    own = torch.distributed.get_rank()
    cases = [{name: values[own]} for name, *values in DIFFERENT]
    for case in [*cases, {"method": "foo"}, {"max_shard_size": -1}, {"dtype": "int8"}]:
        with pytest.raises(ExportError) as error:
            export_model(plain, **({"output_dir": str(output / "a")} | case))
        messages.append(str(error.value))
    return messages


def test_arguments_that_differ_or_are_unknown_are_one_error_on_every_rank(tiny_model, tmp_path):
    first, second = run_ranks(_export_differently, 2, tiny_model("llama"), tmp_path)
    assert first == second
    for (name, *values), message in zip(DIFFERENT, first, strict=False):
        assert (
            message.startswith(f"{name} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1") or name == "output_dir"
        )
    assert "output_dir is 'a' on rank 0 and 'b' on rank 1" in first[0]
    assert first[-3:-1] == [
        "method is 'foo'. Use auto, direct, gather.",
        "max_shard_size is -1. Use a number of bytes, or a size in KB, MB, GB or TB such as 5GB.",
    ]
    assert "dtype is 'int8'" in first[-1]
    assert list(tmp_path.iterdir()) == []


def _fail_while_gathering(model, output, failing_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.errors import ExportError
    from hf_fsdp_recipes.export import write_export

    sharded, chunks = _plain_model(model), write_export._chunks
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))

    def fail(shard, non_finite, download):
        if torch.distributed.get_rank() == failing_rank and "layers.1" in shard.name:
            raise ExportError("the shard cannot be read")
        yield from chunks(shard, non_finite, download)

    write_export._chunks = fail
    export_model(sharded, output / "export", method="gather")


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_rank_that_fails_while_gathering_fails_all(tiny_model, tmp_path, failing_rank):
    errors = run_ranks(_fail_while_gathering, 2, tiny_model("llama"), tmp_path, failing_rank, expect_failure=True)
    assert errors == [("ExportError", "the shard cannot be read")] * 2
    assert list(tmp_path.iterdir()) == []


def _train_with_callback(model, data, output):
    from hf_fsdp_recipes import ShardedCheckpointCallback

    if os.environ["WORLD_SIZE"] == "1":  # like a script that was started without a launcher
        del os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]
    callback = ShardedCheckpointCallback(export_dir=output / "export")
    trainer = build(str(model), str(data), str(output), loader="stock", steps=2, callbacks=[callback])
    trainer.train()
    if trainer.accelerator.is_main_process:
        torch.save(trainer.model.state_dict(), output / "state.pt")
    return str(trainer.accelerator.distributed_type.value)


@pytest.mark.parametrize(("world_size", "kind"), [(1, "NO"), (2, "MULTI_CPU")])
def test_callback_exports_without_fsdp(tiny_model, text_file, tmp_path, world_size, kind):
    kinds = run_ranks(_train_with_callback, world_size, tiny_model("llama"), text_file, tmp_path, environment=NO_FSDP)
    assert kinds == [kind] * world_size
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[name], state[name]) for name in state)
    assert (tmp_path / "export" / "tokenizer.json").is_file()


def test_foreign_export_dir_is_known_before_training(tiny_model, text_file, tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    errors = run_ranks(
        _train_with_callback, 2, tiny_model("llama"), text_file, tmp_path, environment=NO_FSDP, expect_failure=True
    )
    assert errors[0] == errors[1]
    assert errors[0][0] == "ExportError" and "is not an export" in errors[0][1]
    assert not (tmp_path / "state.pt").exists()


class AddNotes(TrainerCallback):
    """Puts a file into the export's directory during training."""

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 0:
            (Path(args.output_dir) / "export").mkdir(exist_ok=True)
            (Path(args.output_dir) / "export" / "notes.txt").write_text("precious")


def _recipe_with_notes(argv):
    from hf_fsdp_recipes.training import build as recipe

    train = recipe.train
    recipe.train = lambda trainer, checkpoint: trainer.add_callback(AddNotes()) or train(trainer, checkpoint)
    run_recipe(argv)


def test_weights_are_exported_even_if_a_file_was_put_into_their_place(tiny_model, text_file, tmp_path):
    argv = ["--model_name_or_path", tiny_model("llama"), "--dataset_name", text_file, "--output_dir", tmp_path / "run"]
    argv += ["--max_steps", "2", "--gradient_checkpointing", "false", "--report", "false", "--report_to", "none"]
    run_ranks(_recipe_with_notes, 2, argv, environment=fsdp_environment(FSDP2))
    assert {path.name for path in (tmp_path / "run" / "export").iterdir()} == {"notes.txt"}
    assert load_file(tmp_path / "run" / "export-1" / "model.safetensors")


@pytest.mark.parametrize("name", ["run/export", "elsewhere"])
def test_export_of_an_earlier_step_does_not_count_as_the_finished_runs(tmp_path, name):
    from safetensors.torch import save_file
    from transformers import TrainingArguments

    from hf_fsdp_recipes.checkpointing import layout
    from hf_fsdp_recipes.checkpointing.mirror import Mirror
    from hf_fsdp_recipes.export.export_directory import write_marker
    from hf_fsdp_recipes.export.run_exports import RunExports
    from hf_fsdp_recipes.loading.export_marker import MARKER

    export, exports = tmp_path / name, RunExports(tmp_path / name, None, Mirror(None))
    exports.start(TrainingArguments(str(tmp_path / "run"), use_cpu=True, report_to="none"))
    exports.is_finished = True
    assert not exports.has_exported(export)
    export.mkdir(parents=True)
    save_file({"weight": torch.zeros(1)}, export / "model.safetensors")
    write_marker(export, [])
    for step, seconds in ((100, 1), (200, 3)):
        checkpoint = tmp_path / "run" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        layout.complete_in_place(checkpoint, {"step": step})
        os.utime(checkpoint / layout.MANIFEST, (seconds, seconds))
        os.utime(export / MARKER, (2, 2))
        assert exports.has_exported(export) == (step == 100)
    os.utime(export / MARKER, (4, 4))
    assert exports.has_exported(export)


def _train_and_compare(model, data, output, precision):
    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.export.verify_logits import check_logits

    trainer = build(str(model), str(data), str(output), steps=3, **precision)
    trainer.train()
    export = export_model(trainer.model, output / "export", tokenizer=trainer.processing_class)
    return check_logits(trainer.model, export, trainer.processing_class)


@pytest.mark.parametrize("precision", [{"bf16": True}, {"fp16": True}])
def test_logits_are_compared_in_the_precision_of_the_run_not_of_the_launcher(
    tiny_model, text_file, tmp_path, precision
):
    differences = run_ranks(
        _train_and_compare, 2, tiny_model("llama"), text_file, tmp_path, precision, environment=fsdp_environment(FSDP2)
    )
    assert all(difference > 1e-4 for difference in differences)  # in a float32 run, the differences are 1e-6
