"""Divides an export into steps.

Each step reads a few tensors and computes some of the files' tensors from them. Names and shapes in
the files are those of `save_pretrained`. Its conversion is applied twice: to meta tensors for the
plan, and to each step's real tensors during writing.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export.files import OptionalDtype, Tensors
from hf_fsdp_recipes.export.sources import Source, Sources, on_meta
from hf_fsdp_recipes.upstream.transformers_internals import revert_weight_conversion


@dataclass(frozen=True, eq=False)
class Step:
    """Computes tensors from the sources named in `inputs`."""

    inputs: list[str]
    outputs: Tensors  # the computed tensors, on meta
    compute: Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class Plan:
    """What an export writes."""

    shell: PreTrainedModel
    steps: list[Step]
    sources: Sources
    outputs: Tensors  # all outputs of the steps, in the order in which they fill the files


def copy_step(
    name: str,
    key: str,
    source: Source,
    dtype: OptionalDtype,
) -> Step:
    """Return a step that writes a source under the name `name`. `dtype` is as in `on_meta`."""
    return Step(
        [key],
        {name: on_meta(source.meta, dtype)},
        lambda tensors: {name: tensors[key]},
    )


def outputs_of(steps: Iterable[Step]) -> Tensors:
    """Return the outputs of all steps."""
    return {name: value for step in steps for name, value in step.outputs.items()}


def plan_in_file_format(
    model: PreTrainedModel,
    steps: list[Step],
    sources: Sources,
) -> Plan:
    """Return a plan that writes parameters in the format of `save_pretrained`.

    `steps` compute these parameters. If transformers converts several parameters of one layer
    together, they form one step.
    """
    expected = revert_weight_conversion(model, outputs_of(steps))
    layers = defaultdict(list)
    for step in steps:
        match = re.match(r".*?\.\d+\.", next(iter(step.outputs)))  # up to the first number
        layers[match[0] if match else ""].append(step)
    converted = []
    for layer in layers.values():
        together = []
        for step in layer:
            alone = _convert([step], model, expected)
            if not alone:
                together.append(step)
            converted += alone
        if together:
            converted += _convert(together, model, expected)
    names = [name for step in converted for name in step.outputs]
    if sorted(names) != sorted(expected):
        raise ExportError(
            f"transformers makes {sorted(expected.keys() - names)[:3]} from several layers. "
            "Gather the model and use save_pretrained."
        )
    return Plan(model, converted, sources, expected)


def _convert(
    steps: list[Step],
    model: PreTrainedModel,
    expected: Tensors,
) -> list[Step]:
    """Join steps into one step with outputs in the files' format.

    Return an empty list if this needs tensors of other steps.
    """

    def compute(tensors: Tensors) -> Tensors:
        computed: Tensors = {}
        for step in steps:
            computed |= step.compute(tensors)
        return revert_weight_conversion(model, computed)

    try:
        outputs = revert_weight_conversion(model, outputs_of(steps))
    except Exception:  # a conversion needs a tensor that these steps lack
        return []
    for name, value in outputs.items():
        if name not in expected or value.shape != expected[name].shape:
            return []
    return [Step([name for step in steps for name in step.inputs], outputs, compute)]
