"""Speed and memory features change the losses by no more than the bounds below."""

import json
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

from hf_fsdp_recipes.metrics.metrics_file import read_metrics
from tests.conftest import SENTENCES
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build, losses_of, train_losses
from tests.recipes.launching import ROOT

# Relative to the loss; also stated in docs/speed.md.
BOUNDS = {
    "optimizer": 1e-5,
    "recomputed": 1e-6,
    "unpadded": 1e-4,
    "packed": 1e-4,
    "fused head": 1e-5,
    "compiled": 1e-4,
    "8 bit": 1e-3,
    "paged": 1e-5,
    "kernels": 1e-6,
}
# `make test-all` installs Liger's kernels and Triton here, so that no other test imports them.
KERNELS = Path(sys.prefix) / "kernels"


@pytest.fixture(scope="module")
def eight_rows(tmp_path_factory):
    """Return a file of eight rows: one step of two ranks with four rows each, or four packed into one."""
    file = tmp_path_factory.mktemp("rows") / "eight.jsonl"
    file.write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES[:8]))
    return file


def losses(model, data, tmp_path, name, fsdp=FSDP2, **settings):
    settings = {"steps": 4, "lr_scheduler_type": "constant"} | settings
    environment = fsdp_environment(fsdp)
    return run_ranks(train_keywords, 2, model, data, tmp_path / name, settings, environment=environment)[0]


def train_keywords(model, data, output, settings):
    return train_losses(str(model), str(data), str(output), **settings)


@pytest.mark.parametrize("fsdp", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)], ids=["fsdp2", "fsdp1"])
def test_fused_adamw_and_recomputation_keep_the_losses(fsdp, tiny_model, text_file, tmp_path):
    model = tiny_model("llama")
    plain = losses(model, text_file, tmp_path, "plain", fsdp, optim="adamw_torch")
    fused = losses(model, text_file, tmp_path, "fused", fsdp, optim="adamw_torch_fused")
    assert fused == pytest.approx(plain, rel=BOUNDS["optimizer"])
    again = losses(model, text_file, tmp_path, "recomputed", fsdp, optim="adamw_torch", gradient_checkpointing=True)
    assert again == pytest.approx(plain, rel=BOUNDS["recomputed"])
    assert plain[-1] < plain[0] - 0.3  # the steps changed the model


def test_padding_free_and_packed_rows_keep_the_losses(tiny_model, eight_rows, tmp_path):
    model = tiny_model("llama")
    rows = {"per_device_train_batch_size": 4, "max_length": None}
    padded = losses(model, eight_rows, tmp_path, "padded", **rows)
    unpadded = losses(model, eight_rows, tmp_path, "unpadded", **rows, padding_free=True)
    assert unpadded == pytest.approx(padded, rel=BOUNDS["unpadded"])
    packed = losses(model, eight_rows, tmp_path, "packed", per_device_train_batch_size=1, max_length=128, packing=True)
    assert packed == pytest.approx(padded, rel=BOUNDS["packed"])


def test_8bit_adamw_without_fsdp_keeps_the_losses(tiny_model, text_file, tmp_path):
    def alone(optimizer):
        settings = {"steps": 4, "lr_scheduler_type": "constant", "optim": optimizer}
        return run_ranks(train_keywords, 1, tiny_model("llama"), text_file, tmp_path / optimizer, settings)[0]

    plain, quantized = alone("adamw_torch"), alone("adamw_8bit")
    assert quantized == pytest.approx(plain, rel=BOUNDS["8 bit"])
    assert quantized != plain


@pytest.mark.slow
def test_bitsandbytes_optimizers_keep_the_losses_under_fsdp2(tiny_model, text_file, tmp_path):
    model = tiny_model("llama")
    plain = losses(model, text_file, tmp_path, "plain", optim="adamw_torch")
    paged = losses(model, text_file, tmp_path, "paged", optim="paged_adamw_32bit")
    assert paged == pytest.approx(plain, rel=BOUNDS["paged"])
    quantized = losses(model, text_file, tmp_path, "8bit", optim="adamw_8bit")
    assert quantized == pytest.approx(plain, rel=BOUNDS["8 bit"])
    assert quantized != paged


def train_adapters_in_mixed_precision(model, data, output):
    from hf_fsdp_recipes.training import dtypes

    settings = {"dtype": "bfloat16", "bf16": True, "lora": LORA | {"lora_dropout": 0.1}, "steps": 2}
    trainer = build(str(model), str(data), str(output), gradient_checkpointing=True, **settings)
    dtypes.cast_trainable(trainer.model, 1)
    trainer.train()
    return losses_of(trainer)


def test_adapters_under_fsdp1_are_recomputed_in_the_dtype_of_their_first_forward(tiny_model, text_file, tmp_path):
    environment = fsdp_environment(FSDP1) | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    found = run_ranks(
        train_adapters_in_mixed_precision, 2, tiny_model("llama"), text_file, tmp_path, environment=environment
    )
    assert len(found[0]) == 2


def difference_to_unsharded(name, num_rows):
    """Step an optimizer on full and on sharded tensors with the same gradients; return the largest difference."""
    import torch
    import torch.distributed as dist
    from accelerate import PartialState
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor
    from transformers import Trainer, TrainingArguments

    from hf_fsdp_recipes.training.sharded_optimizer import sharded_optimizer

    PartialState(cpu=True)

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(256, num_rows), torch.nn.Linear(num_rows, 2))

    args = TrainingArguments(output_dir="unused", optim=name, learning_rate=1e-2, weight_decay=0.1, use_cpu=True)
    full, sharded_model = model(), fully_shard(model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    unsharded = optimizer_class(full.parameters(), **settings)
    optimizer_class, settings = sharded_optimizer(args)
    sharded = optimizer_class(sharded_model.parameters(), **settings)
    pairs = list(zip(full.parameters(), sharded_model.parameters(), strict=True))
    for _ in range(3):
        unsharded.zero_grad()
        full(torch.randn(8, 256)).pow(2).mean().backward()
        for mine, theirs in pairs:
            theirs.grad = distribute_tensor(mine.grad, theirs.device_mesh, theirs.placements)
        unsharded.step()
        sharded.step()
    return max((mine - theirs.full_tensor()).abs().max().item() for mine, theirs in pairs)


@pytest.mark.parametrize(
    "name",
    [
        "paged_adamw_32bit",
        "adamw_8bit",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("lion_8bit", "rmsprop_bnb")),
    ],
)
def test_sharded_step_equals_the_unsharded_one(name):
    # 3 ranks get uneven parts of 65 rows; of the last layer's 2 rows, one rank has none. A row of layer 1 is a block of 256.
    assert run_ranks(difference_to_unsharded, 3, name, 65) == [0.0, 0.0, 0.0]


def step_with_pages(num_rows):
    """Step and reload a paged optimizer with imitated pages; return which states are paged, and the number of prefetches."""
    import torch
    import torch.distributed as dist
    from accelerate import PartialState
    from bitsandbytes import functional
    from bitsandbytes.optim.optimizer import Optimizer8bit
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import TrainingArguments

    from hf_fsdp_recipes.training.sharded_optimizer import sharded_optimizer

    def page(self, p, dtype=torch.float32):
        buffer = torch.zeros_like(p, dtype=dtype)
        buffer.is_paged, buffer.page_deviceid = True, 0
        return buffer

    prefetched = []
    Optimizer8bit.get_state_buffer = page
    functional.prefetch_tensor = lambda tensor, to_cpu=False: prefetched.append(tensor.page_deviceid)
    PartialState(cpu=True)
    model = fully_shard(torch.nn.Linear(8, num_rows), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer_class, settings = sharded_optimizer(TrainingArguments("unused", optim="paged_adamw_32bit", use_cpu=True))
    optimizer = optimizer_class(model.parameters(), **settings)

    def step():
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        states = [optimizer.state[p][name] for p in model.parameters() for name in ("state1", "state2")]
        with torch.no_grad():  # as in an optimizer step; otherwise `to_local` returns a view
            return [state.is_paged and state.to_local().is_paged for state in states]

    before = step()
    optimizer.load_state_dict(optimizer.state_dict())
    return before, step(), len(prefetched), bool(optimizer.state[model.weight]["state1"].full_tensor().any())


@pytest.mark.parametrize(
    "num_rows", [pytest.param(4, marks=pytest.mark.slow), 5]
)  # 5 rows over 2 ranks: the second rank uses part of its pages
def test_paged_states_stay_paged_in_shards_and_after_a_resume(num_rows):
    for before, after, num_prefetched, has_values in run_ranks(step_with_pages, 2, num_rows):
        assert before == after == [True] * 4
        assert (num_prefetched, has_values) == (8, True)


def train_on_all_logits(model, data, output):
    """Train with a loss over all logits at once, which TRL's fused head never holds together."""
    import torch

    def cross_entropy(outputs, labels, num_items_in_batch=None):
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return (
            torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / num_items_in_batch
        )

    trainer = build(str(model), str(data), str(output), steps=4, lr_scheduler_type="constant")
    trainer.compute_loss_func = cross_entropy
    trainer.train()
    return losses_of(trainer)


@pytest.mark.slow
def test_fused_head_keeps_the_losses_of_all_logits(tiny_model, text_file, tmp_path):
    model = tiny_model("llama")
    all_logits = run_ranks(
        train_on_all_logits, 2, model, text_file, tmp_path / "all", environment=fsdp_environment(FSDP2)
    )
    fused = losses(model, text_file, tmp_path, "fused")
    assert all_logits[0] == pytest.approx(fused, rel=BOUNDS["fused head"])


def train_with_offloaded_activations(model, data, output, settings):
    """Train with TRL's activation offloading on CPU ranks; return the losses and the number of offloaded tensors."""
    import torch
    from trl.models.activation_offloading import OffloadActivations

    init, offloaded = OffloadActivations.__init__, []

    def init_for_cpus(self, **options):
        with mock.patch("torch.accelerator.current_accelerator", lambda *_, **__: torch.device("cpu")):
            init(self, **options | {"use_pin_memory": False, "use_streams": False})
        pack = self.pack_hook

        def pack_and_record(activation):
            number = pack(activation)
            offloaded.append(self.tracker[number][1])
            return number

        torch.autograd.graph.saved_tensors_hooks.__init__(self, pack_and_record, self.unpack_hook)

    OffloadActivations.__init__ = init_for_cpus
    torch.cpu.empty_cache = lambda: None
    return train_keywords(model, data, output, settings), sum(offloaded)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [FSDP2, FSDP1], ids=["fsdp2", "fsdp1"])
def test_offloaded_activations_keep_the_losses(fsdp, tiny_model, text_file, tmp_path):
    model = tiny_model("llama")
    plain = losses(model, text_file, tmp_path, "plain", fsdp)
    settings = {"steps": 4, "lr_scheduler_type": "constant", "activation_offloading": True}
    arguments = (model, text_file, tmp_path / "offloaded", settings)
    for found, num_offloaded in run_ranks(
        train_with_offloaded_activations, 2, *arguments, environment=fsdp_environment(fsdp)
    ):
        assert found == plain
        assert num_offloaded > 4 * 20  # a layer saves more than ten


def train_with_interpreted_kernels(model, data, output, settings):
    """Train with Liger's kernels in Triton's interpreter; return the losses and the names of the kernels that ran."""
    sys.path.insert(0, str(KERNELS))
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    convert, run, used = interpreter._implicit_cvt, interpreter.GridExecutor.__call__, set()

    def convert_floats_too(value):  # the interpreter of Triton 3.9 passes Python floats to kernels
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(numpy.array([value], dtype=numpy.float32), tl.float32), tl.float32)

    def run_and_record(self, *arguments, **keywords):
        used.add(self.fn.__name__)
        return run(self, *arguments, **keywords)

    interpreter._implicit_cvt = convert_floats_too
    interpreter.GridExecutor.__call__ = run_and_record
    rms_norm.rsqrt = lambda value: tl.rsqrt(value)  # Liger's own function calls CUDA
    return train_keywords(model, data, output, settings), used


@pytest.mark.slow  # because it installs a gigabyte of Triton
@pytest.mark.parametrize("fsdp", [FSDP2, FSDP1], ids=["fsdp2", "fsdp1"])
def test_liger_kernels_keep_the_losses(fsdp, tiny_model, text_file, tmp_path):
    if not KERNELS.is_dir():
        pytest.skip(f"no {KERNELS}; make test-all installs it")
    model = tiny_model("llama")
    plain = losses(model, text_file, tmp_path, "plain", fsdp)
    settings = {"steps": 4, "lr_scheduler_type": "constant", "use_liger_kernel": True}
    arguments = (model, text_file, tmp_path / "kernels", settings)
    for found, used in run_ranks(train_with_interpreted_kernels, 2, *arguments, environment=fsdp_environment(fsdp)):
        assert found == pytest.approx(plain, rel=BOUNDS["kernels"])
        assert {"_rms_norm_backward_kernel", "_swiglu_backward_kernel", "_triton_rope"} <= used


def run_recipe(settings, file):
    file = file.with_name(f"{os.environ['RANK']}-{file.name}")  # so that no rank reads what another is writing
    file.write_text(yaml.safe_dump(settings))
    sys.argv = [str(ROOT / "recipes" / "sft.py"), "--config", str(file)]
    runpy.run_path(sys.argv[0], run_name="__main__")
    import torch

    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def recipe(model, data, output, **changes):
    """Return a recipe with rows of equal length, so that each block is compiled once."""
    return {
        "model_name_or_path": str(model), "dataset_name": str(data), "output_dir": str(output), "max_steps": 4,
        "per_device_train_batch_size": 1, "packing": True, "packing_strategy": "wrapped", "max_length": 32,
        "logging_steps": 1, "save_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": True, **changes,
    }  # fmt: skip


def recipe_losses(output):
    return [entry["loss"] for entry in read_metrics(output / "metrics.jsonl") if "loss" in entry]


def stored_names(output):
    """Return all tensor names in a run's checkpoints and its export."""
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open

    found = set()
    for part in output.glob("checkpoint-*/*_0"):
        found |= set(dcp.FileSystemReader(part).read_metadata().state_dict_metadata)
    for file in output.glob("export/*.safetensors"):
        found |= set(safe_open(file, "pt").keys())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "lora"),
    [("eager", False), ("eager", True), ("inductor", False)],
)
def test_compiled_blocks_keep_losses_and_names(backend, lora, tiny_model, text_file, tmp_path):
    environment = fsdp_environment(FSDP2)
    common = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0} if lora else {}
    compiled = common | {"compile_blocks": True, "torch_compile_backend": backend}
    plain, output = tmp_path / "plain", tmp_path / "compiled"
    model, file = tiny_model("llama"), tmp_path / "recipe.yaml"

    def run(settings):
        return run_ranks(run_recipe, 2, settings, file, environment=environment, timeout_seconds=280)

    assert run(recipe(model, text_file, plain, **common)) == [0, 0]
    assert min(run(recipe(model, text_file, output, **compiled))) > 0
    expected = recipe_losses(plain)
    assert recipe_losses(output) == pytest.approx(expected, rel=BOUNDS["compiled"])
    names = stored_names(output)
    assert names and not any("_orig_mod" in name for name in names)
    assert names == stored_names(plain)
    resumed = recipe(model, text_file, output, **compiled, resume_from_checkpoint=str(output / "checkpoint-2"))
    run(resumed | {"output_dir": str(tmp_path / "resumed")})
    assert recipe_losses(tmp_path / "resumed")[-2:] == pytest.approx(expected[2:], rel=BOUNDS["compiled"])


@pytest.mark.slow
def test_compiled_model_keeps_the_losses(tiny_model, text_file, tmp_path):
    environment, file, model = fsdp_environment(FSDP2), tmp_path / "recipe.yaml", tiny_model("llama")
    for name, changes in (("plain", {}), ("compiled", {"torch_compile": True, "torch_compile_backend": "eager"})):
        settings = recipe(model, text_file, tmp_path / name, **changes)
        num_graphs = run_ranks(run_recipe, 2, settings, file, environment=environment, timeout_seconds=280)
        assert (min(num_graphs) > 0) == bool(changes)
    plain, compiled = recipe_losses(tmp_path / "plain"), recipe_losses(tmp_path / "compiled")
    assert compiled == pytest.approx(plain, rel=BOUNDS["compiled"])
