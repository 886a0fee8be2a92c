"""The recipe as a user starts it: what a run leaves behind, and how it resumes after a kill."""

import json
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.export.cases import save_image_text_model
from tests.ranks.harness import (
    printed_by,
    read_losses,
    run_ranks,
    start_ranks,
    template_environment,
)
from tests.recipes.launching import CPU, LORA, SETTINGS, run, run_recipe, write_recipe

TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def _names(directory):
    return {path.name for path in directory.iterdir()}


def _kill_after_first_checkpoint(output, processes):
    """SIGKILL all ranks as soon as a checkpoint is complete, whatever they are doing then."""
    deadline = time.monotonic() + 120
    try:
        while not list(output.glob("checkpoint-*/manifest.json")):
            assert all(process.is_alive() for process in processes) and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_killed_lora_run_resumes_exactly_and_leaves_exactly_its_files(
    tiny_model, chat_file, tmp_path
):
    from transformers import AutoModelForCausalLM

    values = {
        "model_name_or_path": tiny_model("llama"),
        "dataset_name": chat_file,
        "merge_adapter": True,
    }
    argv = [*write_recipe(tmp_path / "recipe.yaml", SETTINGS | LORA | values), "--output_dir"]
    environment, whole, killed = template_environment(CPU), tmp_path / "whole", tmp_path / "killed"
    run_ranks(run_recipe, 2, [*argv, whole], environment=environment)

    processes, _results = start_ranks(run_recipe, 2, [*argv, killed], environment=environment)
    _kill_after_first_checkpoint(killed, processes)
    resume = [*argv, killed, "--resume_from_checkpoint", "auto"]
    assert (
        "resuming from" in run_ranks(printed_by, 2, run_recipe, resume, environment=environment)[0]
    )

    assert read_losses(killed) == read_losses(whole) and len(read_losses(whole)) == 4
    for output in (whole, killed):
        [log] = output.glob("fsdp_training_*_2.txt")
        made = {
            "checkpoint-2",
            "checkpoint-4",
            "export",
            "export_merged",
            "metrics.jsonl",
            "report.md",
            "README.md",
            log.name,
        }
        assert {name for name in _names(output) if not name.endswith(".png")} == made
        assert (
            _names(output / "export")
            >= {"adapter_config.json", "adapter_model.safetensors"} | TOKENIZER
        )
        assert _names(output / "export_merged") >= {"config.json", "model.safetensors"} | TOKENIZER
    for name in ("export/adapter_model.safetensors", "export_merged/model.safetensors"):
        one, other = load_file(whole / name), load_file(killed / name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    AutoModelForCausalLM.from_pretrained(whole / "export_merged")


def test_the_export_of_an_image_text_model_has_its_processor(tiny_model, text_file, tmp_path):
    from transformers import AutoProcessor

    save_image_text_model(tmp_path / "model", tiny_model())
    values = {"model_name_or_path": tmp_path / "model", "dataset_name": text_file, "max_steps": 1}
    output = {"output_dir": tmp_path / "run"}
    argv = write_recipe(tmp_path / "recipe.yaml", SETTINGS | values | output)
    run_ranks(run_recipe, 2, argv, environment=template_environment(CPU))
    AutoProcessor.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "stock")
    exported = _names(tmp_path / "run" / "export")
    assert exported >= _names(tmp_path / "stock") >= {"processor_config.json"}


@pytest.mark.slow
def test_a_qlora_run_exports_what_peft_merges_into_the_unquantized_base(
    tiny_model, text_file, tmp_path
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = tiny_model("llama_wide", "bfloat16")
    values = {
        "model_name_or_path": base,
        "dataset_name": text_file,
        "load_in_4bit": True,
        "merge_adapter": True,
    }
    argv = write_recipe(
        tmp_path / "recipe.yaml", SETTINGS | LORA | values | {"output_dir": tmp_path / "run"}
    )
    run_ranks(run_recipe, 2, argv, environment=template_environment(CPU))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export_merged").state_dict()
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    by_peft = (
        PeftModel.from_pretrained(plain, tmp_path / "run" / "export")
        .merge_and_unload()
        .state_dict()
    )
    for name, tensor in by_peft.items():
        # bfloat16 rounding errors.
        torch.testing.assert_close(merged[name], tensor, rtol=2**-7, atol=2**-10)
    # 7 linear layers of 2 blocks.
    assert sum(not torch.equal(before[name], merged[name]) for name in before) == 14


@pytest.mark.slow
def test_a_recipe_runs_with_accelerate_launch_and_a_mistake_is_one_line(
    tiny_model, text_file, tmp_path
):
    values = {
        "model_name_or_path": tiny_model("llama_tied"),
        "dataset_name": text_file,
        "export_dtype": "bfloat16",
    }
    argv = write_recipe(
        tmp_path / "recipe.yaml", SETTINGS | values | {"output_dir": tmp_path / "run"}
    )
    done = run(CPU, argv)
    assert done.returncode == 0, done.stdout
    assert {
        value.dtype
        for value in load_file(tmp_path / "run" / "export" / "model.safetensors").values()
    } == {torch.bfloat16}

    refused = run(CPU, [*argv, "--learning_rat", "1"])
    # The launcher prints a traceback of its own.
    assert refused.returncode != 0 and 'sft.py", line' not in refused.stdout
    # On a busy machine, from both ranks.
    errors = [line for line in refused.stdout.splitlines() if "RecipeError" in line]
    assert set(errors) == {
        "RecipeError: learning_rat is not an argument; did you mean learning_rate?"
    }


@pytest.mark.slow
def test_gradients_are_summed_in_float32_under_bf16(tiny_model, text_file, tmp_path):
    values = {
        "model_name_or_path": tiny_model("llama"),
        "dataset_name": text_file,
        "dtype": "bfloat16",
        "max_steps": 1,
    }
    argv = write_recipe(
        tmp_path / "recipe.yaml", SETTINGS | values | {"output_dir": tmp_path / "run"}
    )
    environment = template_environment(CPU) | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert run_ranks(_precision_of, 2, argv, environment=environment)[0] == (
        "torch.float32",
        "torch.float32",
        "torch.bfloat16",
    )
    weights = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}


def _precision_of(argv):
    """Return the dtypes of gradient sums, weights and computation in a run."""
    from transformers import Trainer

    found = []
    upstream = Trainer.training_step

    def training_step(self, model, *args, **kwargs):
        policy = self.accelerator.state.fsdp_plugin.mixed_precision_policy
        dtypes = {str(parameter.dtype) for parameter in model.parameters()}
        found.append((str(policy.reduce_dtype), *dtypes, str(policy.param_dtype)))
        return upstream(self, model, *args, **kwargs)

    Trainer.training_step = training_step
    run_recipe(argv)
    return found[0]


def _fail_to_export(arguments):
    from hf_fsdp_recipes.saving import callback

    def fail(*arguments, **keywords):
        raise RuntimeError("the disk is on fire")

    callback.export_model = fail
    with pytest.raises(RuntimeError, match=r"^the disk is on fire$"):  # not: training cannot begin
        run_recipe(arguments)


def test_an_error_in_the_export_is_not_called_an_error_of_the_set_up(
    tiny_model, chat_file, tmp_path
):
    values = {
        "model_name_or_path": tiny_model("llama"),
        "dataset_name": chat_file,
        "save_strategy": "no",
    }
    argv = write_recipe(tmp_path / "recipe.yaml", SETTINGS | {"max_steps": 1} | values)
    run_ranks(
        _fail_to_export,
        2,
        [*argv, "--output_dir", tmp_path / "run"],
        environment=template_environment(CPU),
    )


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_recipe_trains_a_model_with_its_own_code(tiny_model, chat_file, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), model)
    (model / "own.py").write_text(OWN_CODE)
    config = json.loads((model / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": classes}
    (model / "config.json").write_text(json.dumps(config))
    output = tmp_path / "run"
    values = {
        "model_name_or_path": model,
        "dataset_name": chat_file,
        "output_dir": output,
        "trust_remote_code": True,
    }
    argv = write_recipe(tmp_path / "recipe.yaml", SETTINGS | values)
    run_ranks(run_recipe, 2, argv, environment=template_environment(CPU))
    assert {"own.py", "model.safetensors"} <= _names(output / "export")


@pytest.mark.parametrize("overrides", [None, "num_hidden_layers=1"])
def test_a_new_model_is_trained_from_its_config(overrides, tiny_model, text_file, tmp_path):
    from transformers import AutoConfig

    name = tiny_model("llama")
    values = {
        "config_name": name,
        "tokenizer_name": name,
        "config_overrides": overrides,
        "dataset_name": text_file,
    }
    argv = [*write_recipe(tmp_path / "recipe.yaml", SETTINGS | values), "--output_dir", tmp_path]
    run_ranks(run_recipe, 2, argv, environment=template_environment(CPU))
    assert len(read_losses(tmp_path)) == 4
    num_layers = AutoConfig.from_pretrained(tmp_path / "export").num_hidden_layers
    assert num_layers == (1 if overrides else AutoConfig.from_pretrained(name).num_hidden_layers)
