"""Maps the tensors of a checkpoint to the weights of a model.

Reads the weights with transformers' own conversions.
"""

import logging
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from hf_fsdp_recipes.errors import LoadError, explained
from hf_fsdp_recipes.upstream.transformers_internals import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    find_tied,
    get_model_conversion_mapping,
    new_value,
    rename_source_key,
)

logger = logging.getLogger(__name__)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
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
    dtype: torch.dtype | None = None  # the stored dtype, if floating-point; else the model's

    @property
    def name(self) -> str:
        """The name of the first weight, which stands for the entry in messages."""
        return self.names[0]

    @property
    def key(self) -> str:
        """The name of the first tensor."""
        return next(iter(self.tensors))


@dataclass(eq=False)
class Checkpoint:
    """The safetensors files of one directory. They are opened on first use."""

    directory: Path
    quantizer: HfQuantizer | None = None
    new_values: Weights = field(default_factory=dict)  # a new head's values, on rank 0 only

    def __deepcopy__(self, memo: object) -> "Checkpoint":
        """Return this object itself, so that copies of the model share the open files."""
        return self

    @cached_property
    def file_of(self) -> dict[str, safe_open]:
        """{tensor name: open file}, in the order in which the tensors are stored."""
        paths = sorted(self.directory.glob("*.safetensors"))
        if not paths:
            raise LoadError(
                f"{self.directory} has no *.safetensors files. Convert the checkpoint to "
                f"safetensors."
            )
        file_of = {}
        for path in paths:
            # The error itself does not name the file.
            with explained(LoadError, f"{path} cannot be read (download or save it again)"):
                file = safe_open(path, "pt")
            file_of.update(dict.fromkeys(file.offset_keys(), file))
        return file_of

    def first_dtype(self) -> torch.dtype:
        """Return the dtype of the first floating-point tensor, or float32 if there is none."""
        dtypes = (DTYPES.get(self.slice_of(key).get_dtype()) for key in self.file_of)
        return next(filter(None, dtypes), torch.float32)

    def slice_of(self, key: str) -> Any:
        """Return a lazy tensor: its data is read from the file only when it is indexed."""
        return self.file_of[key].get_slice(key)

    def plan(self, model: PreTrainedModel) -> tuple[list[Entry], list[WeightTransform] | None]:
        """Return the entries to read for a model, in file order, and the conversions they need.

        `save_pretrained` must revert these conversions. As in `from_pretrained`, the weights of a
        head are new if the checkpoint was saved from a model class without this head.

        Raises:
            LoadError: a weight is missing or has the wrong shape.
        """
        weights = model.state_dict()
        entries = self._match_tensors(model, weights)
        position = {key: number for number, key in enumerate(self.file_of)}
        entries.sort(key=lambda entry: position[entry.key])
        present = self._find_present(model, entries)
        missing = [name for name in weights if name not in present]
        new = []
        if type(model).__name__ not in (model.config.architectures or ()):
            new = [name for name in missing if not name.startswith(f"{model.base_model_prefix}.")]
        problems = [f"{name} is missing" for name in missing if name not in new]
        for entry in entries:
            if entry.kind == "stored":
                stored = self.slice_of(entry.key).get_shape()
                expected = list(weights[entry.name].shape)
                if stored != expected:
                    problems.append(f"{entry.key} is {stored}, not {expected}")
        if problems:
            raise LoadError(
                f"{self.directory} does not fit {type(model).__name__}: {some(problems)}."
            )
        if new:
            logger.warning(
                "%s has no %s, so the values are new: train them", self.directory, some(new)
            )
        for name in new:
            self.new_values[name] = new_value(model, name)
            entries.append(Entry("new", (name,), {}))
        if self.quantizer:
            return entries, None  # otherwise save_pretrained would quantize again
        return entries, [transform for transform in self._transforms if transform.was_used()]

    def match(self, model: PreTrainedModel) -> dict[str, str]:
        """Map the model's weight names to the checkpoint's tensor names.

        Weights that transformers converts are left out.
        """
        return {
            entry.name: entry.key
            for entry in self._match_tensors(model, model.state_dict())
            if entry.kind == "stored"
        }

    def _match_tensors(self, model: PreTrainedModel, weights: Weights) -> list[Entry]:
        """Return the entries for the weights that the checkpoint has."""
        # `read` uses the converters of the model that was matched last, by their patterns.
        self._transforms = get_model_conversion_mapping(model, None, self.quantizer)
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
                self.directory,
                type(model).__name__,
                some(unexpected),
            )
        return [self._entry(name, tensors) for name, tensors in tensors_of.items()]

    def _entry(self, name: str, tensors: TensorsOfWeight) -> Entry:
        """Return the entry that reads a weight, and the weights that are converted with it."""
        pattern = next(iter(tensors.values()))
        if pattern is None:
            key = list(tensors)[-1]
            return Entry("stored", (name,), {key: None}, DTYPES.get(self.slice_of(key).get_dtype()))
        targets = self._converters[pattern].target_patterns
        names = tuple(name.replace(targets[0], target) for target in targets)
        return Entry("converted", names, tensors)

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

    def read(self, entry: Entry, model: PreTrainedModel) -> Weights:
        """Return an entry's weights as {name: tensor}.

        Weights that need no conversion are memory-mapped.
        """
        if entry.kind == "new":
            return {entry.name: self.new_values[entry.name]}
        if entry.kind == "stored":
            return {entry.name: self.slice_of(entry.key)[...]}
        converter = deepcopy(self._converters[entry.tensors[entry.key]])
        for key, pattern in entry.tensors.items():
            read = partial(self.slice_of(key).__getitem__, ...)
            # transformers' own type leaves out that it also takes functions, and calls them later.
            converter.add_tensor(entry.name, key, pattern, read)  # type: ignore[arg-type]
        values = converter.convert(
            entry.name,
            model=model,
            config=model.config,
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
