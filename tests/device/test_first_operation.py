"""Loading and exporting are right also where nothing has used the default process group before."""

import functools
import os

import pytest
import torch
from safetensors.torch import load_file


def train_plainly(model_dir, output, loader, backend=None):
    """Train with Trainer itself, which does not use the default group before it loads the model."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from hf_fsdp_recipes import load_model

    if backend is not None:
        dist.init_process_group(backend)
    arguments = TrainingArguments(
        output,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        per_device_train_batch_size=1,
        report_to="none",
        disable_tqdm=True,
    )
    load = AutoModelForCausalLM.from_pretrained
    if loader != "stock":
        load = functools.partial(load_model, source=loader)
    model = load(model_dir)
    numbers = list(range(16))
    rows = [
        {"input_ids": numbers[start:] + numbers[:start], "labels": numbers} for start in numbers
    ]
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def export_at_once(model_dir, output):
    """Shard a model with torch alone, and export it."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes import export_model

    rank = int(os.environ["RANK"])
    num_ranks = int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    names = ("replicate", "shard")
    mesh = dist.init_device_mesh("npu", (num_ranks // 2, 2), mesh_dim_names=names)
    model = AutoModelForCausalLM.from_pretrained(model_dir).to("npu")
    fully_shard(model, mesh=mesh if num_ranks > 2 else mesh["shard"])
    export_model(model, output)


@pytest.mark.parametrize("num_ranks", [2, 4])  # 4: hybrid sharding
@pytest.mark.parametrize("loader", ["rank0", "direct"])
def test_a_plain_trainer_trains_as_usual(ranks, tiny_model, tmp_path, loader, num_ranks):
    model = str(tiny_model("llama"))
    expected = ranks.run(train_plainly, num_ranks, model, str(tmp_path), "stock")
    assert ranks.run(train_plainly, num_ranks, model, str(tmp_path), loader) == expected


def test_gloo_is_not_asked_to_send_between_devices(ranks, tiny_model, tmp_path):
    refusal = "LoadError: gloo cannot send weights between npu devices"
    with pytest.raises(pytest.fail.Exception, match=refusal):
        ranks.run(train_plainly, 2, str(tiny_model("llama")), str(tmp_path), "rank0", "gloo")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_model_is_exported_at_once(ranks, tiny_model, tmp_path, num_ranks):
    model = tiny_model("llama")
    ranks.run(export_at_once, num_ranks, str(model), str(tmp_path / "export"))
    exported = load_file(tmp_path / "export" / "model.safetensors")
    expected = load_file(model / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in expected.items())
