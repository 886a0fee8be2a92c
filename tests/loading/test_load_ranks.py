"""`load_model` on ranks: weights and losses are those of from_pretrained.

Every error is one error on all ranks.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file

from hf_fsdp_recipes.loading import bnb_4bit
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build, digest, error_of, train

HYBRID = {"dp_replicate_size": 2, "dp_shard_size": 2}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
NF4 = {
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "float32",
    "bnb_4bit_compute_dtype": "float32",
    "bnb_4bit_use_double_quant": True,
}
BF16 = {"dtype": "bfloat16", "bf16": True, "precision": "bf16"}


class EightBit:
    """Stands for a BitsAndBytesConfig of 8-bit weights."""

    load_in_4bit = False


def _train(loader, model, data, output, options):
    import safetensors

    from hf_fsdp_recipes.weights import files

    opened = []
    files.safe_open = lambda *args: opened.append(args) or safetensors.safe_open(*args)
    losses, weights = train(str(model), str(data), str(output), loader=loader, steps=3, **options)
    return losses, weights, len(opened)


def _compare(
    model,
    data,
    output,
    source="rank0",
    world_size=2,
    parallel=None,
    precision="no",
    fsdp=None,
    **options,
):
    """Train with stock and with our loader; return how many files each rank opened."""
    environment = fsdp_environment(FSDP2 | (fsdp or {}), parallel, precision)

    def run(loader):
        return run_ranks(
            _train, world_size, loader, model, data, output, options, environment=environment
        )

    stock, ours = run("stock"), run(source)
    for (losses, weights, _), (own_losses, own_weights, _) in zip(stock, ours, strict=True):
        assert own_losses == losses
        assert own_weights == weights
    return [opened for *_, opened in ours]


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("llama", "float32", {}),
        ("llama_tied", "bfloat16", {"dtype": "auto", "bf16": True, "precision": "bf16"}),
        ("qwen3_moe", "bfloat16", {"dtype": "float32"}),
        pytest.param("gpt2", "float32", {}, marks=pytest.mark.slow),
        pytest.param("mixtral", "float32", {}, marks=pytest.mark.slow),
        pytest.param("llama", "float32", {"world_size": 1}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "bfloat16", {"world_size": 3}, marks=pytest.mark.slow),
        pytest.param(
            "llama", "float32", {"fsdp": {"fsdp_offload_params": True}}, marks=pytest.mark.slow
        ),
        pytest.param(
            "llama", "bfloat16", BF16 | {"gradient_checkpointing": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_weights_and_losses_are_those_of_from_pretrained(
    kind, dtype, options, tiny_model, text_file, tmp_path
):
    opened = _compare(tiny_model(kind, dtype, "40KB"), text_file, tmp_path, **options)
    assert opened[0]
    assert not any(opened[1:])  # only rank 0 opens weight files


def test_trained_bf16_weights_get_float32_masters_under_mixed_precision(
    tiny_model, text_file, tmp_path
):
    arguments = (
        "rank0",
        tiny_model("llama", "bfloat16"),
        text_file,
        tmp_path,
        {"dtype": "auto", "bf16": True},
    )
    for _, weights, _ in run_ranks(
        _train, 2, *arguments, environment=fsdp_environment(FSDP2, precision="bf16")
    ):
        assert {dtype for dtype, _, _ in weights.values()} == {"torch.float32"}


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_direct_reading_is_equal_under_hybrid_sharding(kind, tiny_model, text_file, tmp_path):
    opened = _compare(
        tiny_model(kind), text_file, tmp_path, "direct", world_size=4, parallel=HYBRID
    )
    assert all(opened)


@pytest.mark.parametrize(
    "lora",
    [
        # A trained head has wrong gradients after from_pretrained; see tests/oracle.
        LORA | {"modules_to_save": ["embed_tokens"]},
        pytest.param(LORA, marks=pytest.mark.slow),
        pytest.param(
            {
                "r": 4,
                "target_modules": ["q_proj"],
                "target_parameters": EXPERTS,
                "task_type": "CAUSAL_LM",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_lora_is_equal_with_nothing_patched_in_peft(lora, tiny_model, text_file, tmp_path):
    kind = "qwen3_moe" if "target_parameters" in lora else "llama"
    _compare(tiny_model(kind, "bfloat16"), text_file, tmp_path, lora=lora)


@pytest.mark.parametrize(
    ("source", "fsdp"),
    [
        ("rank0", {}),
        pytest.param("direct", {}, marks=pytest.mark.slow),
        pytest.param("rank0", {"fsdp_activation_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_4bit_weights_are_equal(source, fsdp, tiny_model, text_file, tmp_path):
    _compare(
        tiny_model("llama_wide", "bfloat16"),
        text_file,
        tmp_path,
        source,
        fsdp=fsdp,
        lora=LORA,
        quantization=NF4,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_quantize_a_weight_as_bitsandbytes_does(dtype):
    options = {"quant_type": "nf4", "quant_storage": dtype, "compress_statistics": True}
    module = SimpleNamespace(source_cls=torch.nn.Linear)
    weight = torch.randn(300, 512, dtype=torch.bfloat16)
    packed, state = quantize_4bit(weight, **options)
    layer = bnb_4bit.Layer([module], torch.bfloat16, options)
    with ThreadPoolExecutor(4) as pool:  # as many as read weights
        for own_packed in pool.map(layer.quantize, [weight] * 8):
            assert torch.equal(own_packed.view(torch.uint8), packed.view(torch.uint8))
    own = QuantState.from_dict(layer._scales, device=torch.device("cpu"))
    assert torch.equal(dequantize_4bit(packed, own), dequantize_4bit(packed, state))


def test_units_by_size_have_the_losses_of_units_by_layer(tiny_model, text_file, tmp_path):
    def losses(fsdp):
        arguments = ("rank0", tiny_model("llama"), text_file, tmp_path, {})
        return run_ranks(_train, 2, *arguments, environment=fsdp_environment(FSDP2 | fsdp))[0][0]

    by_size = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000}
    assert losses(by_size) == pytest.approx(losses({}), rel=1e-6)


# Adapters and memory.


def _adapters(model, data, output):
    trainer = build(str(model), str(data), str(output), lora=LORA)
    for name, parameter in trainer.model.named_parameters():
        if "lora_A" in name:
            parameter.data += int(os.environ["RANK"])
    own = [
        p.detach().double().sum().item()
        for n, p in trainer.model.named_parameters()
        if "lora_A" in n
    ]
    held = sum(
        p.untyped_storage().nbytes() for n, p in trainer.model.named_parameters() if "lora" not in n
    )
    trainer.args.max_steps, trainer.args.learning_rate = 1, 0.0
    trainer.train()
    now = [
        p.full_tensor().double().sum().item()
        for n, p in trainer.model.named_parameters()
        if "lora_A" in n
    ]
    return own, now, held


def test_all_ranks_train_rank_0s_adapter_and_placeholders_take_no_memory(
    tiny_model, text_file, tmp_path
):
    environment = fsdp_environment(FSDP2)
    first, second = run_ranks(
        _adapters, 2, tiny_model(), text_file, tmp_path, environment=environment
    )
    assert first[0] != second[0]
    assert first[1] == second[1] == first[0]
    assert first[2] < 200


def _peak_above_shard(model, source):
    from accelerate import Accelerator

    from hf_fsdp_recipes import load_model
    from tests.ranks.memory import PeakMemory

    loaded = load_model(str(model), source=source)
    accelerator = Accelerator(cpu=True)
    with PeakMemory() as memory:
        loaded, _ = accelerator.prepare(loaded, torch.optim.SGD(loaded.parameters(), lr=0.1))
    shard = sum(p.to_local().nbytes for p in loaded.parameters())
    return (memory.growth_bytes - shard) / 1e6, max(p.nbytes for p in loaded.parameters()) / 1e6


@pytest.mark.slow
@pytest.mark.parametrize("source", ["rank0", "direct"])
def test_a_rank_holds_its_shard_and_two_parameters(source, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=8
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for above, parameter in run_ranks(
        _peak_above_shard, 2, tmp_path, source, environment=fsdp_environment(FSDP2)
    ):
        assert above < 2 * parameter + 20


# Model classes and new heads.


def _new_head(model, data, output, loader):
    from transformers import (
        AutoModelForSequenceClassification,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    from hf_fsdp_recipes import load_model
    from hf_fsdp_recipes.upstream import patches

    patches.enable_cpu_ranks()
    args = TrainingArguments(
        output_dir=str(output), max_steps=1, use_cpu=True, report_to="none", learning_rate=0.0
    )
    set_seed(3)
    options = {"num_labels": 3, "dtype": "float32"}
    if loader == "stock":
        loaded = AutoModelForSequenceClassification.from_pretrained(model, **options)
    else:
        loaded = load_model(model, auto_class=AutoModelForSequenceClassification, **options)
    rows = [{"input_ids": [5, 6, 7], "labels": 1}] * 16
    trainer = Trainer(loaded, args, train_dataset=rows)
    trainer.train()
    return digest(trainer.model)


@pytest.mark.slow
def test_a_new_head_has_from_pretraineds_values(tiny_model, tmp_path):
    def run(loader):
        arguments = (tiny_model(), None, tmp_path, loader)
        return run_ranks(_new_head, 2, *arguments, environment=fsdp_environment(FSDP2))

    assert run("rank0") == run("stock")


# Errors.


def _errors(model, data, output, world_size=2, **options):
    """Return the error that all ranks raise."""
    environment = fsdp_environment(FSDP2)
    found = run_ranks(_error, world_size, model, data, output, options, environment=environment)
    assert len(set(found)) == 1, found
    return found[0]


def _error(model, data, output, options):
    return error_of(str(model), str(data), str(output), **options)


def _drop_layer(tensors):
    for name in [name for name in tensors if "layers.1" in name][:5]:
        del tensors[name]


def _reshape(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:3].clone()


def _drop_expert(tensors):
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]


def _untie(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("llama", _drop_layer, "is missing"),
        ("llama", _reshape, r"model.norm.weight is \[3\], not \[32\]"),
        pytest.param("qwen3_moe", _drop_expert, "experts", marks=pytest.mark.slow),
        pytest.param("llama_tied", _untie, "are tied, but differ", marks=pytest.mark.slow),
        ("llama", None, "model.safetensors|header|incomplete"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_error(
    kind, change, text, tiny_model, text_file, tmp_path
):
    import re

    directory = tmp_path / "model"
    shutil.copytree(tiny_model(kind, "bfloat16"), directory)
    file = directory / "model.safetensors"
    if change is None:
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size - 8)
    else:
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    kind, message = _errors(directory, text_file, tmp_path)
    assert kind in ("LoadError", "RecipeError")
    assert re.search(text, message)


def _break_reading(model):
    from hf_fsdp_recipes.loading.checkpoint import Checkpoint

    open_slice, calls = Checkpoint.slice_of, []

    def slice_of(self, key):
        calls.append(key)
        if len(calls) == 5 and os.environ["RANK"] == os.environ.get("BROKEN", "0"):
            raise OSError(5, f"cannot read {key}")
        return open_slice(self, key)

    Checkpoint.slice_of = slice_of


def _break_on_rank_1(model):
    os.environ["BROKEN"] = "1"
    _break_reading(model)


def _resize(model):
    model.resize_token_embeddings(320, mean_resizing=False)


def _evaluate(model):
    model(input_ids=torch.ones(1, 3, dtype=torch.long))


def _shard_as_trl_shards_a_reference(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)


def _save(model):
    model.save_pretrained("unused")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prepare": _break_reading}, "cannot read"),
        ({"prepare": _break_on_rank_1, "loader": "direct"}, "cannot read"),
        ({"prepare": _evaluate}, "not loaded yet"),
        ({"prepare": _save}, "not loaded yet"),
        ({"prepare": _shard_as_trl_shards_a_reference}, "not loaded yet"),
        ({"prepare": _resize}, "read before it is loaded"),
        ({"lora": LORA | {"init_lora_weights": "pissa"}}, "pissa"),
        pytest.param(
            {"lora": LORA | {"init_lora_weights": "olora"}}, "olora", marks=pytest.mark.slow
        ),
        pytest.param(
            {"lora": LORA | {"use_dora": True}},
            "DoRA|read before it is loaded",
            marks=pytest.mark.slow,
        ),
        ({"load_arguments": {"no_such_argument": 1}}, "no_such_argument"),
        ({"load_arguments": {"quantization_config": EightBit()}}, "4-bit"),
    ],
)
def test_use_before_loading_and_bad_arguments_are_one_error(
    options, text, tiny_model, text_file, tmp_path
):
    import re

    kind, message = _errors(tiny_model("llama", "bfloat16"), text_file, tmp_path, **options)
    assert kind in ("LoadError", "RecipeError", "TypeError"), message
    assert re.search(text, message), message


def test_a_missing_directory_and_a_quantized_checkpoint_are_one_error(
    tiny_model, text_file, tmp_path
):
    assert (
        "is no directory and cannot be downloaded"
        in _errors(tmp_path / "nothing", text_file, tmp_path)[1]
    )
    shutil.copytree(tiny_model(), tmp_path / "gptq")
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "gptq" / "config.json").write_text(json.dumps(config))
    assert "already quantized with gptq" in _errors(tmp_path / "gptq", text_file, tmp_path)[1]


def test_fsdp1_names_the_key_and_the_converter(tiny_model, text_file, tmp_path):
    environment = fsdp_environment(FSDP2) | {"FSDP_VERSION": "1"}
    arguments = (tiny_model(), text_file, tmp_path, {})
    for _, message in run_ranks(_error, 2, *arguments, environment=environment):
        assert "fsdp_version: 2" in message
        assert "accelerate to-fsdp2" in message


def _evaluate_before_training(model, data, output):
    trainer = build(str(model), str(data), str(output), eval_strategy="epoch")
    try:
        trainer.evaluate()
    except Exception as error:
        return type(error).__name__
    return None


def test_evaluation_before_training_never_computes_with_placeholders(
    tiny_model, text_file, tmp_path
):
    arguments = (tiny_model(), text_file, tmp_path)
    assert run_ranks(
        _evaluate_before_training, 2, *arguments, environment=fsdp_environment(FSDP2)
    ) in (
        ["LoadError"] * 2,
        ["ValueError"] * 2,
    )


def _without_fsdp(model):
    from hf_fsdp_recipes import load_model

    return bool(torch.isfinite(load_model(str(model)).lm_head.weight).all())


def test_without_fsdp_it_is_from_pretrained(tiny_model):
    assert run_ranks(_without_fsdp, 1, tiny_model()) == [True]


def _find_replacements():
    import accelerate.accelerator
    import accelerate.state
    import accelerate.utils.fsdp_utils
    import transformers

    from hf_fsdp_recipes.upstream import patches

    owners = (
        accelerate.accelerator,
        accelerate.state.AcceleratorState,
        accelerate.utils.fsdp_utils,
        transformers.Trainer,
    )
    return [
        name
        for owner in owners
        for name, value in vars(owner).items()
        if hasattr(value, patches.MARK)
    ]


def test_importing_the_package_replaces_nothing():
    assert run_ranks(_find_replacements, 1) == [[]]  # the ranks have imported all its modules


# A reference model for DPO.


def _train_dpo(directory, data, output, is_sharded):
    import accelerate
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from hf_fsdp_recipes import load_model
    from hf_fsdp_recipes.upstream import patches

    patches.enable_cpu_ranks()
    args = DPOConfig(
        output_dir=str(output),
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        per_device_train_batch_size=1,
    )
    load = load_model if is_sharded else AutoModelForCausalLM.from_pretrained
    model, reference = (load(directory, dtype="float32") for _ in range(2))
    if is_sharded:  # Accelerate shards a model only together with an optimizer
        unused = torch.optim.SGD(reference.parameters(), lr=0.0)
        reference, _ = accelerate.Accelerator().prepare(reference, unused)
    rows = [
        {"prompt": f"Say {n}", "chosen": f" yes {n} well", "rejected": " no no"} for n in range(24)
    ]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    trainer = DPOTrainer(
        model,
        reference,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_dpo_with_a_sharded_reference_model_has_stock_losses(tiny_model, text_file, tmp_path):
    def run(is_sharded):
        arguments = (tiny_model(), text_file, tmp_path, is_sharded)
        return run_ranks(_train_dpo, 2, *arguments, environment=fsdp_environment(FSDP2))

    assert run(True) == run(False)


def _load_and_change(model, kwargs, change):
    """Return a digest of each weight that a changed model gets when it is sharded."""
    from accelerate import Accelerator
    from transformers import BitsAndBytesConfig

    from hf_fsdp_recipes import load_model

    if kwargs.pop("is_packed", False):
        kwargs["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **NF4)
    model = load_model(str(model), **kwargs)
    if change == "reverse":
        model.model.layers = torch.nn.ModuleList(reversed(list(model.model.layers)))
    elif change:
        model.to(getattr(torch, change))
    model, _ = Accelerator().prepare(model, torch.optim.SGD(model.parameters()))
    if change == "reverse":
        model.model.layers = torch.nn.ModuleList(reversed(list(model.model.layers)))
    # A cast of the whole model includes buffers.
    found = {name: value for name, value in digest(model).items() if "inv_freq" not in name}
    for name, module in model.named_modules():
        if getattr(module, "quant_state", None) is not None:
            found[f"scales of {name}"] = float(module.quant_state.absmax.double().sum())
    return found


@pytest.mark.parametrize(
    ("kind", "kwargs", "change", "other_kwargs"),
    [
        ("llama_wide", {"dtype": "float32", "is_packed": True}, "reverse", None),
        ("llama", {"dtype": "float32"}, "bfloat16", {"dtype": "bfloat16"}),
    ],
)
def test_a_model_may_be_cast_or_have_its_layers_moved_before_it_is_loaded(
    kind, kwargs, change, other_kwargs, tiny_model
):
    environment = fsdp_environment(FSDP2)
    changed, plain = (
        run_ranks(_load_and_change, 2, tiny_model(kind), *inputs, environment=environment)
        for inputs in ((kwargs, change), (other_kwargs or kwargs, None))
    )
    assert changed == plain
    assert len(set(plain[0].values())) > 10
