"""Divides an export into steps. Each step reads a few tensors and computes some of the files' tensors from them.

Names and shapes in the files are those of `save_pretrained`. Its conversion is applied twice: to meta tensors for the plan,
and to each step's real tensors during writing.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export.sources import Source
from hf_fsdp_recipes.upstream.transformers_internals import revert_weight_conversion

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Step:
    """Computes tensors from the sources named in `inputs`. `outputs` are the computed tensors, on meta."""

    inputs: tuple[str, ...]
    outputs: Tensors
    compute: Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class Plan:
    """What an export writes: its steps, their sources, and all outputs in the order in which they fill the files."""

    steps: list[Step]
    sources: Mapping[str, Source]
    outputs: Tensors


def copy_step(name: str, meta: torch.Tensor, source: str) -> Step:
    """Return a step that writes a source under the name `name`."""
    return Step((source,), {name: meta}, lambda tensors: {name: tensors[source]})


def rename_outputs(step: Step, names: Mapping[str, str]) -> Step:
    """Return the same step with its outputs renamed. `names` maps old names to new names."""
    outputs = {names[name]: value for name, value in step.outputs.items()}
    return Step(
        step.inputs,
        outputs,
        lambda tensors: {names[k]: v for k, v in step.compute(tensors).items()},
    )


def plan_in_file_format(
    model: PreTrainedModel,
    names: Iterable[str],
    steps: Iterable[Step],
    sources: Mapping[str, Source],
) -> Plan:
    """Return a plan that writes the parameters `names` in the format of `save_pretrained`. `steps` compute these parameters.

    If transformers converts several parameters of one layer together, they form one step.
    """
    steps = list(steps)
    outputs = _outputs(steps)
    expected = revert_weight_conversion(model, {name: outputs[name] for name in names})
    layers: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        first = next(iter(step.outputs))
        layers["".join(re.findall(r"^.*?\.\d+\.", first))].append(
            step
        )  # the key is the name up to its first number
    converted: list[Step] = []
    for layer in layers.values():
        together = []
        for step in layer:
            alone = _convert([step], model, expected)
            converted.append(alone) if alone is not None else together.append(step)
        if together and (joined := _convert(together, model, expected)) is not None:
            converted.append(joined)
    found = _outputs(converted)
    if found.keys() != expected.keys() or sum(len(step.outputs) for step in converted) != len(
        found
    ):
        missing = sorted(expected.keys() - found.keys())[:3]
        raise ExportError(
            f"transformers makes {missing} from several layers. Gather the model and use save_pretrained."
        )
    return Plan(converted, sources, {name: found[name] for name in expected})


def _convert(steps: list[Step], model: PreTrainedModel, expected: Tensors) -> Step | None:
    """Join steps into one step with outputs in the files' format. Return None if this needs tensors of other steps."""

    def compute(tensors: Tensors) -> Tensors:
        computed = {name: value for step in steps for name, value in step.compute(tensors).items()}
        return revert_weight_conversion(model, computed)

    try:
        outputs = revert_weight_conversion(model, _outputs(steps))
    except Exception:  # a conversion needs a tensor that these steps lack
        return None
    if not all(
        name in expected and value.shape == expected[name].shape for name, value in outputs.items()
    ):
        return None
    return Step(tuple(name for step in steps for name in step.inputs), outputs, compute)


def _outputs(steps: Iterable[Step]) -> Tensors:
    return {name: value for step in steps for name, value in step.outputs.items()}
