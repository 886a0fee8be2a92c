"""Maps each parameter to ranges of checkpoint tensors.

transformers renames, fuses and splits the tensors of some checkpoints while loading (`core_model_loading.py`), especially
MoE experts. Fusing experts concatenates their bytes, so a parameter is described by a list of `TensorRange`s. To find the
ranges, this module passes row numbers instead of weights through transformers' own conversion. A conversion that does more than
rearrange full rows is an error.

Source: transformers 5.18 to 5.23, `core_model_loading.rename_source_key`, `revert_weight_conversion`.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.units import count

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

    from hf_fsdp_recipes.loading.safetensors_index import StoredTensor


@dataclass(frozen=True)
class TensorRange:
    """A part of a parameter: `num_elements` from element `start` of the stored `tensor`, which has shape `shape`."""

    tensor: str
    shape: tuple[int, ...]
    start: int
    num_elements: int


class WeightMapping:
    """The weight conversions of one transformers model.

    Attributes:
        mismatched: names of the parameters and buffers for which `to_parameters` found one tensor, but in another shape.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        from transformers import conversion_mapping, core_model_loading

        self._upstream = core_model_loading
        self.mismatched: set[str] = set()
        self._model = model
        self._transforms = conversion_mapping.get_model_conversion_mapping(model)
        self._renamings = [t for t in self._transforms if isinstance(t, core_model_loading.WeightRenaming)]
        self._converters = [t for t in self._transforms if isinstance(t, core_model_loading.WeightConverter)]

    def to_parameters(
        self, stored_shapes: Mapping[str, tuple[int, ...]], parameter_shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, list[TensorRange]], list[str]]:
        """Map the tensors of a checkpoint to the parameters and buffers of the model.

        Returns:
            For each parameter or buffer, the checkpoint's ranges that fill it; and the names of stored tensors that fill none.
        """
        names = dict.fromkeys(parameter_shapes, True)
        ranges: dict[str, list[TensorRange]] = {}
        converted: dict[str, tuple[str, list[str]]] = {}
        unexpected = []
        for stored in sorted(stored_shapes, key=self._upstream.dot_natural_key):
            target, pattern = self._rename(stored, names)
            if target not in names:
                unexpected.append(stored)
            elif pattern is None:
                shape = tuple(stored_shapes[stored])
                ranges[target] = [TensorRange(stored, shape, 0, math.prod(shape))]
                if shape != tuple(parameter_shapes[target]):
                    self.mismatched.add(target)
            else:
                converted.setdefault(target, (pattern, []))[1].append(stored)
        # save_pretrained and `stored_ranges` revert the conversions that are recorded here.
        self._model._weight_conversions = [t for t in self._transforms if t.was_used()]
        for target, (pattern, sources) in converted.items():
            ranges.update(self._convert(target, pattern, sources, stored_shapes, parameter_shapes))
        return ranges, unexpected

    def is_unchanged(self, name: str, names: Iterable[str]) -> bool:
        """Return whether a stored tensor called `name` is loaded as the parameter `name` without conversion.

        `names` are the names of all parameters.
        """
        target, pattern = self._rename(name, dict.fromkeys(names, True))
        return target == name and (pattern is None or _keeps_shapes(self._converter(pattern)))

    def _converter(self, pattern: str) -> "WeightConverter":
        return next(converter for converter in self._converters if pattern in converter.source_patterns)

    def _rename(self, stored: str, names: Mapping[str, bool]) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        rename = self._upstream.rename_source_key
        target, pattern = rename(stored, self._renamings, self._converters, prefix, names)
        if target not in names and stored in names:
            target, pattern = rename(stored, [], [], prefix, names)
        return target, pattern

    def _convert(
        self,
        target: str,
        pattern: str,
        sources: list[str],
        stored_shapes: Mapping[str, tuple[int, ...]],
        parameter_shapes: Mapping[str, tuple[int, ...]],
    ) -> dict[str, list[TensorRange]]:
        if len(sources) == 1:
            return self._split(target, pattern, sources[0], tuple(stored_shapes[sources[0]]), parameter_shapes)
        try:
            parts = stored_ranges(self._model, target, parameter_shapes[target])
        except Exception as error:
            raise _unsupported(target, sources, str(error)) from error
        if {part.tensor for part in parts} != set(sources):
            missing = sorted({part.tensor for part in parts} - set(sources))[:3]
            raise _unsupported(target, sources, f"the checkpoint lacks {missing}" if missing else "names differ")
        for part in parts:
            if tuple(stored_shapes[part.tensor]) != part.shape:
                raise LoadError(
                    f"tensor {part.tensor!r} has shape {list(stored_shapes[part.tensor])}, but the model's {target!r} needs "
                    f"{list(part.shape)}. Check that config.json belongs to the checkpoint."
                )
        return {target: [TensorRange(part.tensor, part.shape, 0, part.num_elements) for part in parts]}

    def _split(
        self,
        target: str,
        pattern: str,
        source: str,
        shape: tuple[int, ...],
        parameter_shapes: Mapping[str, tuple[int, ...]],
    ) -> dict[str, list[TensorRange]]:
        """Find which rows of one stored tensor, such as a fused qkv, belong to each parameter."""
        converter = copy.deepcopy(self._converter(pattern))
        if shape == parameter_shapes.get(target) and _keeps_shapes(converter):
            return {target: [TensorRange(source, shape, 0, math.prod(shape))]}
        converter.add_tensor(target, source, pattern, _row_numbers(shape))
        try:
            outputs = converter.convert(target, model=self._model, config=self._model.config)
            width = shape[-1] if len(shape) > 1 else 1
            result = {}
            for name, rows in outputs.items():
                rows = _without_columns(rows[0] if isinstance(rows, list) else rows, shape)
                result[name] = [TensorRange(source, tuple(shape), _first_row(rows) * width, rows.numel() * width)]
                if _without_ones((*rows.shape, width)) != _without_ones(parameter_shapes[name]):
                    self.mismatched.add(name)
            return result
        except Exception as error:
            raise _unsupported(target, [source], str(error)) from error


def map_checkpoint(
    model: "PreTrainedModel",
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, "StoredTensor"],
    name_or_path: str,
    ignore_mismatched: bool,
) -> tuple[dict[str, list[TensorRange]], list[str]]:
    """Map a checkpoint's tensors to a model's parameters and buffers, and check their shapes and dtypes.

    Returns:
        As `WeightMapping.to_parameters`, without the entries whose shape differs.

    Raises:
        LoadError: a tensor's shape is not its parameter's and `ignore_mismatched` is False; or a parameter is made of tensors
            of different dtypes.
    """
    mapping = WeightMapping(model)
    ranges, unexpected = mapping.to_parameters({name: tensor.shape for name, tensor in stored.items()}, shapes)
    mismatched = {
        name: f"{name}: {list(r[0].shape)} in the checkpoint, {list(shapes[name])} in the config"
        for name, r in ranges.items()
        if name in mapping.mismatched
    }
    if mismatched and not ignore_mismatched:
        raise LoadError(
            f"{len(mismatched)} tensors of {name_or_path} do not have the shape in its config: "
            f"{'; '.join(list(mismatched.values())[:3])}. Check that config.json belongs to the weights, or pass "
            f"ignore_mismatched=True to initialize them."
        )
    ranges = {name: parts for name, parts in ranges.items() if name not in mismatched}
    for name, parts in ranges.items():
        dtypes = {stored[part.tensor].dtype: part.tensor for part in parts}
        if len(dtypes) > 1:
            listed = ", ".join(f"{tensor} in {dtype}" for dtype, tensor in dtypes.items())
            raise LoadError(
                f"{name} is made of tensors of {name_or_path} that have different dtypes: {listed}. Convert the checkpoint to one "
                f"dtype, with from_pretrained(...).save_pretrained(...), and load the result."
            )
    return ranges, unexpected


def set_conversions(model: "PreTrainedModel") -> None:
    """Record the weight conversions of a model in the model, unless `from_pretrained` already recorded them.

    Without the record, transformers would look the conversions up again for every name.
    """
    if getattr(model, "_weight_conversions", None) is None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        found = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [conversion for conversion in found if not isinstance(conversion, PrefixChange)]


def stored_ranges(model: "PreTrainedModel", name: str, shape: tuple[int, ...]) -> list[TensorRange]:
    """Split a parameter into the tensors that `save_pretrained` writes for it, in row-major order.

    Args:
        model: the transformers model, with the weight conversions that `set_conversions` or loading has recorded.
        name: the parameter's name in the model's own state dict, without wrappers.
        shape: shape of the full parameter.

    Returns:
        Ranges that together cover the parameter once. `tensor` and `shape` describe the written tensor; `start` and
        `num_elements` count within the parameter.

    Raises:
        ValueError: the conversion does more than rearrange full rows of this parameter.
    """
    from transformers.core_model_loading import revert_weight_conversion

    width = shape[-1] if len(shape) > 1 else 1
    parts = []
    for stored, numbers in revert_weight_conversion(model, {name: _row_numbers(shape)}).items():
        rows = _without_columns(numbers, shape)
        stored_shape = (*rows.shape, width) if len(shape) > 1 else tuple(rows.shape)
        parts.append(TensorRange(stored, stored_shape, _first_row(rows) * width, rows.numel() * width))
    parts.sort(key=lambda part: part.start)
    end = 0
    for part in parts:
        if part.start != end:
            raise ValueError(f"the parts of {name} leave a gap or overlap at element {end}")
        end += part.num_elements
    if end != math.prod(shape):
        raise ValueError(f"the parts of {name} cover {end} of {math.prod(shape)} elements")
    return parts


def _keeps_shapes(converter: "WeightConverter") -> bool:
    """Return whether a conversion changes a tensor only if it does not have the parameter's shape yet."""
    return all(getattr(operation, "check_dims", False) for operation in converter.operations)


def _row_numbers(shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor to pass through the conversion in place of a weight: each of its rows holds the row's number."""
    shape = tuple(shape)
    rows = shape[:-1] if len(shape) > 1 else shape
    numbers = torch.arange(math.prod(rows)).reshape(rows)
    # Two columns, because transformers before 5.23 drops every dimension of size 1 when it splits experts.
    return numbers.unsqueeze(-1).expand(*rows, 2) if len(shape) > 1 else numbers


def _without_columns(numbers: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return one number per row from what a conversion has made of `_row_numbers(shape)`."""
    return numbers[..., 0] if len(shape) > 1 else numbers


def _without_ones(shape: Sequence[int]) -> list[int]:
    """Drop the dimensions of size 1, as transformers before 5.23 does when it splits experts."""
    return [size for size in shape if size != 1]


def _first_row(rows: torch.Tensor) -> int:
    flat = rows.reshape(-1)
    first = int(flat[0])
    if not torch.equal(flat, torch.arange(first, first + flat.numel())):
        raise ValueError("the conversion mixes rows")
    return first


def _unsupported(target: str, sources: list[str], reason: str) -> LoadError:
    others = f" and {count(len(sources) - 1, 'more tensor')}" if len(sources) > 1 else ""
    return LoadError(
        f"transformers builds {target!r} from {sources[0]!r}{others} in a way that cannot be read "
        f"shard by shard ({reason}). Load the model once with from_pretrained, save it with "
        f"save_pretrained(save_original_format=False), and load that."
    )
