"""Every architecture of transformers that can be made small is loaded into shards on two ranks, exported, and read again."""

import functools
import shutil

import pytest

from tests.loading.families import CLASSES, listed, model_types, small_config
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks

PER_RUN = 16
MAX_PARAMETERS = 700_000_000  # vision towers keep their width


def round_trips(auto_class, types, folder):
    """Return on rank 0 {model type: empty string, or why its round trip failed}."""
    from accelerate import PartialState

    from hf_fsdp_recipes import distributed

    PartialState(cpu=True)  # before the first model, or else both ranks would make it
    results = {}
    for model_type in types:
        source = folder / model_type
        try:
            made = distributed.run_on_main(functools.partial(make, auto_class, model_type, source))
        except Exception as error:
            results[model_type] = f"cannot be made: {str(error)[:160]}"
            continue
        try:
            if made:
                results[model_type] = made
            else:
                results[model_type] = round_trip(source)
        except Exception as error:
            results[model_type] = f"{type(error).__name__}: {str(error)[:300]}"
        distributed.barrier()
        if distributed.is_main():
            for path in (source, folder / f"{model_type}-export"):
                shutil.rmtree(path, ignore_errors=True)
    return results


def make(auto_class, model_type, directory):
    import torch

    model_class, config = small_config(auto_class, model_type)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    if num_parameters > MAX_PARAMETERS:
        return f"too large: {num_parameters / 1e6:.0f}M parameters"
    torch.manual_seed(0)
    model_class(config).save_pretrained(directory)
    model_class.from_pretrained(directory)
    return ""


def round_trip(source):
    import torch
    import transformers
    from accelerate import Accelerator

    from hf_fsdp_recipes import distributed, export_model, load_model

    export = source.with_name(f"{source.name}-export")
    model = load_model(source, dtype="float32")
    kind = type(model).__name__
    accelerator = Accelerator()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    export_model(model, export)
    if not distributed.is_main():
        return ""
    model_class = getattr(transformers, kind)
    expected, found = (model_class.from_pretrained(path).state_dict() for path in (source, export))
    if expected.keys() != found.keys():
        return f"other keys: {sorted(expected.keys() ^ found.keys())[:3]}"
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    return f"{len(different)} tensors differ: {different[:3]}" if different else ""


def environment():
    return fsdp_environment(FSDP2 | {"fsdp_auto_wrap_policy": "NO_WRAP"}) | {"HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("auto_class", CLASSES)
def test_every_architecture_is_exported_as_it_came(auto_class, tmp_path):
    types, results = model_types(auto_class), {}
    for first in range(0, len(types), PER_RUN):
        arguments = (auto_class, types[first : first + PER_RUN], tmp_path)
        results |= run_ranks(round_trips, 2, *arguments, environment=environment(), timeout_seconds=900)[0]
    assert {name: reason for name, reason in results.items() if reason and name not in listed(auto_class)} == {}
