"""An adapter is merged into the base model that was trained, whatever a script did to that."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.conftest import tiny_config
from tests.export.cases import (
    adapt,
    assert_same_files,
    assert_same_tensors,
    change,
    load,
    merge,
    shard,
)
from tests.loading import quantized
from tests.loading.stock import randomize
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks

LORA = {"target_modules": ["q_proj", "up_proj"]}
NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": torch.float32,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return the directory of a model of three layers with random bfloat16 values everywhere."""
    config = tiny_config("llama")
    config.num_hidden_layers = 3
    directory = tmp_path_factory.mktemp("llama")
    model = randomize(AutoModelForCausalLM.from_config(config)).to(torch.bfloat16)
    model.save_pretrained(directory)
    model.save_pretrained(directory / "inner")
    for file in directory.glob("*.safetensors"):
        file.rename(directory / "model.fp16.safetensors")
    return directory


def _keep(model):
    pass


def _reverse(model):
    model.model.layers = torch.nn.ModuleList(reversed(list(model.model.layers)))


def _drop(model):
    model.model.layers = model.model.layers[1:]
    model.config.num_hidden_layers -= 1


def _repeat(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.config.num_hidden_layers += 1


def _swap(model):
    first, second, _ = model.model.layers
    projection = first.self_attn.o_proj
    first.self_attn.o_proj = second.self_attn.o_proj
    second.self_attn.o_proj = projection


def _set_norm(model):
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.arange(32.0))


def _replace_head(model):
    torch.manual_seed(5)
    size = model.config.vocab_size
    model.lm_head = torch.nn.Linear(32, size, bias=False, dtype=torch.bfloat16)
    model.lm_head.weight.requires_grad_(False)


EDITS = [_keep, _reverse, _drop, _repeat, _swap, _set_norm, _replace_head]


def _merge_packed(directory, folder, edits, where):
    """Edit models of 4-bit weights from load_model, and merge adapters into them."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from hf_fsdp_recipes import export_model, load_model

    for edit in edits:
        AcceleratorState._reset_state(reset_partial_state=True)
        packed = BitsAndBytesConfig(**NF4)
        model = load_model(directory, quantization_config=packed, dtype="bfloat16", **where)
        edit(model)
        model = adapt(model, **LORA)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _ = Accelerator(cpu=True).prepare(model, optimizer)
        export_model(model, folder / edit.__name__ / "adapter")
        export_model(model, folder / edit.__name__ / "merged", merge_adapter=True)


@pytest.mark.parametrize("where", [{"variant": "fp16"}, {"subfolder": "inner"}])
def test_an_adapter_is_merged_into_the_edited_base_that_was_quantized(where, llama, tmp_path):
    from peft import PeftModel

    edits = EDITS if "variant" in where else EDITS[:2]
    inputs = (_merge_packed, 2, llama, tmp_path, edits, where)
    run_ranks(*inputs, environment=fsdp_environment(FSDP2))
    for edit in edits:
        folder = tmp_path / edit.__name__
        stock = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16, **where)
        edit(stock)
        stock = PeftModel.from_pretrained(stock, folder / "adapter")
        merge(stock, torch.bfloat16).save_pretrained(folder / "stock")
        assert_same_tensors(folder / "stock", folder / "merged")


def _prepare_packed(directory):
    from peft import prepare_model_for_kbit_training

    model = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=BitsAndBytesConfig(**NF4), dtype=torch.bfloat16
    )
    return prepare_model_for_kbit_training(model)


def test_packed_layers_of_stock_are_merged_where_the_files_have_them(llama, tmp_path):
    from peft import PeftModel

    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.errors import ExportError

    inner = llama / "inner"
    model = adapt(_prepare_packed(inner), **LORA)
    model.save_pretrained(tmp_path / "adapter")
    merged = export_model(model, tmp_path / "merged", merge_adapter=True)
    stock = PeftModel.from_pretrained(load(inner, torch.bfloat16), tmp_path / "adapter")
    merge(stock, torch.bfloat16).save_pretrained(tmp_path / "stock")
    assert_same_tensors(tmp_path / "stock", merged)
    reversed_model = _prepare_packed(inner)
    _reverse(reversed_model)
    with pytest.raises(ExportError, match="do not have the weights that were quantized"):
        export_model(adapt(reversed_model, **LORA), tmp_path / "wrong", merge_adapter=True)


def _add_layer_in_silence(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))


def _drop_layer_in_silence(model):
    del model.model.layers[-1]


def _cut_embedding_in_silence(model):
    model.model.embed_tokens = torch.nn.Embedding(7, 32)


@pytest.mark.parametrize(
    "edit", [_add_layer_in_silence, _drop_layer_in_silence, _cut_embedding_in_silence]
)
def test_a_model_that_does_not_fit_its_config_is_not_merged(edit, llama, tmp_path):
    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.errors import ExportError

    model = load(llama / "inner")
    edit(model)
    with pytest.raises(ExportError, match="config"):
        export_model(adapt(model, **LORA), tmp_path / "merged", merge_adapter=True)
    assert list(tmp_path.iterdir()) == []


def _merge_scaled(directory, folder):
    """Merge one of two adapters, whose scales were changed; the other one has more layers."""
    from peft import LoraConfig

    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.distributed import is_main

    model = adapt(load(directory / "inner"), **LORA)
    model.add_adapter("second", LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    change(model, "lora_")
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("default", 3.0)
    alone = copy.deepcopy(model)
    alone.delete_adapter("second")
    if is_main():
        merge(alone).save_pretrained(folder / "stock")
    export_model(shard(model), folder / "merged", merge_adapter=True)
    export_model(shard(alone), folder / "merged alone", merge_adapter=True)


def test_an_adapter_is_merged_with_its_scale_beside_another_on_more_layers(llama, tmp_path):
    run_ranks(_merge_scaled, 2, llama, tmp_path)
    assert_same_tensors(tmp_path / "stock", tmp_path / "merged")
    assert_same_tensors(tmp_path / "stock", tmp_path / "merged alone")


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_an_adapter_is_merged_into_the_dequantized_weights_of_a_quantized_base(kind, tmp_path):
    from hf_fsdp_recipes import export_checkpoint

    base = quantized.make(tmp_path / "base", kind)
    model = adapt(quantized.stock_model(base), target_modules=["q_proj"])
    model.save_pretrained(tmp_path / "adapter")
    merged = export_checkpoint(tmp_path / "adapter", tmp_path / "merged", merge_adapter=True)
    expected = merge(model, torch.bfloat16).state_dict()
    found = load(merged, torch.bfloat16).state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def _merge_one_of_two_packed(directory, folder):
    from accelerate import Accelerator
    from peft import LoraConfig

    from hf_fsdp_recipes import export_model, load_model

    packed = BitsAndBytesConfig(**NF4)
    model = load_model(directory / "inner", quantization_config=packed, dtype="bfloat16")
    model = adapt(model, **LORA)
    model.add_adapter("second", LoraConfig(target_modules=["k_proj"], task_type="CAUSAL_LM"))
    model, _ = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    export_model(model, folder / "adapter")
    export_model(model, folder / "merged", merge_adapter=True)


def test_one_of_two_adapters_of_a_packed_model_is_merged(llama, tmp_path):
    from peft import PeftModel

    inputs = (_merge_one_of_two_packed, 2, llama, tmp_path)
    run_ranks(*inputs, environment=fsdp_environment(FSDP2))
    base = load(llama / "inner", torch.bfloat16)
    stock = PeftModel.from_pretrained(base, tmp_path / "adapter")
    merge(stock, torch.bfloat16).save_pretrained(tmp_path / "stock")
    assert_same_tensors(tmp_path / "stock", tmp_path / "merged")


def test_an_offline_merge_that_needs_what_is_not_saved_is_refused(llama, tmp_path):
    import peft

    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    config = peft.VeraConfig(target_modules=["q_proj"], save_projection=False)
    peft.get_peft_model(load(llama / "inner"), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ExportError, match=r"is not saved with the adapter|cannot be merged here"):
        export_checkpoint(tmp_path / "adapter", tmp_path / "merged", merge_adapter=True)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_the_config_has_the_dtype_of_stock(dtypes, llama, tmp_path):
    from hf_fsdp_recipes import export_model

    model = load(llama / "inner").to(dtypes[0])
    model.lm_head.to(dtypes[1])
    model.save_pretrained(tmp_path / "stock")
    export_model(model, tmp_path / "export")
    assert_same_files(tmp_path / "stock", tmp_path / "export")
