"""What a script does to a model before its weights are loaded has stock's result, or is refused."""

import copy
import pickle

import pytest
import torch
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM

from tests.conftest import tiny_config
from tests.loading.stock import compare, randomize


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


def _back_up(model):
    model.start = {name: value.clone() for name, value in model.state_dict().items()}


def _concatenate(model):
    model.start = torch.nn.utils.parameters_to_vector(model.parameters())


def _measure_together(model):
    model.norms = torch._foreach_norm(list(model.parameters()))


def _embed(model):
    model.start = model.model.embed_tokens(torch.tensor([1]))


def _pickle(model):
    model.size = len(pickle.dumps(model.state_dict()))


def _normalize_weight(model):
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


def _start_another(model):
    new = torch.nn.Linear(*_weight(model).T.shape, bias=False)
    with torch.no_grad():
        new.weight.copy_(_weight(model))
    model.model.layers[0].mlp.up_proj = new


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
    _back_up,
    _concatenate,
    _measure_together,
    _embed,
    _pickle,
    _normalize_weight,
    _start_another,
    _scale_data,
    _take_data_of_another,
    _cut_data,
)


def test_reading_a_weight_before_it_is_loaded_is_refused(llama):
    case = {"directory": llama, "must_refuse": True, "refusal": "a weight is read before"}
    compare({read.__name__: case | {"edit": read} for read in READS})


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


NEEDS_NO_VALUES = (
    _initialize_again,
    _ask,
    _wrap_weights_again,
    _wrap_data,
    _copy_a_weight,
    _share_a_weight,
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


CASTS = (_to_bfloat16, _bfloat16, _half, _double, _cpu, _up_and_down, _cast_data)


@pytest.mark.parametrize("source", ["rank0", "direct"])
def test_a_cast_has_the_values_of_stock(llama, source):
    cases = {edit.__name__: {"directory": llama, "edit": edit} for edit in CASTS}
    cases["widened"] = {"directory": llama, "edit": _down_and_up, "kwargs": {"dtype": "bfloat16"}}
    cases["rounded"] = {"directory": llama, "edit": _down_and_up, "refusal": "read before"}
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


def _scale(model):
    _weight(model).data.mul_(3)


def _scale_one_element(model):
    gate = torch.nn.Linear(1, 1, bias=False)
    gate.weight = copy.deepcopy(_weight(model))
    _scale(model)


def _zero_padding(model):
    model.model.embed_tokens.weight.data[0].zero_()


def _set_row(model):
    with torch.no_grad():
        model.model.embed_tokens.weight[3] = 1.0


def _orthogonalize(model):
    torch.nn.init.orthogonal_(_weight(model))


CHANGES = (_scale, _scale_one_element, _zero_padding, _set_row, _orthogonalize)


def test_a_change_of_old_values_is_refused(llama):
    text = "changed before it (is|was) loaded"
    case = {"directory": llama, "must_refuse": True, "refusal": text}
    compare({change.__name__: case | {"edit": change} for change in CHANGES})
