"""Maps the tensors of a checkpoint to the weights of a model. Reads the weights with transformers' own conversions."""

import copy
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from hf_fsdp_recipes.errors import LoadError, describe
from hf_fsdp_recipes.upstream.transformers_internals import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
    new_value,
    rename_source_key,
)

logger = logging.getLogger(__name__)

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NUM_NAMED = 3  # maximum number of names in a message


@dataclass(frozen=True)
class Entry:
    """One step of loading: a tensor of the checkpoint, tensors that transformers converts together, or a new weight."""

    names: tuple[str, ...]  # names of the entry's weights in the model
    keys: tuple[str, ...]  # names of the entry's tensors in the checkpoint; empty for a new weight
    patterns: tuple[
        str | None, ...
    ]  # for each key, the converter pattern that it matches; None without conversion
    dtype: (
        torch.dtype | None
    )  # the stored floating-point dtype; None stands for the dtype in the model

    @property
    def is_stored(self) -> bool:
        """Whether the weight is in the file and needs no conversion, so that a rank can read only its own rows (dim 0)."""
        return bool(self.keys) and self.patterns[0] is None


class Checkpoint:
    """The safetensors files of one directory. They are opened on first use."""

    def __init__(self, directory: Path, quantizer: HfQuantizer | None = None) -> None:
        self.directory, self.quantizer = directory, quantizer
        self._converters: dict[str, Any] = {}
        self._new: dict[
            str, torch.Tensor
        ] = {}  # initial values of a new head's weights, on rank 0 only

    def __deepcopy__(self, memo: dict[int, Any]) -> "Checkpoint":
        """Return this object itself, so that copies of the model share the open files."""
        return self

    @functools.cached_property
    def files(self) -> dict[str, Any]:
        """The open files as {file name: file}."""
        found = {}
        for file in sorted(self.directory.glob("*.safetensors")):
            try:
                found[file.name] = safe_open(file, "pt")
            except (OSError, SafetensorError) as error:  # neither error names the file
                raise LoadError(
                    f"{file} cannot be read: {describe(error)}. Download or save it again."
                ) from error
        if not found:
            raise LoadError(
                f"{self.directory} has no *.safetensors files. Convert the checkpoint to safetensors."
            )
        return found

    @functools.cached_property
    def file_of(self) -> dict[str, str]:
        """{tensor name: file name}, in the order in which the tensors are stored."""
        return {key: name for name, file in self.files.items() for key in file.offset_keys()}

    def first_dtype(self) -> torch.dtype:
        """Return the dtype of the first floating-point tensor, or float32 if there is none."""
        found = (DTYPES.get(self.slice_of(key).get_dtype()) for key in self.file_of)
        return getattr(torch, next(filter(None, found), "float32"))

    def slice_of(self, key: str) -> Any:
        """Return a lazy tensor: its data is read from the file only when it is indexed."""
        return self.files[self.file_of[key]].get_slice(key)

    def plan(self, model: PreTrainedModel) -> tuple[list[Entry], list[Any] | None]:
        """Return the entries to read for a model, in file order, and the conversions that `save_pretrained` must revert.

        Raises a LoadError if a weight is missing or has the wrong shape. As in `from_pretrained`, the weights of a head are new
        if the checkpoint was saved from a model class without this head.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        groups, conversions = self._group_keys(model, shapes)
        entries = [self._entry(name, *zip(*found, strict=True)) for name, found in groups.items()]
        order = {key: number for number, key in enumerate(self.file_of)}
        entries.sort(key=lambda entry: order[entry.keys[0]])
        return entries + self._find_new(model, entries, shapes), conversions

    def match(self, model: PreTrainedModel) -> dict[str, str]:
        """Map the model's weight names to the checkpoint's tensor names. Weights that transformers converts are left out."""
        groups, _ = self._group_keys(
            model, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        )
        return {name: found[-1][0] for name, found in groups.items() if found[-1][1] is None}

    def _group_keys(
        self, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, list[tuple[str, str | None]]], list[Any] | None]:
        """Return {weight name: [(tensor name, converter pattern or None)]}, and the conversions that were used."""
        transforms = get_model_conversion_mapping(model, None, self.quantizer)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._converters = {pattern: one for one in converters for pattern in one.source_patterns}
        prefix = model.base_model_prefix
        rename = functools.partial(
            rename_source_key, base_model_prefix=prefix, meta_state_dict=shapes
        )
        groups: dict[str, list[tuple[str, str | None]]] = {}
        unexpected = []
        for key in sorted(self.file_of, key=dot_natural_key):
            name, pattern = rename(key, renamings, converters)
            if name not in shapes and key in shapes:
                name, pattern = rename(key, [], [])
            if name in shapes:
                groups.setdefault(name, []).append((key, pattern))
            else:
                unexpected.append(key)
        if unexpected:
            logger.warning(
                "%s has tensors that %s does not use: %s",
                self.directory,
                type(model).__name__,
                some(unexpected),
            )
        used = [one for one in transforms if one.was_used()]
        return (
            groups,
            used if self.quantizer is None else None,
        )  # else save_pretrained would quantize again

    def _entry(self, name: str, keys: tuple[str, ...], patterns: tuple[str | None, ...]) -> Entry:
        if patterns[0] is None:
            dtype = getattr(torch, DTYPES.get(self.slice_of(keys[-1]).get_dtype(), ""), None)
            return Entry((name,), keys[-1:], patterns[-1:], dtype)
        first, *others = self._converters[patterns[0]].target_patterns
        return Entry(
            (name, *(name.replace(first, other) for other in others)), keys, patterns, None
        )

    def _find_new(
        self, model: PreTrainedModel, entries: list[Entry], shapes: Mapping[str, tuple[int, ...]]
    ) -> list[Entry]:
        found = {name: entry for entry in entries for name in entry.names}
        present = set(found)
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        for pair in tied.items():  # files may hold a tied weight under either name, or under both
            one, other = (found.get(name) for name in pair)
            if (
                one
                and other
                and not torch.equal(self.read_rows(one, ...), self.read_rows(other, ...))
            ):
                raise LoadError(
                    f"{' and '.join(pair)} are tied, but differ in the checkpoint. Set tie_word_embeddings=False."
                )
            present |= set(pair) if one or other else set()
        missing = [name for name in shapes if name not in present]
        is_own_class = type(model).__name__ in (model.config.architectures or ())
        new = (
            []
            if is_own_class
            else [n for n in missing if not n.startswith(f"{model.base_model_prefix}.")]
        )
        problems = [f"{name} is missing" for name in missing if name not in new]
        for entry in entries:
            stored = tuple(self.slice_of(entry.keys[0]).get_shape())
            if entry.is_stored and stored != tuple(shapes[entry.names[0]]):
                problems.append(
                    f"{entry.keys[0]} is {list(stored)}, not {list(shapes[entry.names[0]])}"
                )
        if problems:
            raise LoadError(
                f"{self.directory} does not fit {type(model).__name__}: {some(problems)}."
            )
        if new:
            logger.warning(
                "%s has no %s, so the values are new: train them", self.directory, some(new)
            )
        self._new = {name: new_value(model, name) for name in new}
        return [Entry((name,), (), (), None) for name in new]

    def read(self, entry: Entry, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return an entry's weights as {name: tensor}. Weights that need no conversion are memory-mapped."""
        if not entry.keys:
            return {name: self._new[name] for name in entry.names}
        if entry.is_stored:
            return {entry.names[0]: self.read_rows(entry, ...)}
        converter = copy.deepcopy(self._converters[entry.patterns[0] or ""])
        for key, pattern in zip(entry.keys, entry.patterns, strict=True):
            converter.add_tensor(
                entry.names[0], key, pattern, functools.partial(self.slice_of(key).__getitem__, ...)
            )
        values = converter.convert(
            entry.names[0], model=model, config=model.config, hf_quantizer=self.quantizer
        )
        return {
            name: values[name][0] if isinstance(values[name], list) else values[name]
            for name in entry.names
        }

    def read_rows(self, entry: Entry, rows: slice | EllipsisType) -> torch.Tensor:
        """Return the given rows (dim 0) of a weight that needs no conversion. `...` stands for all rows."""
        return self.slice_of(entry.keys[0])[rows]


def some(names: list[str]) -> str:
    """Return a text with the first names and the number of further names."""
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return "; ".join(names[:NUM_NAMED]) + more
