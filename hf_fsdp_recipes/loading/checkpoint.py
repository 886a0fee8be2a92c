"""Maps the tensors of a checkpoint to the weights of a model.

Reads the weights with transformers' own conversions.
"""

import logging
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.upstream.transformers_internals import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    find_tied,
    get_model_conversion_mapping,
    new_value,
    rename_source_key,
    str_to_torch_dtype,
)
from hf_fsdp_recipes.weights.files import open_files

logger = logging.getLogger(__name__)

Weights = dict[str, Tensor]  # {name of a weight in the model: value}

# {name of a tensor that belongs to one weight: converter pattern that it matches, or None}
TensorsOfWeight = dict[str, str | None]

NUM_NAMED = 3  # maximum number of names in a message


@dataclass(frozen=True)
class Entry:
    """One step of loading.

    A "stored" entry is one tensor of the checkpoint that becomes one weight as it is, so a rank can
    read only its own rows (dim 0). "converted" entries are tensors that transformers converts
    together. A "new" entry is a weight that the checkpoint lacks.
    """

    kind: Literal["stored", "converted", "new"]
    names: tuple[str, ...]  # names of the entry's weights in the model
    tensors: TensorsOfWeight  # the entry's tensors in the checkpoint
    # The dtype in which values are sent: the narrower of the file's and that in which the model was
    # built. None: the parameter's.
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The name of the first weight, which stands for the entry in messages."""
        return self.names[0]

    @property
    def key(self) -> str:
        """The name of the first tensor."""
        return next(iter(self.tensors))

    def narrowed(self, dtype: torch.dtype | None) -> "Entry":
        """Return this entry with the dtype of its weight, if that is narrower."""
        if self.dtype and dtype and dtype.itemsize < self.dtype.itemsize:
            return replace(self, dtype=dtype)
        return self


@dataclass(eq=False)
class Checkpoint:
    """The weight files of one model. They are opened on first use."""

    files: list[Path]
    quantizer: HfQuantizer | None = None
    key_mapping: dict[str, str] | None = None  # as in `from_pretrained`
    entries: list[Entry] = field(default_factory=list)  # of the parameters of the model

    def __deepcopy__(self, memo: object) -> "Checkpoint":
        """Return this object itself, so that copies of the model share the open files."""
        return self

    def __str__(self) -> str:
        return str(self.files[0].parent)

    @cached_property
    def file_of(self) -> dict[str, safe_open]:
        """{tensor name: open file}, in the order in which the tensors are stored."""
        return open_files(self.files)

    def first_dtype(self) -> torch.dtype:
        """Return the dtype of the first file's first floating-point tensor by name, or float32."""
        names = sorted(open_files(self.files[:1]))
        return next(filter(None, map(self.dtype_of, names)), torch.float32)

    def dtype_of(self, key: str) -> torch.dtype | None:
        """Return the dtype of a tensor in which a model can be built, or None."""
        dtype = str_to_torch_dtype.get(self.slice_of(key).get_dtype())
        if dtype and dtype.is_floating_point and dtype.itemsize > 1:
            return dtype
        return None

    def slice_of(self, key: str) -> Any:
        """Return a lazy tensor: its data is read from the file only when it is indexed."""
        return self.file_of[key].get_slice(key)

    def plan(
        self, model: PreTrainedModel
    ) -> tuple[list[Entry], Weights, list[WeightTransform] | None]:
        """Plan the loading of a model on meta, on the rank that reads.

        Return the entries of its parameters, in file order, the values of its buffers, and the
        conversions that `save_pretrained` must revert. As in `from_pretrained`, the weights of a
        head are new if the checkpoint was saved from a model class without this head.

        Raises:
            LoadError: a weight is missing or has the wrong shape.
        """
        # transformers converts for this copy, which nothing wraps, quantizes or casts.
        self._twin = deepcopy(model)
        weights = model.state_dict()
        entries = self._match_tensors(model, weights)
        position = {key: number for number, key in enumerate(self.file_of)}
        entries.sort(key=lambda entry: position[entry.key])
        present = self._find_present(model, entries)
        missing = [name for name in weights if name not in present]
        new = []
        has_head = model.base_model is not model
        if has_head and type(model).__name__ not in (model.config.architectures or ()):
            new = [name for name in missing if not name.startswith(f"{model.base_model_prefix}.")]
        problems = [f"{name} is missing" for name in missing if name not in new]
        for entry in entries:
            if entry.kind == "stored":
                stored = self.slice_of(entry.key).get_shape()
                expected = list(weights[entry.name].shape)
                if stored != expected:
                    problems.append(f"{entry.key} is {stored}, not {expected}")
        if problems:
            raise LoadError(f"{self} does not fit {type(model).__name__}: {some(problems)}.")
        if new:
            logger.warning("%s has no %s, so the values are new: train them", self, some(new))
        self._new_values = {name: new_value(model, name) for name in new}
        entries += [Entry("new", (name,), {}) for name in new]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers: Weights = {}
        of_parameters = []
        for entry in entries:
            if entry.name in parameters:
                of_parameters.append(entry)
            else:
                buffers |= self.read(entry)
        if self.quantizer:
            return of_parameters, buffers, None  # otherwise save_pretrained would quantize again
        used = [transform for transform in self._transforms if transform.was_used()]
        return of_parameters, buffers, used

    def _match_tensors(self, model: PreTrainedModel, weights: Weights) -> list[Entry]:
        """Return the entries for the weights that the checkpoint has."""
        # `read` uses the converters of the model that was matched last, by their patterns.
        self._transforms = get_model_conversion_mapping(model, self.key_mapping, self.quantizer)
        renamings = [one for one in self._transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in self._transforms if isinstance(one, WeightConverter)]
        self._converters: dict[str | None, WeightConverter] = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        tensors_of: dict[str, TensorsOfWeight] = {}
        unexpected = []
        for key in sorted(self.file_of, key=dot_natural_key):
            name, pattern = rename_source_key(
                key, renamings, converters, model.base_model_prefix, weights
            )
            if name not in weights and key in weights:
                name = key
                pattern = None
            if name in weights:
                tensors_of.setdefault(name, {})[key] = pattern
            else:
                unexpected.append(key)
        if unexpected:
            logger.warning(
                "%s has tensors that %s does not use: %s",
                self,
                type(model).__name__,
                some(unexpected),
            )
        return [
            self._entry(name, tensors, weights[name].dtype) for name, tensors in tensors_of.items()
        ]

    def _entry(
        self,
        name: str,
        tensors: TensorsOfWeight,
        dtype: torch.dtype,
    ) -> Entry:
        """Return the entry that reads a weight, and the weights that are converted with it."""
        pattern = next(iter(tensors.values()))
        key = next(iter(tensors))
        if pattern is None:
            entry = Entry("stored", (name,), {key: None}, dtype)
        else:
            targets = self._converters[pattern].target_patterns
            names = tuple(name.replace(targets[0], target) for target in targets)
            entry = Entry("converted", names, tensors, dtype)
        return entry.narrowed(self.dtype_of(key))

    def _find_present(self, model: PreTrainedModel, entries: list[Entry]) -> set[str]:
        """Return the names of the weights that the files hold.

        They may hold a tied weight under either name, or under both.
        """
        entry_of = {name: entry for entry in entries for name in entry.names}
        present = set(entry_of)
        for pair in find_tied(model).items():
            held = [self.slice_of(entry_of[name].key)[...] for name in pair if name in entry_of]
            if held:
                present.update(pair)
            if len(held) == 2 and not torch.equal(*held):
                raise LoadError(
                    f"{' and '.join(pair)} are tied, but differ in the checkpoint. "
                    f"Set tie_word_embeddings=False."
                )
        return present

    def read(self, entry: Entry) -> Weights:
        """Return an entry's weights as {name: tensor}. Only after `plan`, unless it is "stored".

        Weights that need no conversion are memory-mapped.
        """
        if entry.kind == "new":
            return {entry.name: self._new_values[entry.name]}
        if entry.kind == "stored":
            return {entry.name: self.slice_of(entry.key)[...]}
        converter = deepcopy(self._converters[entry.tensors[entry.key]])
        for key, pattern in entry.tensors.items():
            read = partial(self.slice_of(key).__getitem__, ...)
            # transformers' own type leaves out that it also takes functions, and calls them later.
            converter.add_tensor(entry.name, key, pattern, read)  # type: ignore[arg-type]
        values = converter.convert(
            entry.name,
            model=self._twin,
            config=self._twin.config,
            hf_quantizer=self.quantizer,
        )
        return {
            name: value[0] if isinstance(value, list) else value for name, value in values.items()
        }


def some(names: list[str]) -> str:
    """Return a text with the first names and the number of further names."""
    text = "; ".join(names[:NUM_NAMED])
    if len(names) > NUM_NAMED:
        text += f" and {len(names) - NUM_NAMED} more"
    return text
