"""Compares models of `load_model`, sharded on two ranks, with those of stock `from_pretrained`.

A case is a dict with the `directory` and, if needed, an `edit` of the loaded model, its
`auto_class`, settings of `lora` and arguments of from_pretrained (`kwargs`). If ours may refuse
what stock loads, `refusal` is a pattern of the error's text; with `must_refuse`, ours must.
`fails_in_stock` is true if both must raise an error.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks

WRAPPER = "_checkpoint_wrapped_module."
Case = dict[str, Any]
Values = dict[str, tuple]  # {name of a parameter or buffer: what must be equal}


def compare(
    cases: dict[str, Case], fsdp: dict[str, Any] | None = None, source: str = "rank0"
) -> None:
    """Load every case with stock and with ours; fail with the names of the cases that differ."""
    environment = fsdp_environment(FSDP2 | (fsdp or {}))
    expected = run_ranks(load_all, 1, "stock", cases)[0]
    first, second = run_ranks(load_all, 2, source, cases, environment=environment)
    found = {
        name: _problem(expected[name], first[name], second[name], **case)
        for name, case in cases.items()
    }
    lines = [f"{name}: {problem}" for name, problem in found.items() if problem]
    if lines:
        pytest.fail("\n".join(lines))


def _problem(
    expected: Any,
    first: Any,
    second: Any,
    refusal: str | None = None,
    fails_in_stock: bool = False,
    must_refuse: bool = False,
    **unused: Any,
) -> str | None:
    """Return what is wrong with a case."""
    if isinstance(expected, tuple) is not fails_in_stock:
        return f"stock: {expected if isinstance(expected, tuple) else 'no error'}"
    if first != second:
        return f"the ranks differ: {_short(first)} and {_short(second)}"
    if isinstance(first, tuple):
        kind, text = first
        may_refuse = fails_in_stock or refusal
        if may_refuse and kind == "LoadError" and re.search(refusal or "", text):
            return None
        return f"{kind}: {text}"
    if fails_in_stock or must_refuse:
        return "it loads"
    names = sorted(expected.keys() | first.keys())
    different = [name for name in names if expected.get(name) != first.get(name)]
    if not different:
        return None
    name = different[0]
    example = f"{name} is {first.get(name)}, not {expected.get(name)}"
    return f"{len(different)} of {len(names)} differ: {example}"


def _short(values: Any) -> str:
    return "values" if isinstance(values, dict) else f"{values}"


def load_all(loader: str, cases: dict[str, Case]) -> dict[str, Any]:
    """Return the values of each case, or the error's class and text."""
    from accelerate.state import AcceleratorState

    found: dict[str, Any] = {}
    for name, case in cases.items():
        # It keeps the layer classes of the model before.
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            found[name] = _load(loader, **case)
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
    return found


def _load(
    loader: str,
    directory: Path | str,
    edit: Callable[[Any], Any] | None = None,
    lora: dict[str, Any] | None = None,
    **options: Any,
) -> Values:
    model = load(loader, directory, **options)
    if edit:
        torch.manual_seed(1)
        model = edit(model) or model
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(2)
        model = get_peft_model(model, LoraConfig(**lora))
    if loader != "stock":
        from accelerate import Accelerator

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _ = Accelerator(cpu=True).prepare(model, optimizer)
    return values_of(model)


def load(
    loader: str,
    directory: Path | str,
    auto_class: Any = "AutoModelForCausalLM",
    hub: Path | None = None,
    kwargs: dict[str, Any] | None = None,
    stock_kwargs: dict[str, Any] | None = None,
    **unused: Any,
) -> Any:
    """Load a model; `hub` is the cache of Hub models, and `stock_kwargs` are only for stock."""
    import transformers

    if hub:
        _use_hub(hub)
    model_class = auto_class
    if isinstance(auto_class, str):
        model_class = getattr(transformers, auto_class)
    if loader == "stock":
        arguments = (kwargs or {}) | (stock_kwargs or {})
        return model_class.from_pretrained(str(directory), **arguments)
    from hf_fsdp_recipes import load_model

    return load_model(str(directory), source=loader, auto_class=model_class, **(kwargs or {}))


def values_of(model: Any) -> Values:
    """Return what must be equal of each full parameter and buffer. Collective."""
    found: Values = {}
    for name, value in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name.replace(WRAPPER, "")] = (*_described(full), value.requires_grad)
    for name, module in model.named_modules():
        scales = getattr(module, "quant_state", None)
        if scales is not None:
            found[f"scales of {name.replace(WRAPPER, '')}"] = _described(scales.absmax)
    if hasattr(model, "behaviour"):
        found["behaviour"] = (model.behaviour,)
    return found


def _described(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha1(values).hexdigest()


def _use_hub(folder: Path) -> None:
    """Let the Hub's cache be in a folder. Each rank has a folder of its own for models' code."""
    from huggingface_hub import constants
    from transformers import dynamic_module_utils

    constants.HF_HUB_CACHE = str(folder / "hub")
    dynamic_module_utils.HF_MODULES_CACHE = str(folder / f"modules-{os.environ['RANK']}")


@torch.no_grad()
def randomize(model: Any) -> Any:
    """Give every parameter and persistent buffer random values."""
    torch.manual_seed(0)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.normal_().mul_(0.1)
        else:
            value.fill_(7)
    return model


def write(tensors: dict[str, torch.Tensor], file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Edit the tensors of a directory's model.safetensors."""
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    write(tensors, directory / "model.safetensors")
    return directory


def change_config(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
