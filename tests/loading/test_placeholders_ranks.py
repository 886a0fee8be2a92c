"""What a script does to a model before its weights are loaded has stock's result, or is refused."""

import copy
import functools
import pickle

import pytest
import torch
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM

from tests.conftest import tiny_config
from tests.loading.stock import compare, randomize
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return the directory of a model that has random float32 values everywhere."""
    directory = tmp_path_factory.mktemp("llama")
    randomize(AutoModelForCausalLM.from_config(tiny_config("llama"))).save_pretrained(directory)
    return directory


def _weight(model):
    return model.model.layers[0].mlp.up_proj.weight


# Reading values.


def _mask(model):
    model.mask = _weight(model) > 0


def _mask_of_data(model):
    model.mask = _weight(model).data > 0


def _prune(model):
    prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", amount=0.5)


def _choose_largest(model):
    model.largest = _weight(model).data.abs().flatten().topk(10).indices


def _sort_rows(model):
    model.order = _weight(model).detach().norm(dim=1).argsort()


def _replace_nan(model):
    model.start = torch.nan_to_num(_weight(model))


def _choose(model):
    model.start = torch.where(torch.ones(1, dtype=torch.bool), 0.0, _weight(model))


def _clip(model):
    model.start = torch.fmax(torch.zeros(1), _weight(model).T)


def _round(model):
    model.start = _weight(model).int()


def _decompose(model):
    model.start = torch.linalg.svd(_weight(model).data)


def _read_one(model):
    model.start = _weight(model)[0, 0].item()


def _test_one(model):
    model.is_set = bool(_weight(model)[0, 0])


def _test_all(model):
    model.is_equal = torch.equal(_weight(model), _weight(model))


def _to_numpy(model):
    model.start = _weight(model).detach().cpu().numpy()


def _concatenate(model):
    model.start = torch.nn.utils.parameters_to_vector(model.parameters())


def _measure_together(model):
    model.norms = torch._foreach_norm(list(model.parameters()))


def _embed(model):
    start = model.model.embed_tokens(torch.tensor([1])).detach().clone()
    model.start = torch.nn.Parameter(start)


def _pickle(model):
    model.size = len(pickle.dumps(model.state_dict()))


def _normalize_weight(model):
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


def _start_another(model):
    new = torch.nn.Linear(*_weight(model).T.shape, bias=False)
    with torch.no_grad():
        new.weight.copy_(_weight(model))
    model.model.layers[0].mlp.up_proj = new


def _keep_norms(model):
    model.register_buffer("norms", _weight(model).norm(dim=1))


def _take_sign(model):
    _weight(model).data.sign_()


def _replace_nan_in_place(model):
    with torch.no_grad():
        _weight(model).nan_to_num_()


def _scale(model):
    _weight(model).data.mul_(3)


def _transpose(model):
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight = torch.nn.Parameter(projection.weight.data.T)


def _transpose_data(model):
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight.data = projection.weight.data.mT


def _scale_data(model):
    model.lm_head.weight.data = model.lm_head.weight.data * 2


def _take_data_of_another(model):
    layer = model.model.layers[0]
    layer.mlp.up_proj.weight.data = layer.mlp.gate_proj.weight.data


def _cut_data(model):
    model.lm_head.weight.data = model.lm_head.weight.data[:200]


READS = (
    _mask,
    _mask_of_data,
    _prune,
    _choose_largest,
    _sort_rows,
    _replace_nan,
    _choose,
    _clip,
    _round,
    _decompose,
    _read_one,
    _test_one,
    _test_all,
    _to_numpy,
    _concatenate,
    _measure_together,
    _embed,
    _pickle,
    _normalize_weight,
    _keep_norms,
    _take_sign,
    _replace_nan_in_place,
    _scale,
    _start_another,
    _scale_data,
    _take_data_of_another,
    _cut_data,
)


TRANSPOSES = (_transpose, _transpose_data)


def test_reading_a_weight_before_it_is_loaded_is_refused(llama):
    case = {"directory": llama, "must_refuse": True, "refusal": "a weight is read before"}
    compare({read.__name__: case | {"edit": read} for read in READS})


def test_a_transposed_weight_is_refused(llama):
    case = {"directory": llama, "must_refuse": True, "refusal": "loaded"}
    compare({edit.__name__: case | {"edit": edit} for edit in TRANSPOSES})


# What needs no values.


def _initialize_again(model):
    model.apply(model._init_weights)
    model.post_init()


def _ask(model):
    for parameter in model.parameters():
        assert parameter.is_floating_point()
        assert parameter.view(-1).shape == (parameter.numel(),)
        assert torch.zeros_like(parameter).sum() == 0
        assert not parameter.new_ones(2).isnan().any()
        assert repr(parameter)
        assert parameter in {parameter}
        assert torch.ones(1).to(parameter).dtype == parameter.dtype


def _wrap_weights_again(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight)


def _wrap_data(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.data, requires_grad=False)


def _copy_a_weight(model):
    layer = model.model.layers[0]
    layer.mlp.up_proj.weight = copy.deepcopy(layer.mlp.gate_proj.weight)


def _share_a_weight(model):
    layer = model.model.layers[0]
    layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.gate_proj.weight.detach())


def _clone_a_weight(model):
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


def _clone_rows_and_overwrite(model):
    start = model.model.embed_tokens.weight.data[:1].clone()
    model.start = torch.nn.Parameter(start.fill_(3))


NEEDS_NO_VALUES = (
    _initialize_again,
    _ask,
    _wrap_weights_again,
    _wrap_data,
    _copy_a_weight,
    _share_a_weight,
    _clone_a_weight,
    _clone_rows_and_overwrite,
)


def test_what_needs_no_values_has_the_result_of_stock(llama):
    compare({edit.__name__: {"directory": llama, "edit": edit} for edit in NEEDS_NO_VALUES})


# Casts.


def _to_bfloat16(model):
    model.to(torch.bfloat16)


def _bfloat16(model):
    model.bfloat16()


def _half(model):
    model.half()


def _double(model):
    model.double()


def _cpu(model):
    model.cpu()


def _up_and_down(model):
    model.double().to(dtype=torch.bfloat16)


def _cast_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)  # as PEFT does for QLoRA


def _down_and_up(model):
    model.bfloat16().float()


def _down_and_up_at_once(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()


def _down_and_up_in_new_parameters(model):
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = torch.nn.Parameter(linear.weight.data.half().to(torch.float32))


def _to_integers_and_back(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.int32).float()


def _cast_a_copy(model):
    layer = model.model.layers[0]
    layer.mlp.up_proj = copy.deepcopy(layer.mlp.gate_proj).bfloat16().float()


ROUNDS = (_down_and_up, _down_and_up_at_once, _down_and_up_in_new_parameters, _cast_a_copy)


CASTS = (_to_bfloat16, _bfloat16, _half, _double, _cpu, _up_and_down, _cast_data)


@pytest.mark.parametrize("source", ["rank0", "direct"])
def test_a_cast_has_the_values_of_stock(llama, source):
    cases = {edit.__name__: {"directory": llama, "edit": edit} for edit in CASTS}
    cases["widened"] = {"directory": llama, "edit": _down_and_up, "kwargs": {"dtype": "bfloat16"}}
    cases |= {edit.__name__: {"directory": llama, "edit": edit} for edit in ROUNDS}
    refused = {"directory": llama, "must_refuse": True, "refusal": "read before"}
    cases["integers"] = refused | {"edit": _to_integers_and_back}
    compare(cases, source=source)


# Writing values.


def _fill_data(model):
    _weight(model).data.fill_(2.0)


def _draw_data(model):
    _weight(model).data.normal_()


def _draw_and_scale_data(model):
    data = _weight(model).data
    data.normal_().mul_(0.5)
    data += 1


def _draw_detached(model):
    with torch.no_grad():
        _weight(model).detach().uniform_()


def _initialize(model):
    torch.nn.init.kaiming_uniform_(_weight(model))


def _initialize_a_new_parameter(model):
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = torch.nn.Parameter(linear.weight.data)
    linear.weight.data.normal_()


def _load_vector(model):
    weight = _weight(model)
    torch.nn.utils.vector_to_parameters(torch.arange(weight.numel()) / 7, [weight])


def _assign_state(model):
    name = "model.layers.0.mlp.up_proj.weight"
    values = torch.rand(_weight(model).shape)
    model.load_state_dict({name: values}, strict=False, assign=True)


WRITES = (
    _fill_data,
    _draw_data,
    _draw_and_scale_data,
    _draw_detached,
    _initialize,
    _initialize_a_new_parameter,
    _load_vector,
    _assign_state,
)


def test_new_values_of_a_weight_are_kept(llama):
    compare({write.__name__: {"directory": llama, "edit": write} for write in WRITES})


def _zero_padding(model):
    model.model.embed_tokens.weight.data[0].zero_()


def _set_row(model):
    with torch.no_grad():
        model.model.embed_tokens.weight[3] = 1.0


def _orthogonalize(model):
    torch.nn.init.orthogonal_(_weight(model))


def _keep_in_buffer(model):
    model.register_buffer("start", _weight(model).data)


CHANGES = (_zero_padding, _set_row, _orthogonalize, _keep_in_buffer)


def test_what_needs_old_values_later_is_refused(llama):
    text = "before it (is|was) loaded"
    case = {"directory": llama, "must_refuse": True, "refusal": text}
    compare({change.__name__: case | {"edit": change} for change in CHANGES})


# Ranks.


def _add_noise(model):
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    model.register_buffer("noise", torch.randn(4))
    model.register_buffer("mask", torch.randn(4) > 0)
    model.register_buffer("waves", torch.randn(4, dtype=torch.complex64))


def test_buffers_are_those_of_rank_0(llama):
    compare({"noise": {"directory": llama, "edit": _add_noise}})


def _prepare_after(directory, write):
    from accelerate import Accelerator

    from hf_fsdp_recipes import load_model
    from hf_fsdp_recipes.distributed import is_main

    model = load_model(directory)
    if is_main():
        write(model)
    Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _fill(model):
    _weight(model).data.fill_(2.0)


@pytest.mark.parametrize(("write", "text"), [(_fill, "on some ranks only"), (_set_row, "NaN")])
def test_what_only_one_rank_changes_is_one_error(write, text, llama):
    inputs = (_prepare_after, 2, llama, write)
    errors = run_ranks(*inputs, environment=fsdp_environment(FSDP2), expect_failure=True)
    assert {kind for kind, _ in errors} == {"LoadError"}
    assert all(text in message for _, message in errors)


# Adapters that PEFT starts from the weights, and then loads.


def _load_adapter(model, adapter):
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter, is_trainable=True)


def _dora():
    from peft import LoraConfig

    return LoraConfig(use_dora=True, target_modules=["q_proj", "up_proj"], modules_to_save=["norm"])


def _delora():
    from peft import DeloraConfig

    return DeloraConfig(target_modules=["q_proj", "up_proj"])


@pytest.mark.parametrize("config", [_dora, _delora])
def test_a_saved_adapter_is_loaded(config, llama, tmp_path):
    from peft import get_peft_model

    from tests.export.cases import change, load

    model = get_peft_model(load(llama), config())
    change(model, "lora_")
    model.save_pretrained(tmp_path)
    load_it = functools.partial(_load_adapter, adapter=tmp_path)
    compare({"saved": {"directory": llama, "edit": load_it}})
