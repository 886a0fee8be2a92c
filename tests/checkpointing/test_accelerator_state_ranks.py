"""`save_checkpoint`, for loops without a Trainer: checkpoints are complete or absent, under every kind of sharding."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, printed_by, run_ranks
from tests.recipes.launching import run_recipe


def prepare(model):
    from accelerate import Accelerator

    from hf_fsdp_recipes import load_model

    loaded = load_model(str(model), dtype="float32")
    accelerator = Accelerator()
    prepared, optimizer = accelerator.prepare(loaded, torch.optim.AdamW(loaded.parameters(), lr=1e-2))
    return accelerator, prepared, optimizer


def save_and_fail(model, output_dir):
    """Save step 1, fail to save step 2 on rank 1 after the weights are written, save steps 3 and 4, and damage step 4."""
    from hf_fsdp_recipes import distributed, latest_checkpoint, save_checkpoint

    accelerator, _, _ = prepare(model)
    save_checkpoint(accelerator, output_dir, 1)
    save_state = accelerator.save_state

    def fail(directory):
        save_state(directory)
        if distributed.rank() == 1:
            raise OSError(28, "No space left on device", "random_states_1.pkl")

    accelerator.save_state = fail
    found = []
    try:
        save_checkpoint(accelerator, output_dir, 2)
    except Exception as error:
        found = [type(error).__name__, str(error)]
    accelerator.save_state = save_state
    distributed.barrier()
    found.append(sorted(path.name for path in output_dir.iterdir()))
    distributed.barrier()
    found.append(latest_checkpoint(output_dir).name)
    save_checkpoint(accelerator, output_dir, 3, keep=2)
    save_checkpoint(accelerator, output_dir, 4, keep=2)
    names = sorted(path.name for path in output_dir.iterdir())
    distributed.barrier()
    if distributed.is_main():
        file = output_dir / "checkpoint-4" / "optimizer_0" / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    distributed.barrier()
    return found, names, latest_checkpoint(output_dir).name


def test_interrupted_and_damaged_saves_are_not_resumed_from_and_old_checkpoints_are_deleted(tiny_model, tmp_path):
    output = tmp_path / "run"
    results = run_ranks(save_and_fail, 2, tiny_model("llama"), output, environment=fsdp_environment(FSDP2))
    for found, names, latest in results:
        assert "random_states_1.pkl: No space left" in found[1]
        assert found[2:] == [["checkpoint-1"], "checkpoint-1"]
        assert names == ["checkpoint-3", "checkpoint-4"]
        assert latest == "checkpoint-3"
    manifest = json.loads((output / "checkpoint-4" / "manifest.json").read_text())
    assert manifest["step"] == 4
    assert {"random_states_0.pkl", "random_states_1.pkl", "optimizer_0/.metadata"} <= manifest["files"].keys()


def fill_the_disk_of_rank_0(model, output_dir):
    """Save step 1, then fail to save the model's file of step 2."""
    from hf_fsdp_recipes import distributed, save_checkpoint
    from hf_fsdp_recipes.errors import RecipeError

    accelerator, _, _ = prepare(model)
    save_checkpoint(accelerator, output_dir, 1)
    save = torch.save

    def fail(value, file, *arguments, **keywords):
        if "pytorch_model_fsdp" in str(file):
            raise OSError(28, "No space left on device", str(file))
        save(value, file, *arguments, **keywords)

    torch.save = fail
    try:
        save_checkpoint(accelerator, output_dir, 2)
    except RecipeError as error:
        distributed.barrier()
        return str(error), torch.save is fail, sorted(path.name for path in output_dir.iterdir())
    return None


def test_full_disk_of_one_rank_does_not_hang_a_full_state_dict(tiny_model, tmp_path):
    environment = fsdp_environment(FSDP2 | {"fsdp_state_dict_type": "FULL_STATE_DICT"})
    results = run_ranks(fill_the_disk_of_rank_0, 2, tiny_model("llama"), tmp_path, environment=environment)
    assert results[0] == results[1]
    message, is_restored, names = results[0]
    assert "pytorch_model_fsdp.bin: No space left on device" in message
    assert is_restored and names == ["checkpoint-1"]


def name_automatically(output_dir):
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from hf_fsdp_recipes import save_checkpoint

    project = ProjectConfiguration(str(output_dir), automatic_checkpoint_naming=True)
    save_checkpoint(Accelerator(cpu=True, project_config=project), output_dir, 1)


def test_automatic_names_are_refused(tmp_path):
    [(kind, message)] = run_ranks(name_automatically, 1, tmp_path, expect_failure=True)
    assert kind == "CheckpointError" and "automatic_checkpoint_naming is set" in message


def prepare_in_order(model, output_dir, is_model_first):
    """Train a step under FSDP1 and save it; export before and after a resume."""
    from accelerate import Accelerator

    from hf_fsdp_recipes import export_model, latest_checkpoint, load_model, save_checkpoint

    loaded = load_model(str(model), dtype="float32")
    accelerator = Accelerator()
    if is_model_first:
        loaded = accelerator.prepare(loaded)
        optimizer = accelerator.prepare(torch.optim.AdamW(loaded.parameters(), lr=1e-2))
    else:
        loaded, optimizer = accelerator.prepare(loaded, torch.optim.AdamW(loaded.parameters(), lr=1e-2))
    tokens = torch.arange(16)[None]
    accelerator.backward(loaded(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    save_checkpoint(accelerator, output_dir, 1)
    export_model(loaded, output_dir / "export")
    optimizer.step()
    accelerator.load_state(latest_checkpoint(output_dir))
    export_model(loaded, output_dir / "resumed")


def test_fsdp1_saves_and_refuses_an_optimizer_that_would_train_nothing(tiny_model, tmp_path):
    model, variables = tiny_model("llama"), fsdp_environment(FSDP1)
    run_ranks(prepare_in_order, 2, model, tmp_path, True, environment=variables)
    before, after, resumed = (
        load_file(path / "model.safetensors") for path in (model, tmp_path / "export", tmp_path / "resumed")
    )
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(resumed[name], after[name]) for name in before)
    run = {"environment": variables, "expect_failure": True}
    for kind, message in run_ranks(prepare_in_order, 2, model, tmp_path / "late", False, **run):
        assert kind == "LoadError" and "before FSDP1 sharded the model" in message


SHARDINGS = {
    "offload": (2, FSDP2 | {"fsdp_offload_params": True}, None, "no"),
    "full state dict": (2, FSDP2 | {"fsdp_state_dict_type": "FULL_STATE_DICT"}, None, "no"),
    "bf16": (2, FSDP2, None, "bf16"),
    "hybrid": (4, FSDP2, {"dp_replicate_size": 2, "dp_shard_size": 2}, "no"),
    "data parallel": (2, None, None, "no"),
    "one process": (1, None, None, "no"),
}


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_loop_resumes_exactly_under_every_sharding(sharding, tiny_model, text_file, tmp_path):
    world_size, fsdp, parallel, precision = SHARDINGS[sharding]
    variables = {} if fsdp is None else fsdp_environment(fsdp, parallel, precision)
    variables |= {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "ACCELERATE_USE_CPU": "true"}
    options = ["--model", tiny_model("llama"), "--data", text_file, "--max_steps", 4, "--save_steps", 2]
    printed = []
    for name in ("run", "resumed"):
        arguments = [*options, "--output_dir", tmp_path / name]
        printed += run_ranks(
            printed_by, world_size, run_recipe, arguments, "examples/own_loop.py", environment=variables
        )[:1]
        if name == "run":
            shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    assert printed[0].splitlines()[-2:] == printed[1].splitlines()[-2:]
    first, second = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("run", "resumed"))
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def train_adapter(model, output_dir, quantization):
    """Train an adapter in a loop for 4 steps, or continue after the newest checkpoint; return the losses by step."""
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    from hf_fsdp_recipes import distributed, export_model, latest_checkpoint, load_model, save_checkpoint
    from tests.ranks.training import LORA, quantized

    loaded = get_peft_model(load_model(str(model), dtype="float32", **quantized(quantization)), LoraConfig(**LORA))
    accelerator = Accelerator()
    trained = [parameter for parameter in loaded.parameters() if parameter.requires_grad]
    adapted, optimizer = accelerator.prepare(loaded, torch.optim.AdamW(trained, lr=1e-2))
    checkpoint = latest_checkpoint(output_dir)
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
    losses = {}
    for step in range(int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0, 4):
        tokens = torch.arange(3 + step, 19 + step).view(1, -1) + 20 * distributed.rank()
        loss = adapted(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        if step == 1:
            save_checkpoint(accelerator, output_dir, 2)
    export_model(adapted, output_dir / "export")
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, {"bnb_4bit_quant_type": "nf4"}], ids=["lora", "qlora"])
def test_adapter_in_a_loop_resumes_and_exports(quantization, tiny_model, tmp_path):
    model, environment = tiny_model("llama_wide"), fsdp_environment(FSDP2)
    whole = run_ranks(train_adapter, 2, model, tmp_path / "run", quantization, environment=environment)
    shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed = run_ranks(train_adapter, 2, model, tmp_path / "resumed", quantization, environment=environment)
    assert resumed == [{step: loss for step, loss in losses.items() if step >= 2} for losses in whole]
    first, second = (load_file(tmp_path / run / "export" / "adapter_model.safetensors") for run in ("run", "resumed"))
    assert first.keys() == second.keys()
    assert all(tensor.equal(second[name]) for name, tensor in first.items())
