"""`load_model` on two ranks gives every parameter and buffer the value of stock from_pretrained.

Stock loads the same directory with the same arguments and edits, in one process without FSDP.
"""

import copy
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import tiny_config
from tests.loading.stock import change, change_config, problems, randomize, write

LORA = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return the directory of a model of three layers, which has random values everywhere."""
    return _save(_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return the directory of the same model in several shards, with an index."""
    directory = _save(_llama(), tmp_path_factory.mktemp("sharded"), max_shard_size="60KB")
    assert (directory / "model.safetensors.index.json").is_file()
    return directory


def _llama():
    from transformers import LlamaForCausalLM

    config = tiny_config("llama")
    config.num_hidden_layers = 3
    return LlamaForCausalLM(config)


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
    write(other, variant / "model.fp16.safetensors")
    beside_index = _copy(sharded, tmp_path / "beside-index")
    for name in ("a.safetensors", "zz.safetensors"):
        write(other, beside_index / name)
    stale = _copy(sharded, tmp_path / "stale-index")
    shutil.copy(llama / "model.safetensors", stale)
    change(stale, lambda tensors: tensors.update(other))
    sub = _copy(llama, tmp_path / "sub")
    write(other, sub / "model.safetensors")
    _copy(llama, sub / "inner")
    return {"variant": variant, "index": beside_index, "stale": stale, "sub": sub}


def test_a_stray_file_is_not_loaded(stray):
    variant = {"directory": stray["variant"]}
    assert (
        problems(
            {
                "a variant beside": variant,
                "safetensors": variant | {"kwargs": {"use_safetensors": True}},
                "the variant": variant | {"kwargs": {"variant": "fp16"}},
                "beside an index": {"directory": stray["index"]},
                "a stale index": {"directory": stray["stale"]},
                "a subfolder": {"directory": stray["sub"], "kwargs": {"subfolder": "inner"}},
                "above a subfolder": {"directory": stray["sub"]},
            }
        )
        == {}
    )


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
    projection = first.mlp.down_proj
    first.mlp.down_proj = second.mlp.down_proj
    second.mlp.down_proj = projection


EDITS = {
    "dropped": _drop_first_layer,
    "reversed": _reverse_layers,
    "appended": _deepen,
    "inserted": _deepen_between,
    "swapped": _swap,
}


@pytest.mark.parametrize(
    ("lora", "fsdp"),
    [
        (None, {}),
        (LORA, {}),
        (None, {"fsdp_activation_checkpointing": True}),
        pytest.param(LORA, {"fsdp_activation_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_a_layer_keeps_its_weights_wherever_it_is_moved(lora, fsdp, llama):
    cases = {
        name: {"directory": llama, "edit": edit, "lora": lora} for name, edit in EDITS.items()
    }
    assert problems(cases, fsdp) == {}
