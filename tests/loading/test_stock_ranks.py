"""`load_model` on two ranks gives every parameter and buffer the value of stock from_pretrained.

Stock loads the same directory with the same arguments and edits, in one process without FSDP.
"""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

from tests.conftest import tiny_config
from tests.export.cases import adapt, assert_same_tensors, load, merge
from tests.loading import quantized, stock
from tests.loading.families import build
from tests.loading.stock import change, change_config, compare, randomize, write
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks

LORA = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
EXPERTS = {
    "r": 2,
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    "task_type": "CAUSAL_LM",
}
PACKED = {
    "dtype": "float32",
    "quantization_config": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.float32,
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return the directory of a model of three layers, which has random values everywhere."""
    return _save(_of_three_layers("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return the directory of the same model in several shards, with an index."""
    directory = _save(
        _of_three_layers("llama"), tmp_path_factory.mktemp("sharded"), max_shard_size="60KB"
    )
    assert (directory / "model.safetensors.index.json").is_file()
    return directory


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """Return the directory of a model of three layers whose experts are stored one by one."""
    directory = _save(_of_three_layers("qwen3_moe"), tmp_path_factory.mktemp("moe"))
    assert any(".experts.2.up_proj." in name for name in _other(directory))
    return directory


def _of_three_layers(kind):
    config = tiny_config(kind)
    config.num_hidden_layers = 3
    return AutoModelForCausalLM.from_config(config)


def _save(model, directory, **options):
    randomize(model).save_pretrained(directory, **options)
    return directory


def _copy(source, target):
    shutil.copytree(source, target)
    return target


# Files.


def _other(source):
    """Return tensors of the same names with other values."""
    tensors = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    return {name: value + 1 for name, value in tensors.items()}


@pytest.fixture
def stray(llama, sharded, tmp_path):
    """Return directories with files that from_pretrained does not read, by their names."""
    other = _other(llama)
    variant = _copy(llama, tmp_path / "variant")
    for name in ("model.fp16.safetensors", "model.zz.safetensors"):
        write(other, variant / name)
    beside_index = _copy(sharded, tmp_path / "beside-index")
    for name in ("a.safetensors", "zz.safetensors"):
        write(other, beside_index / name)
    stale = _copy(llama, tmp_path / "stale-index")
    write(other, stale / "zz.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, "zz.safetensors")}
    (stale / "model.safetensors.index.json").write_text(json.dumps(index))
    sub = _copy(llama, tmp_path / "sub")
    write(other, sub / "model.safetensors")
    _copy(llama, sub / "inner")
    named = _copy(llama, tmp_path / "named")
    write(other, named / "a.safetensors")
    change_config(named, transformers_weights="a.safetensors")
    pickled = _copy(llama, tmp_path / "pickled")
    write(other, pickled / "zz.safetensors")
    torch.save(load_file(llama / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    return {
        "variant": variant,
        "index": beside_index,
        "stale": stale,
        "sub": sub,
        "named": named,
        "pickled": pickled,
    }


def test_a_stray_file_is_not_loaded(stray):
    variant = {"directory": stray["variant"]}
    compare(
        {
            "a variant beside": variant,
            "use_safetensors": variant | {"kwargs": {"use_safetensors": True}},
            "the variant": variant | {"kwargs": {"variant": "fp16"}},
            "beside an index": {"directory": stray["index"]},
            "a stale index": {"directory": stray["stale"]},
            "a subfolder": {"directory": stray["sub"], "kwargs": {"subfolder": "inner"}},
            "above a subfolder": {"directory": stray["sub"]},
            "a file that the config names": {"directory": stray["named"]},
            "pickled": {"directory": stray["pickled"], "refusal": "safetensors"},
        }
    )


@pytest.fixture
def adapter(llama, tmp_path):
    """Return the directory of an adapter for `llama` with random values."""
    model = adapt(load(llama), target_modules="all-linear")
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_beside_a_model_is_loaded_too_or_refused(llama, adapter, tmp_path):
    both = _copy(llama, tmp_path / "both")
    for file in adapter.glob("adapter_*"):
        shutil.copy(file, both)
    adapter_alone = {"directory": adapter, "refusal": "adapter"}
    compare({"both": {"directory": both, "refusal": "adapter"}, "alone": adapter_alone})


@pytest.mark.parametrize("name", ["variant", "index", "stale", "named"])
def test_an_adapter_is_merged_into_the_weights_that_stock_loads(name, stray, tmp_path):
    from peft import PeftModel

    from hf_fsdp_recipes import export_checkpoint

    adapt(load(stray[name]), target_modules=["q_proj"]).save_pretrained(tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(load(stray[name]), tmp_path / "adapter")
    merge(adapted).save_pretrained(tmp_path / "stock")
    merged = export_checkpoint(tmp_path / "adapter", tmp_path / "merged", merge_adapter=True)
    assert_same_tensors(tmp_path / "stock", merged)


# Missing files and tensors.


CLASSES = ("AutoModelForCausalLM", "AutoModel", "AutoModelForSequenceClassification")


def test_a_missing_shard_is_an_error(sharded, tmp_path):
    directory = _copy(sharded, tmp_path / "model")
    sorted(directory.glob("*.safetensors"))[1].unlink()
    case = {"directory": directory, "fails_in_stock": True, "refusal": "missing|model-0"}
    compare({name: case | {"auto_class": name} for name in CLASSES})


@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.1.mlp.up_proj.weight"])
def test_a_missing_tensor_is_an_error(name, llama, tmp_path):
    directory = _copy(llama, tmp_path / "model")
    change(directory, lambda tensors: tensors.pop(f"model.{name}"))
    # Stock makes up values and warns.
    case = {"directory": directory, "must_refuse": True, "refusal": f"{name} is missing"}
    compare({name: case | {"auto_class": name} for name in CLASSES})


# Code and weights of a revision.


CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
    behaviour = "NAME"

    def __init__(self, config):
        super().__init__(config)
        self.NAME = torch.nn.Parameter(torch.zeros(4))
        self.post_init()
"""
AUTO_MAP = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
COMMITS = {"newest": "1" * 40, "pinned": "2" * 40}


@pytest.fixture
def hub(llama, sharded, tmp_path):
    """Return the folder of a Hub cache with two revisions of org/plain and org/own.

    The revisions differ in their weights, and org/own's also in their code. org/part lacks a shard.
    """
    part = tmp_path / "hub" / "models--org--part"
    (part / "refs").mkdir(parents=True)
    (part / "refs" / "main").write_text(COMMITS["newest"])
    snapshot = _copy(sharded, part / "snapshots" / COMMITS["newest"])
    sorted(snapshot.glob("*.safetensors"))[1].unlink()
    for repository in ("plain", "own"):
        folder = tmp_path / "hub" / f"models--org--{repository}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMITS["newest"])
        for name, commit in COMMITS.items():
            snapshot = _copy(llama, folder / "snapshots" / commit)
            tensors = load_file(snapshot / "model.safetensors")
            if name == "pinned":
                tensors = _other(snapshot)
            if repository == "own":
                tensors |= {"newest": torch.ones(4), "pinned": torch.arange(4.0)}
                (snapshot / "modeling_own.py").write_text(CODE.replace("NAME", name))
                change_config(snapshot, auto_map=AUTO_MAP, model_type="own")
            write(tensors, snapshot / "model.safetensors")
    return tmp_path


TRUSTED = {"trust_remote_code": True}
PINNED = {"revision": COMMITS["pinned"]}


@pytest.mark.parametrize(
    ("name", "kwargs", "fails"),
    [
        ("org/plain", {}, False),
        ("org/plain", PINNED, False),
        ("org/plain", {"revision": "3" * 40}, True),
        ("org/part", {}, True),
        ("org/own", TRUSTED, False),
        ("org/own", TRUSTED | PINNED, False),
        ("org/own", PINNED, True),
    ],
)
def test_a_revision_is_that_of_the_code_and_of_the_weights(name, kwargs, fails, hub):
    case = {"directory": name, "hub": hub, "kwargs": kwargs, "fails_in_stock": fails}
    compare({name: case})


def _revision_of_adapter(hub):
    from accelerate import Accelerator

    model = stock.load("rank0", "org/plain", hub=hub, kwargs=PINNED)
    model = adapt(model, target_modules=["q_proj"])
    model, _ = Accelerator().prepare(model, torch.optim.SGD(model.parameters()))
    return model.peft_config["default"].revision


def test_an_adapter_is_merged_into_the_revision_on_which_it_was_trained(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    from hf_fsdp_recipes import export_checkpoint

    environment = fsdp_environment(FSDP2)
    revisions = run_ranks(_revision_of_adapter, 2, hub, environment=environment)
    assert revisions == [PINNED["revision"]] * 2
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub / "hub"))
    base = AutoModelForCausalLM.from_pretrained("org/plain", **PINNED)
    model = adapt(base, target_modules=["q_proj"], **PINNED)
    model.save_pretrained(tmp_path / "adapter")
    merged = export_checkpoint(tmp_path / "adapter", tmp_path / "merged", merge_adapter=True)
    merge(model).save_pretrained(tmp_path / "stock")
    assert_same_tensors(tmp_path / "stock", merged)


# Edits of a model that is not loaded yet.


def _drop_first_layer(model):
    model.model.layers = model.model.layers[1:]
    model.config.num_hidden_layers -= 1


def _reverse_layers(model):
    model.model.layers = torch.nn.ModuleList(reversed(list(model.model.layers)))


def _deepen(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.config.num_hidden_layers += 1


def _deepen_between(model):
    layers = list(model.model.layers)
    layers.insert(1, copy.deepcopy(layers[2]))
    model.model.layers = torch.nn.ModuleList(layers)
    model.config.num_hidden_layers += 1


def _swap(model):
    first, second, _ = model.model.layers
    projection = first.self_attn.o_proj
    first.self_attn.o_proj = second.self_attn.o_proj
    second.self_attn.o_proj = projection


EDITS = {
    "dropped": _drop_first_layer,
    "reversed": _reverse_layers,
    "appended": _deepen,
    "inserted": _deepen_between,
    "swapped": _swap,
}
CHECKPOINTED = {"fsdp_activation_checkpointing": True}


@pytest.mark.parametrize(
    ("model", "lora", "kwargs", "fsdp", "source"),
    [
        ("llama", None, {}, {}, "rank0"),
        ("llama", None, {}, {}, "direct"),
        ("llama", LORA, {}, {}, "rank0"),
        ("llama", None, {}, CHECKPOINTED, "rank0"),
        ("llama", LORA, {}, CHECKPOINTED, "rank0"),
        ("llama", LORA, PACKED, {}, "rank0"),
        ("moe", None, {}, {}, "rank0"),
        ("moe", EXPERTS, {}, CHECKPOINTED, "rank0"),
    ],
)
def test_a_layer_keeps_its_weights_wherever_it_is_moved(model, lora, kwargs, fsdp, source, request):
    case = {"directory": request.getfixturevalue(model), "lora": lora, "kwargs": kwargs}
    compare({name: case | {"edit": edit} for name, edit in EDITS.items()}, fsdp, source)


def _cast_up(model):
    model.to(torch.float32)


@pytest.mark.parametrize("source", ["rank0", "direct"])
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_a_model_that_is_cast_up_has_the_values_of_its_first_dtype(model, source, request):
    directory = request.getfixturevalue(model)
    case = {"directory": directory, "kwargs": {"dtype": "bfloat16"}, "edit": _cast_up}
    compare({model: case}, source=source)


def _combine(llama, kwargs):
    from accelerate import Accelerator

    from hf_fsdp_recipes import load_model

    model = load_model(llama, **kwargs)
    model.model.layers[0] = load_model(llama, **kwargs).model.layers[0]
    Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_layer_of_another_model_is_refused(is_packed, llama):
    environment = fsdp_environment(FSDP2)
    kwargs = PACKED if is_packed else {}
    inputs = (_combine, 2, llama, kwargs)
    errors = run_ranks(*inputs, environment=environment, expect_failure=True)
    assert {kind for kind, _ in errors} == {"LoadError"}
    assert all("is of another model from load_model" in text for _, text in errors)


# Writes to a weight that is not loaded yet.


def _data_of_ones(model):
    model.model.norm.weight.data = torch.ones_like(model.model.norm.weight)


def _data_of_another_dtype(model):
    model.model.norm.weight.data = torch.ones(32, dtype=torch.bfloat16)


def _zero(model):
    with torch.no_grad():
        model.model.norm.weight.zero_()


def _fill(model):
    with torch.no_grad():
        model.model.norm.weight.fill_(2.0)


def _fill_data(model):
    model.model.norm.weight.data.fill_(2.0)


def _set_items(model):
    with torch.no_grad():
        model.model.norm.weight[:3] = 2.0


def _copy_values(model):
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.arange(32.0))


def _copy_state(model):
    model.load_state_dict({"model.norm.weight": torch.arange(32.0)}, strict=False)


def _init_normal(model):
    torch.nn.init.normal_(model.model.norm.weight)


def _init_zeros(model):
    torch.nn.init.zeros_(model.model.norm.weight)


def _init_constant(model):
    torch.nn.init.constant_(model.model.norm.weight, 3.0)


WRITES = (
    _data_of_ones,
    _data_of_another_dtype,
    _zero,
    _fill,
    _fill_data,
    _set_items,
    _copy_values,
    _copy_state,
    _init_normal,
    _init_zeros,
    _init_constant,
)


def test_a_write_to_a_weight_is_kept_or_an_error_that_names_the_weight(llama):
    named = {"directory": llama, "refusal": r"norm\.weight"}
    compare({write.__name__: named | {"edit": write} for write in WRITES})


def _replace(model):
    model.model.norm.weight = torch.nn.Parameter(torch.arange(32.0))


def _replace_frozen(model):
    weight = torch.nn.Parameter(torch.arange(32.0), requires_grad=False)
    model.model.layers[1].input_layernorm.weight = weight


def _replace_module(model):
    model.lm_head = torch.nn.Linear(32, 5)


def _assign_state(model):
    state = {"model.norm.weight": torch.arange(32.0)}
    model.load_state_dict(state, strict=False, assign=True)


REPLACEMENTS = (_replace, _replace_frozen, _replace_module, _assign_state)


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_replaced_parameter_keeps_its_values(lora, llama):
    case = {"directory": llama, "lora": lora}
    compare({replace.__name__: case | {"edit": replace} for replace in REPLACEMENTS})


# Frozen weights.


def test_what_a_models_own_initialization_freezes_stays_frozen(tmp_path):
    from transformers import HrmTextConfig, HrmTextForCausalLM

    size = {"hidden_size": 16, "intermediate_size": 32, "head_dim": 8, "vocab_size": 307}
    config = HrmTextConfig(**size, num_attention_heads=2, num_key_value_heads=2)
    model = HrmTextForCausalLM(config)
    assert not model.model.z_L_init.requires_grad
    compare({"hrm_text": {"directory": _save(model, tmp_path / "model")}})


# Buffers.


def _to_float32(model):
    model.to(torch.float32)


def _to_bfloat16(model):
    model.to(torch.bfloat16)


class Normalized(LlamaForCausalLM):
    """A model with buffers of several kinds, in a module and of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.normalization = torch.nn.BatchNorm1d(8)
        self.register_buffer("offset", torch.zeros(5))
        self.post_init()


@pytest.mark.parametrize("source", ["rank0", "direct"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_buffer_has_the_values_of_the_files(dtype, source, tmp_path):
    stored = getattr(torch, dtype)
    model = Normalized(tiny_config("llama")).to(stored)
    statistics = {"directory": _save(model, tmp_path / "normalized"), "auto_class": Normalized}
    model = build("AutoModelForCausalLM", "deepseek_v3").to(stored)
    router = {"directory": _save(model, tmp_path / "deepseek")}
    cases = {}
    for name, case, part in (
        ("statistics", statistics, "normalization"),
        ("router", router, "gate"),
    ):
        lora = {"r": 2, "target_modules": ["o_proj"], "modules_to_save": [part]}
        trained = case | {"lora": lora}
        cases |= {
            name: case,
            f"{name} in float32": case | {"kwargs": {"dtype": "float32"}},
            f"{name} in bfloat16": case | {"kwargs": {"dtype": "bfloat16"}},
            f"{name}, cast": case | {"edit": _to_float32},
            f"{name}, cast down": case | {"edit": _to_bfloat16},
            f"{name}, trained": trained,
            f"{name}, cast and trained": trained | {"edit": _to_float32},
        }
    compare(cases, source=source)


# Several keys for one weight.


def test_two_keys_of_a_weight_give_it_stocks_value_or_an_error(
    llama, sharded, tiny_model, tmp_path
):
    name = "layers.1.mlp.up_proj.weight"

    def add_same(tensors):
        tensors[name] = tensors[f"model.{name}"].clone()

    def add_other(tensors):
        tensors[name] = tensors[f"model.{name}"] + 1

    def add_tied(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    same = {"directory": change(_copy(llama, tmp_path / "same"), add_same), "refusal": name}
    other = {"directory": change(_copy(llama, tmp_path / "other"), add_other), "refusal": name}
    tied = change(_copy(tiny_model("llama_tied"), tmp_path / "tied"), add_tied)
    twice = _copy(sharded, tmp_path / "twice")
    file = sorted(twice.glob("*.safetensors"))[-1]
    tensors = load_file(file)
    assert f"model.{name}" not in tensors
    tensors[f"model.{name}"] = torch.ones(52, 32)
    write(tensors, file)
    base = {"auto_class": "AutoModel"}
    compare(
        {
            "in two shards": {"directory": twice, "refusal": name},
            "equal": same,
            "equal, in the base": same | base,
            "different": other,
            "different, in the base": other | base,
            "tied": {"directory": tied},
        }
    )


# Weights that are converted, under adapters.


def test_experts_have_stocks_values_under_lora(moe, tmp_path):
    from transformers import Mxfp4Config

    separate = {"directory": moe, "lora": EXPERTS}
    mxfp4 = {
        "directory": quantized.make(tmp_path / "mxfp4", "gpt_oss"),
        "stock_kwargs": {"quantization_config": Mxfp4Config(dequantize=True)},
        "lora": EXPERTS,
    }
    images = build("AutoModelForImageTextToText", "qwen3_vl_moe")
    with_images = {
        "directory": _save(images, tmp_path / "images"),
        "auto_class": "AutoModelForImageTextToText",
        "lora": EXPERTS,
    }
    packed = {"kwargs": PACKED}
    compare(
        {
            "stored one by one": separate,
            "bfloat16": separate | {"kwargs": {"dtype": "bfloat16"}},
            "mxfp4": mxfp4,
            "images": with_images,
            "4-bit": separate | packed,
            "4-bit, without experts": separate | packed | {"lora": LORA},
        }
    )


# Arguments.


def _accepted(directory):
    """Return arguments of from_pretrained that change nothing, or a dtype."""
    names = {
        "low_cpu_mem_usage": True,
        "use_safetensors": True,
        "device_map": None,
        "max_memory": None,
        "torch_dtype": "bfloat16",
        "weights_only": True,
        "force_download": False,
        "local_files_only": True,
        "token": None,
        "proxies": None,
        "revision": "main",
        "state_dict": None,
        "attn_implementation": "eager",
        "use_cache": False,
    }
    return {name: {"directory": directory, "kwargs": {name: names[name]}} for name in names}


def test_arguments_of_from_pretrained_are_accepted(llama, tmp_path):
    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("model.", "backbone.")] = tensors.pop(name)

    renamed = change(_copy(llama, tmp_path / "renamed"), rename)
    mapping = {"directory": renamed, "kwargs": {"key_mapping": {"^backbone": "model"}}}
    narrow = _copy(llama, tmp_path / "narrow")
    change_config(narrow, vocab_size=200)
    ignore = {"ignore_mismatched_sizes": True}
    mismatched = {"directory": narrow, "kwargs": ignore, "refusal": "ignore_mismatched_sizes"}
    unknown = {"no_such_argument": 1}
    device = {"directory": llama, "kwargs": {"device_map": "cpu"}, "refusal": "device_map"}
    others = {
        "key_mapping": mapping,
        "device_map of a device": device,
        "mismatched": mismatched,
        "unknown": {"directory": llama, "kwargs": unknown, "fails_in_stock": True},
    }
    compare(_accepted(llama) | others)


def _names(loader, directory):
    from peft import LoraConfig, get_peft_model

    model = stock.load(loader, directory, kwargs={"dtype": "float32"})
    adapted = get_peft_model(model, LoraConfig(target_modules=["lm_head"]))
    recorded = adapted.peft_config["default"].base_model_name_or_path
    return model.name_or_path, model.config.name_or_path, recorded


def test_a_models_name_is_the_given_path(llama, tmp_path):
    images = _save(build("AutoModelForImageTextToText", "qwen3_5"), tmp_path / "images")
    environment = fsdp_environment(FSDP2)
    for directory in (llama, images):
        expected = (str(directory),) * 3
        assert run_ranks(_names, 1, "stock", directory) == [expected]
        assert run_ranks(_names, 2, "rank0", directory, environment=environment) == [expected] * 2


# The timeout of collectives.


def _timeout(directory, kind):
    """Return the default group's timeout in seconds when a model from load_model is trained."""
    import datetime

    from accelerate import Accelerator, InitProcessGroupKwargs
    from transformers import Trainer, TrainingArguments

    from hf_fsdp_recipes import ShardedCheckpointCallback, load_model

    model = load_model(directory)
    if kind == "arguments":
        arguments = TrainingArguments("unused", ddp_timeout=77, max_steps=1, report_to="none")
        tokens = {"input_ids": [1, 2], "labels": [1, 2]}
        callbacks = [ShardedCheckpointCallback()]
        Trainer(model, arguments, train_dataset=[tokens] * 4, callbacks=callbacks).train()
    else:
        timeout = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=77))
        optimizer = torch.optim.SGD(model.parameters())
        Accelerator(cpu=True, kwargs_handlers=[timeout]).prepare(model, optimizer)
    group = torch.distributed.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


@pytest.mark.parametrize("kind", ["arguments", "accelerator"])
def test_a_timeout_that_is_given_after_load_model_applies(kind, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = fsdp_environment(FSDP2)
    assert run_ranks(_timeout, 2, llama, kind, environment=environment) == [77, 77]
