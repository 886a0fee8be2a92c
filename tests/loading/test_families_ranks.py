"""Every architecture of transformers that can be made small loads as by from_pretrained.

It also exports as by save_pretrained.
"""

import shutil

import pytest
import torch

from tests.export.cases import assert_same_tensors
from tests.loading.families import CLASSES, LIMITS, MAX_PARAMETERS, build, model_types
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks

PER_RUN = 16


def _round_trips(auto_class, types, folder):
    """Return, for each type, why its round trip fails, or None.

    Types that transformers cannot make small are left out.
    """
    from accelerate.state import AcceleratorState, PartialState

    from hf_fsdp_recipes import distributed
    from hf_fsdp_recipes.upstream import patches

    patches.enable_cpu_ranks()
    results = {}
    for model_type in types:
        # It keeps the layer classes of the model before.
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True)
        try:
            state = distributed.run_on_main(lambda name=model_type: _make(auto_class, name, folder))
        except Exception:
            continue
        try:
            results[model_type] = _compare(*state, folder)
        except Exception as error:
            results[model_type] = f"{type(error).__name__}: {error}"[:300]
        distributed.gather(None)  # before the next model takes the place of this one
    return results


def _make(auto_class, model_type, folder):
    """Save a model, and the same model loaded by transformers; return its class and values."""
    shutil.rmtree(folder, ignore_errors=True)
    with torch.device("meta"):
        parameters = build(auto_class, model_type).parameters()
        assert sum(parameter.numel() for parameter in parameters) < MAX_PARAMETERS
    model = build(auto_class, model_type)
    model.save_pretrained(folder / "source")
    stock = type(model).from_pretrained(folder / "source")
    stock.save_pretrained(folder / "stock")
    return type(model), {name: value.clone() for name, value in stock.state_dict().items()}


def _compare(model_class, state, folder):
    """Load a model on all ranks and export it; return what differs from transformers."""
    from accelerate import Accelerator

    from hf_fsdp_recipes import distributed, export_model, load_model

    model = load_model(folder / "source", auto_class=model_class, dtype="float32")
    model, _ = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = {
        name: v.full_tensor() if hasattr(v, "full_tensor") else v
        for name, v in model.state_dict().items()
    }
    export_model(model, folder / "export")
    if distributed.is_main():
        assert_same_tensors(folder / "stock", folder / "export")
    different = [
        name for name in state.keys() | found.keys() if not _equal(state.get(name), found.get(name))
    ]
    return f"{different[:3]} differ" if different else None


def _equal(one, other):
    return (
        one is not None
        and other is not None
        and one.dtype == other.dtype
        and torch.equal(one, other)
    )


def _run(auto_class, types, folder):
    results = {}
    environment = fsdp_environment(FSDP2)
    for first in range(0, len(types), PER_RUN):
        arguments = (auto_class, types[first : first + PER_RUN], folder)
        results |= run_ranks(
            _round_trips, 2, *arguments, environment=environment, timeout_seconds=900
        )[0]
    return results


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3_text", "nemotron_h", "qwen3"])
def test_a_few_architectures_load_and_export_as_by_transformers(name, tmp_path):
    auto_class = "AutoModelForSequenceClassification" if name == "qwen3" else "AutoModelForCausalLM"
    assert _run(auto_class, [name], tmp_path / "models") == {name: None}


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("auto_class", CLASSES)
def test_all_architectures_load_and_export_as_by_transformers_or_name_a_limit(auto_class, tmp_path):
    results = _run(auto_class, model_types(auto_class), tmp_path / "models")
    unknown = {
        name: reason
        for name, reason in results.items()
        if reason and not any(text in reason for text in LIMITS)
    }
    assert unknown == {}
    assert sum(reason is None for reason in results.values()) > 50
