"""For every architecture, from its config alone: load_model reads and an export writes the tensor names that transformers saves."""

import pytest
import torch

from hf_fsdp_recipes.export.export_plan import split_parameters
from hf_fsdp_recipes.loading.build_on_meta import build_on_meta
from hf_fsdp_recipes.loading.weight_mapping import WeightMapping, set_conversions
from tests.loading.families import CLASSES, listed, model_types, small_config


def find_fault(config):
    """Return why a model's tensors would not survive load and export, or an empty string."""
    from transformers.core_model_loading import revert_weight_conversion

    model = build_on_meta(config, torch.float32)
    set_conversions(model)
    state = model.state_dict()
    own = {name: tensor for name, tensor in state.items() if name not in model.all_tied_weights_keys}
    saved = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, dict(own)).items()}
    parts = split_parameters(model, {name: tuple(tensor.shape) for name, tensor in own.items()})
    exported = {part.tensor: part.shape for ranges in parts.values() for part in ranges}
    # Parameters that cannot be split keep their name in the transformers model.
    if different := {name for name in exported.keys() - saved.keys() if name not in own}:
        return f"names that transformers does not save: {sorted(different)[:3]}"
    for shapes in (saved, exported):
        reader = WeightMapping(build_on_meta(config, torch.float32))
        ranges, unexpected = reader.to_parameters(shapes, {name: tuple(tensor.shape) for name, tensor in state.items()})
        if unexpected:
            return f"not read: {unexpected[:3]}"
        if reader.mismatched:
            return f"of another shape: {sorted(reader.mismatched)[:3]}"
        num_read = {name: sum(part.num_elements for part in ranges.get(name, [])) for name in own}
        if incomplete := [name for name, tensor in own.items() if num_read[name] != tensor.numel()]:
            return f"incomplete: {incomplete[:3]}"
    return ""


@pytest.mark.parametrize("auto_class", CLASSES)
def test_names_of_every_architecture_survive_load_and_export(auto_class):
    faults = {}
    for model_type in set(model_types(auto_class)) - listed(auto_class):
        try:
            faults[model_type] = find_fault(small_config(auto_class, model_type)[1])
        except Exception as error:
            faults[model_type] = f"{type(error).__name__}: {error}"
    assert {model_type: fault for model_type, fault in faults.items() if fault} == {}
