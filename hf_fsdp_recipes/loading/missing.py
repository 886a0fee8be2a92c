"""Handles parameters that the checkpoint lacks: ties each to another parameter, or initializes it.

This runs before the weights are loaded. Only the values of a new model are created later, when they are sent to the shards
(`new_values.py`).
"""

import copy
import functools
import re
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.checkpoint_source import CheckpointSource
from hf_fsdp_recipes.loading.new_values import NewValues
from hf_fsdp_recipes.loading.safetensors_index import SafetensorsIndex, StoredTensor
from hf_fsdp_recipes.model_class import task_type_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def complete_ranges(
    model: "PreTrainedModel",
    source: CheckpointSource,
    is_new: bool = False,
    ignore_mismatched: bool = False,
    declared: str | None = None,
) -> None:
    """Complete `source.ranges`: tied parameters share ranges, and missing parameters get newly initialized tensors.

    Every rank must call this, with the same model; it does not communicate. If there is a checkpoint (`is_new` is False), a
    missing parameter is an error, with two exceptions: `ignore_mismatched` is set; or the parameter belongs to a classifier's
    head, and the checkpoint's class (`declared`) is not the model's class.

    Raises:
        LoadError: parameters or buffers are missing; or, on a rank that reads, tied parameters differ in the checkpoint.
    """
    tied_groups = _find_tied_groups(model)
    for names in tied_groups:
        _share_ranges(source, names)
    aliases = {name for names in tied_groups for name in names[1:]}
    absent = [name for name in model.state_dict() if name not in source.ranges and name not in aliases]
    if not is_new:
        optional = model._keys_to_ignore_on_load_missing or ()
        lacking = [name for name in absent if not any(re.search(pattern, name) for pattern in optional)]
        lacking = without_new_head(model, lacking, declared, source.name_or_path)
        check_complete(source.name_or_path, lacking, bool(source.ranges), ignore_mismatched)
    buffers = {name for name, _ in model.named_buffers()}
    _initialize(model, source, [name for name in absent if name not in buffers], is_new)
    for names in tied_groups:
        _share_ranges(source, names)


def without_new_head(
    model: "PreTrainedModel", lacking: list[str], declared: str | None, name_or_path: str
) -> list[str]:
    """Return the missing parameters' names, without those of a classifier's head if the checkpoint is of another class.

    Prints whether the head is new or reused. Every rank calls this; not a collective.
    """
    if task_type_of(type(model)) not in ("SEQ_CLS", "TOKEN_CLS"):
        return lacking
    head = [name for name in lacking if not name.startswith(f"{model.base_model_prefix}.")]
    if not head:
        labels = list(map(str, model.config.id2label.values()))
        listed = ", ".join(labels[:5]) + ", ..." * (len(labels) > 5)
        distributed.print_main(f"load: {name_or_path} is a {declared}; its head is reused for the labels {listed}")
    if declared == type(model).__name__:
        return lacking
    if head:
        distributed.print_main(
            f"load: {name_or_path} is a {declared or model.config.model_type} without {', '.join(head)}, so "
            f"{type(model).__name__} starts with a new head"
        )
    return [name for name in lacking if name not in head]


def check_complete(name_or_path: str, lacking: list[str], has_any: bool, ignore_mismatched: bool) -> None:
    """Raise a LoadError if a checkpoint lacks all or some of the model's tensors.

    With `ignore_mismatched`, only warn if some of them are missing. Every rank calls this; not a collective.
    """
    if not has_any:
        raise LoadError(f"no tensor of {name_or_path} belongs to the model in its config. Check the config.json.")
    found = f"{name_or_path} lacks {len(lacking)} of the model's parameters and buffers: {', '.join(lacking[:3])}"
    if lacking and not ignore_mismatched:
        raise LoadError(
            f"{found}. Check that config.json belongs to the weights, or pass ignore_mismatched=True (in a recipe, "
            f"model_init_kwargs: {{ignore_mismatched: true}}) to initialize them."
        )
    if lacking:
        distributed.warn_main(f"{found}. They are newly initialized.")


def _find_tied_groups(model: torch.nn.Module) -> list[list[str]]:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def _share_ranges(source: CheckpointSource, names: list[str]) -> None:
    present = [name for name in names if name in source.ranges]
    if len(present) > 1:
        _check_equal(source, present)
    for name in names:
        if present:
            source.ranges[name] = source.ranges[present[0]]


def _check_equal(source: CheckpointSource, names: list[str]) -> None:
    """Check that tied parameters have the same values in the checkpoint."""
    first, *others = (source.ranges[name] for name in names)
    for other in others:
        if other == first or source.index is None:
            continue
        one, two = (source.stored[ranges[0].tensor] for ranges in (first, other))
        if not _bytes_equal(source.index, one, two):
            raise LoadError(
                f"{names} are tied by the config of {source.name_or_path} but differ in its weights. Pass "
                f"tie_word_embeddings=False if they are meant to be two tensors, or repair the checkpoint."
            )


def _bytes_equal(index: SafetensorsIndex, one: StoredTensor, other: StoredTensor) -> bool:
    if one.num_bytes != other.num_bytes:
        return False
    step = 16 * 1024 * 1024
    for start in range(0, one.num_bytes, step):
        buffers = [torch.empty(min(step, one.num_bytes - start), dtype=torch.uint8) for _ in range(2)]
        for tensor, buffer in zip((one, other), buffers, strict=True):
            index.read_into(buffer, tensor, start)
        if not torch.equal(*buffers):
            return False
    return True


def _initialize(model: "PreTrainedModel", source: CheckpointSource, names: list[str], is_new: bool) -> None:
    """Add tensors for missing parameters to the source, with values from the model's own initialization."""
    if not names:
        return
    # A new model is sharded before its values are read, so NewValues gets a copy. Models with 4-bit weights cannot be
    # copied on meta, but a new model has no such weights.
    created = NewValues(copy.deepcopy(model), int(torch.randint(2**31, ()))) if is_new else NewValues(model, 0)
    by_module: dict[str, list[str]] = {}
    for name in names:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    for number, (module_name, parameters) in enumerate(by_module.items()):
        # A checkpoint lacks only small parts, such as a head. Create them now, as from_pretrained would.
        is_created = not is_new and (distributed.is_main() or source.index is not None)
        values = created.create(module_name) if is_created else {}
        for name in parameters:
            leaf, meta = name.rpartition(".")[2], model.get_parameter(name)
            read = functools.partial(created.read, number, module_name, leaf) if is_new else values.get(leaf)
            source.ranges[name] = [source.add_tensor(f"<initialized>{name}", meta.dtype, tuple(meta.shape), read)]
