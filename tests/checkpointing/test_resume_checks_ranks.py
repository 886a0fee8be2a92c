"""A checkpoint of another model or optimizer is refused on every rank, before any step."""

import contextlib
import functools
import io
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpointing.test_save_ranks import train
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build


@pytest.fixture(scope="module")
def checkpoints(tiny_model, text_file, tmp_path_factory):
    """Return a function that makes (once) a run's output directory with checkpoint-2."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            keywords = {"lora": LORA} if name == "lora" else {}
            fsdp = FSDP1 if name == "fsdp1" else FSDP2
            environment = fsdp_environment(fsdp)
            train(
                tiny_model("llama"), text_file, made[name], environment=environment, steps=2, save_steps=2, **keywords
            )
        return made[name]

    return make


def _resume(model, data, output, keywords):
    """Resume checkpoint-2 with a stock Trainer script; return what rank 0 printed and the steps taken."""
    from hf_fsdp_recipes import ShardedCheckpointCallback

    printed = io.StringIO()
    defaults = {"steps": 3, "save_strategy": "steps", "save_steps": 5}
    with contextlib.redirect_stdout(printed):
        trainer = build(
            str(model), str(data), str(output), callbacks=[ShardedCheckpointCallback()], **(defaults | keywords)
        )
        trainer.train(resume_from_checkpoint=str(output / "checkpoint-2"))
    return printed.getvalue(), trainer.state.global_step


def copy_of(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


REFUSED = {
    "layers": ("full", {"num_hidden_layers": 1}, {}, r"has 13 tensors that this run's model lacks, such as model.layers.1"),
    "more layers": ("full", {"num_hidden_layers": 3}, {}, r"lacks 13 tensors of this run's model, such as model.layers.2"),
    "width": ("full", {"hidden_size": 64}, {}, r"has .* as \(.*32.*\) float32?.*, but in this run it is \(.*64.*\)"),
    "vocabulary": ("full", {"vocab_size": 320}, {}, r"weight as \(307, 32\) float32, but in this run it is \(320, 32\)"),
    "no adapter": ("lora", {}, {}, "holds an adapter, but this run trains all parameters"),
    "adapter": ("full", {}, {"lora": LORA}, "holds all parameters, but this run trains an adapter"),
    "rank": ("lora", {}, {"lora": LORA | {"r": 8}}, r"as \(4, .*, but in this run it is \(8,"),
    "targets": ("lora", {}, {"lora": LORA | {"target_modules": ["q_proj"]}}, "tensors that this run's model lacks"),
    "dtype": ("full", {}, {"dtype": "bfloat16"}, r"float32, but in this run it is \(.*bfloat16"),
    "optimizer": (
        "full", {}, {"optim": "sgd"},
        "was trained with adamw_torch_fused, which keeps exp_avg, exp_avg_sq, step, but this run's SGD keeps nothing",
    ),
    "8-bit": ("full", {}, {"optim": "adamw_8bit"}, "which keeps exp_avg, exp_avg_sq, step, but this run's .* keeps .*state1"),
    "FSDP1": ("fsdp1", {"num_hidden_layers": 1}, {}, "has 13 tensors that this run's model lacks"),
    "FSDP1 optimizer": ("fsdp1", {}, {"optim": "sgd"}, "which keeps exp_avg, exp_avg_sq, step, but this run's SGD keeps"),
}  # fmt: skip
REFUSED_ALWAYS = ("layers", "dtype", "no adapter", "adapter", "optimizer", "8-bit", "FSDP1")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in REFUSED_ALWAYS else pytest.mark.slow) for case in REFUSED]
)
def test_checkpoint_of_another_run_is_refused(checkpoints, changed_model, tiny_model, text_file, tmp_path, case):
    name, config, keywords, expected = REFUSED[case]
    output = copy_of(checkpoints(name), tmp_path)
    model = changed_model(**config) if config else tiny_model("llama")
    environment = fsdp_environment(FSDP1 if name == "fsdp1" else FSDP2)
    errors = run_ranks(
        _resume,
        2,
        model,
        text_file,
        output,
        keywords,
        environment=environment,
        expect_failure=True,
        timeout_seconds=200,
    )
    assert errors[0] == errors[1]
    assert errors[0][0] == "CheckpointError"
    assert re.search(expected, errors[0][1]), errors[0][1]
    assert "checkpoint-2" in errors[0][1] and errors[0][1].endswith(".")
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2"]


def test_what_merely_changes_the_run_is_printed_once(checkpoints, tiny_model, text_file, tmp_path):
    output = copy_of(checkpoints("full"), tmp_path)
    results = run_ranks(
        _resume, 2, tiny_model("llama"), text_file, output, {"seed": 7, "max_length": 32, "logging_steps": 2},
        environment=fsdp_environment(FSDP2), timeout_seconds=200,
    )  # fmt: skip
    line = "resume: changed since checkpoint-2: max_length 64 -> 32, max_steps 2 -> 3, seed 42 -> 7\n"
    assert [line in printed for printed, _ in results] == [True, False]
    assert [step for _, step in results] == [3, 3]


@pytest.mark.parametrize("name", ["full", pytest.param("fsdp1", marks=pytest.mark.slow)])
def test_checkpoint_keeps_its_learning_rate_and_the_run_says_so(name, checkpoints, tiny_model, text_file, tmp_path):
    keywords = {"learning_rate": 1e-3, "weight_decay": 0.5, "steps": 4}
    printed, _ = run_ranks(
        _resume, 2, tiny_model("llama"), text_file, copy_of(checkpoints(name), tmp_path), keywords,
        environment=fsdp_environment(FSDP1 if name == "fsdp1" else FSDP2),
    )[0]  # fmt: skip
    assert (
        "changed since checkpoint-2: learning_rate 0.01 -> 0.001, max_steps 2 -> 4, weight_decay 0.0 -> 0.5\n"
        in printed
    )
    assert "resume: the checkpoint's optimizer and scheduler keep the old learning_rate, weight_decay. " in printed
    assert "'learning_rate': '0.0025'" in printed  # linear decay from 0.01, at step 4 of 4


@pytest.mark.parametrize("case", ["FSDP", pytest.param("one process", marks=pytest.mark.slow)])
def test_other_rows_are_printed_and_another_base_model_is_refused(changed_model, tiny_model, text_file, tmp_path, case):
    from tests.checkpointing.test_without_fsdp_ranks import ENVIRONMENT

    world_size, environment = (2, fsdp_environment(FSDP2)) if case == "FSDP" else (1, ENVIRONMENT)
    keywords = {"lora": LORA} | ({} if case == "FSDP" else {"loader": "stock"})
    output, base = tmp_path / "run", tiny_model("llama")
    run_ranks(_train_two_steps, world_size, base, text_file, output, keywords, environment=environment)
    other = tmp_path / "other" / "rows.jsonl"
    other.parent.mkdir()
    other.write_text("".join(reversed(text_file.read_text().splitlines(keepends=True))))
    copied = shutil.copytree(base, tmp_path / "moved")
    printed, _ = run_ranks(_resume, world_size, copied, other, output, keywords, environment=environment)[0]
    assert re.search(r"changed since checkpoint-2: max_steps 2 -> 3, rows_crc32 \d+ -> \d+\n", printed), printed
    arguments = changed_model(), text_file, output, keywords
    errors = run_ranks(_resume, world_size, *arguments, environment=environment, expect_failure=True)
    assert len(set(errors)) == 1 and errors[0][0] == "CheckpointError"
    assert f"holds an adapter of {base}, whose weights differ from those of this run's {arguments[0]}. " in errors[0][1]


def _train_two_steps(model, data, output, keywords):
    from hf_fsdp_recipes import ShardedCheckpointCallback

    callbacks = [ShardedCheckpointCallback()]
    settings = {"steps": 2, "save_strategy": "steps", "save_steps": 2} | keywords
    build(str(model), str(data), str(output), callbacks=callbacks, **settings).train()


def _train_presharded(model, data, output, settings, checkpoint):
    from transformers import DistributedConfig

    from hf_fsdp_recipes import ShardedCheckpointCallback

    sharded = {"distributed_config": DistributedConfig(fsdp_size=2)}
    callback = ShardedCheckpointCallback(export_dir=output / "export")
    trainer = build(
        str(model), str(data), str(output), loader="stock", load_arguments=sharded, steps=1, callbacks=[callback], **settings
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)


EACH_STEP = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.slow
def test_model_that_transformers_sharded_is_trained_and_exported_but_not_resumed(tiny_model, text_file, tmp_path):
    train = functools.partial(run_ranks, _train_presharded, 2, tiny_model("qwen3_moe"), text_file)
    train(tmp_path, EACH_STEP, None, environment={})
    saved, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("checkpoint-1", "export"))
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in saved)
    checkpoint, template = str(tmp_path / "checkpoint-1"), fsdp_environment(FSDP2)
    for settings, resumed, environment in (({}, checkpoint, {}), (EACH_STEP | BEST, None, {}), ({}, None, template)):
        errors = train(tmp_path / "again", settings, resumed, environment=environment, expect_failure=True)
        assert errors[0] == errors[1] and errors[0][0] == "CheckpointError"
        assert "Load the model with load_model and launch with an fsdp2" in errors[0][1]
    errors = train(
        tmp_path / "again", EACH_STEP | {"save_only_model": False}, None, environment={}, expect_failure=True
    )
    assert errors[0] == errors[1] and "Resuming is not supported for models sharded at load time" in errors[0][1]


def _run_recipe(argv):
    from tests.ranks.data_runs import train as train_recipe

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train_recipe(argv)
    return printed.getvalue()


def test_recipe_names_the_changed_data_and_refuses_another_model(changed_model, tiny_model, text_file, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(text_file.read_text() * 2)
    environment = fsdp_environment(FSDP2) | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}

    def launch(model, data, steps, **keywords):
        settings = {
            "model_name_or_path": model, "dataset_name": data, "max_steps": steps, "output_dir": tmp_path / "run",
            "per_device_train_batch_size": 1, "save_steps": 2, "max_length": 64, "report_to": "none", "use_cpu": True,
            "bf16": False, "dataloader_pin_memory": False, "report": False, "resume_from_checkpoint": "auto",
        }  # fmt: skip
        argv = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        return run_ranks(_run_recipe, 2, argv, environment=environment, timeout_seconds=200, **keywords)

    assert "changed since" not in launch(tiny_model("llama"), text_file, 2)[0]
    data = f"dataset_name {text_file} -> {other}"
    line = rf"changed since checkpoint-2: {data}, max_steps 2 -> 4, num_train_rows 72 -> 144, rows_crc32 \d+ -> \d+\n"
    assert re.search(line, launch(tiny_model("llama"), other, 4)[0])
    assert "changed since checkpoint-4: max_steps 4 -> 5\n" in launch(tiny_model("llama"), other, 5)[0]
    larger = changed_model(num_hidden_layers=3)
    errors = launch(larger, other, 6, expect_failure=True)
    assert errors[0] == errors[1]
    assert "lacks 13 tensors of this run's model, such as model.layers.2" in errors[0][1]
