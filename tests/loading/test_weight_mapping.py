"""Every parameter is found in the checkpoint, element by element, even if transformers fuses experts."""

import math

import pytest
import torch
from safetensors.torch import load_file

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.export.export_plan import split_parameters
from hf_fsdp_recipes.loading.build_on_meta import build_on_meta
from hf_fsdp_recipes.loading.weight_mapping import WeightMapping, stored_ranges
from tests.conftest import tiny_config
from tests.loading.families import small_config

KINDS = ["llama", "llama_tied", "gpt2", "qwen3_moe", "mixtral"]


def on_meta(kind):
    return build_on_meta(tiny_config(kind), torch.float32)


def stored_of(directory):
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_hold_what_from_pretrained_loads(tiny_model, kind):
    from transformers import AutoModelForCausalLM

    stored = stored_of(tiny_model(kind))
    reference = AutoModelForCausalLM.from_pretrained(tiny_model(kind)).state_dict()
    model = on_meta(kind)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    pieces, unexpected = WeightMapping(model).to_parameters({n: tuple(t.shape) for n, t in stored.items()}, shapes)
    assert unexpected == []
    assert set(shapes) - set(pieces) <= set(model.all_tied_weights_keys)
    for name, parts in pieces.items():
        flat = torch.cat([stored[p.tensor].reshape(-1)[p.start : p.start + p.num_elements] for p in parts])
        assert torch.equal(flat, reference[name].reshape(-1)), name


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_what_save_pretrained_writes(tiny_model, kind):
    from transformers import AutoModelForCausalLM

    stored = stored_of(tiny_model(kind))
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind))
    written = set()
    for name, parameter in model.named_parameters():
        for part in stored_ranges(model, name, tuple(parameter.shape)):
            values = parameter.detach().reshape(-1)[part.start : part.start + part.num_elements].reshape(part.shape)
            assert torch.equal(values, stored[part.tensor]), part.tensor
            written.add(part.tensor)
    assert written == set(stored)


def test_expert_that_is_missing_is_named():
    model = on_meta("qwen3_moe")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {
        part.tensor: part.shape
        for name, shape in shapes.items()
        for part in stored_ranges(on_meta("qwen3_moe"), name, shape)
    }
    lost = next(name for name in stored if ".experts.3." in name)
    del stored[lost]
    with pytest.raises(LoadError, match=r"experts\.3"):
        WeightMapping(on_meta("qwen3_moe")).to_parameters(stored, shapes)


def test_unknown_tensors_are_reported_not_loaded():
    model = on_meta("llama")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    pieces, unexpected = WeightMapping(model).to_parameters(shapes | {"visual.patch": (3, 3)}, shapes)
    assert unexpected == ["visual.patch"]
    assert all(sum(p.num_elements for p in parts) == math.prod(shapes[name]) for name, parts in pieces.items())


def test_tensor_of_another_shape_with_as_many_elements_is_a_mismatch():
    model, name = on_meta("llama"), "model.layers.1.mlp.up_proj.weight"
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    mapping = WeightMapping(model)
    mapping.to_parameters(shapes | {name: shapes[name][::-1]}, shapes)
    assert mapping.mismatched == {name}


def test_converted_checkpoint_of_a_model_that_transposes_weights_is_mapped_and_exported():
    model = build_on_meta(small_config("AutoModelForImageTextToText", "qwen3_vl_moe")[1], torch.float32)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    ranges, _ = WeightMapping(model).to_parameters(shapes, shapes)
    assert {name: [(part.tensor, part.shape) for part in parts] for name, parts in ranges.items()} == {
        name: [(name, shape)] for name, shape in shapes.items()
    }
    written = split_parameters(model, shapes)
    assert [(part.tensor, part.shape) for part in written[name]] == [(name, shapes[name])]
    transposed = shapes | {name: (shapes[name][0], *shapes[name][:0:-1])}
    with pytest.raises(LoadError, match="save_original_format=False"):
        WeightMapping(model).to_parameters(transposed, shapes)


@pytest.mark.parametrize("is_transposed", [True, False])
def test_parts_of_a_fused_tensor_are_mismatches_if_it_is_transposed(is_transposed):
    model = build_on_meta(small_config("AutoModelForCausalLM", "hrm_text")[1], torch.float32)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    prefix = "model.H_module.layers.0"
    parts = {f"{prefix}.self_attn.{part}_proj.weight" for part in ("gate", "q", "k", "v")}
    rows, columns = shapes[f"{prefix}.self_attn.q_proj.weight"]
    mapping = WeightMapping(model)
    stored = (columns, 4 * rows) if is_transposed else (4 * rows, columns)
    ranges, _ = mapping.to_parameters({f"{prefix}.attn.gqkv_proj.weight": stored}, shapes)
    assert ranges.keys() == parts
    assert mapping.mismatched == (parts if is_transposed else set())
