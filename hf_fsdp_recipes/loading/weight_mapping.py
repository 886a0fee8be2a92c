"""Which checkpoint tensors make up which parameter, as ordered runs of whole bytes.

transformers renames, fuses and splits some checkpoints while loading (`core_model_loading.py`), MoE experts
above all. Seen as bytes, fusing experts is concatenation: a parameter is a list of `TensorRange`s, each a run of
elements of one stored tensor. The pieces are found by sending row numbers instead of weights through
transformers' own conversion, so nothing of it is copied here, and whatever is not a pure rearrangement of
whole rows is refused by name. Moves no weights.

Source: transformers 5.17 to 5.23, `core_model_loading.rename_source_key`, `revert_weight_conversion`.
"""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_fsdp_recipes.errors import LoadError


@dataclass(frozen=True)
class TensorRange:
    """`num_elements` of a stored tensor, from `start`, that come next in a parameter's row-major order."""

    tensor: str
    shape: tuple[int, ...]
    start: int
    num_elements: int


class WeightMapping:
    """The conversions of one transformers model. Every rank may hold one; no collectives."""

    def __init__(self, model: Any) -> None:
        try:
            from transformers import conversion_mapping, core_model_loading
        except ImportError as error:  # pragma: no cover - older transformers are refused by the requirements
            raise LoadError(f"transformers has no core_model_loading ({error}). Remedy: install >= 5.17.") from error
        self._upstream = core_model_loading
        self._model = model
        self._transforms = conversion_mapping.get_model_conversion_mapping(model)
        self._renamings = [t for t in self._transforms if isinstance(t, core_model_loading.WeightRenaming)]
        self._converters = [t for t in self._transforms if isinstance(t, core_model_loading.WeightConverter)]

    def to_parameters(
        self, stored_shapes: Mapping[str, tuple[int, ...]], parameter_shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, list[TensorRange]], list[str]]:
        """Map a checkpoint onto the parameters and buffers of the model.

        Args:
            stored_shapes: shape of every tensor in the checkpoint, by its name there.
            parameter_shapes: shape of every entry of the model's state dict.

        Returns:
            The pieces of each parameter that the checkpoint holds, and the stored names that fit nowhere.

        Raises:
            LoadError: a conversion that is more than a rearrangement of whole rows.
        """
        names = dict.fromkeys(parameter_shapes, True)
        pieces: dict[str, list[TensorRange]] = {}
        converted: dict[str, tuple[str, list[str]]] = {}
        unexpected = []
        for stored in sorted(stored_shapes, key=self._upstream.dot_natural_key):
            target, pattern = self._rename(stored, names)
            if target not in names:
                unexpected.append(stored)
            elif pattern is None:
                shape = tuple(stored_shapes[stored])
                pieces[target] = [TensorRange(stored, shape, 0, math.prod(shape))]
            else:
                converted.setdefault(target, (pattern, []))[1].append(stored)
        # What save_pretrained, the exporter and `rows_of_parts` undo is what was used now.
        self._model._weight_conversions = [t for t in self._transforms if t.was_used()]
        for target, (pattern, sources) in converted.items():
            pieces.update(self._convert(target, pattern, sources, stored_shapes, parameter_shapes))
        return pieces, unexpected

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
            return self._split_one(target, pattern, sources[0], stored_shapes[sources[0]])
        try:
            parts = rows_of_parts(self._model, target, parameter_shapes[target])
        except Exception as error:
            raise _unsupported(target, sources, str(error)) from error
        if {part.tensor for part in parts} != set(sources):
            lacking = sorted({part.tensor for part in parts} - set(sources))[:3]
            raise _unsupported(target, sources, f"the checkpoint lacks {lacking}" if lacking else "names differ")
        for part in parts:
            if tuple(stored_shapes[part.tensor]) != part.shape:
                raise LoadError(
                    f"tensor {part.tensor!r} has shape {list(stored_shapes[part.tensor])} and the model's {target!r} "
                    f"needs {list(part.shape)}. Remedy: check that the config belongs to the checkpoint."
                )
        return {target: [TensorRange(part.tensor, part.shape, 0, part.num_elements) for part in parts]}

    def _split_one(
        self, target: str, pattern: str, source: str, shape: tuple[int, ...]
    ) -> dict[str, list[TensorRange]]:
        """Find which rows of one stored tensor go to which parameters (a fused qkv, say)."""
        converter = copy.deepcopy(next(c for c in self._converters if pattern in c.source_patterns))
        converter.add_tensor(target, source, pattern, _row_numbers(shape))
        try:
            outputs = converter.convert(target, model=self._model, config=self._model.config)
            width = shape[-1] if len(shape) > 1 else 1
            result = {}
            for name, rows in outputs.items():
                rows = rows[0] if isinstance(rows, list) else rows
                result[name] = [TensorRange(source, tuple(shape), _first_row(rows) * width, rows.numel() * width)]
            return result
        except Exception as error:
            raise _unsupported(target, [source], str(error)) from error


def remember(model: Any) -> None:
    """Let a model that nobody loaded remember its conversions, as `from_pretrained` does. Any rank; no collective.

    transformers would look them up again for each name, and go through all modules each time.
    """
    if getattr(model, "_weight_conversions", None) is None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        found = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [conversion for conversion in found if not isinstance(conversion, PrefixChange)]


def rows_of_parts(model: Any, name: str, shape: tuple[int, ...]) -> list[TensorRange]:
    """Cut a parameter into the tensors that `save_pretrained` writes for it, in row-major order.

    Args:
        model: the transformers model, its conversions as loaded.
        name: the parameter's name in the model's own state dict, without wrappers.
        shape: the parameter's whole shape.

    Returns:
        Pieces of the parameter: `tensor` and `shape` of what is written, `start` and `num_elements` in elements
        of the parameter. Together they cover it exactly once.

    Raises:
        ValueError: the conversion is more than a rearrangement of whole rows of this one parameter.
    """
    from transformers.core_model_loading import revert_weight_conversion

    width = shape[-1] if len(shape) > 1 else 1
    surrogate = _row_numbers(shape)
    parts = []
    for stored, rows in revert_weight_conversion(model, {name: surrogate}).items():
        stored_shape = (*rows.shape[:-1], width) if len(shape) > 1 else tuple(rows.shape)
        parts.append(TensorRange(stored, tuple(stored_shape), _first_row(rows) * width, rows.numel() * width))
    parts.sort(key=lambda part: part.start)
    end = 0
    for part in parts:
        if part.start != end:
            raise ValueError(f"the parts of {name} leave a gap or overlap at element {end}")
        end += part.num_elements
    if end != math.prod(shape):
        raise ValueError(f"the parts of {name} cover {end} of {math.prod(shape)} elements")
    return parts


def _row_numbers(shape: Iterable[int]) -> torch.Tensor:
    """Stand in for a weight: same shape but for a last dimension of 1, each entry its own row number."""
    shape = tuple(shape)
    rows = (*shape[:-1], 1) if len(shape) > 1 else shape
    return torch.arange(math.prod(rows)).reshape(rows)


def _first_row(rows: torch.Tensor) -> int:
    flat = rows.reshape(-1)
    first = int(flat[0])
    if not torch.equal(flat, torch.arange(first, first + flat.numel())):
        raise ValueError("the conversion mixes rows")
    return first


def _unsupported(target: str, sources: list[str], reason: str) -> LoadError:
    return LoadError(
        f"transformers builds {target!r} from {sources[0]!r} and {len(sources) - 1} more in a way that cannot be read "
        f"slice by slice ({reason}). Rule: never a wrong tensor. Remedy: load once with from_pretrained, save with "
        f"save_pretrained(save_original_format=False), and load that."
    )
