"""Handles adapters in PEFT's format: tensor names, config, and the base model's class.

Source: peft 0.21 `utils/save_and_load.py` (tensor names).
"""

import contextlib
import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import distributed, parameter_names
from hf_fsdp_recipes.errors import ExportError, LoadError, summarize
from hf_fsdp_recipes.loading.read_ranges import as_bytes
from hf_fsdp_recipes.loading.safetensors_index import SafetensorsIndex, read_header
from hf_fsdp_recipes.loading.shard_layout import Slice
from hf_fsdp_recipes.model_class import TASK_TYPES, task_type_of
from hf_fsdp_recipes.peft_models import HEAD_FIELDS, active_adapter, describe_class, find_peft_model

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

    from hf_fsdp_recipes.checkpointing.dcp_reader import DcpTensor

logger = logging.getLogger(__name__)

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")  # values of init_lora_weights that change base weights
TRAINABLE_TOKENS = re.compile(r"(\.token_adapter)?\.trainable_tokens_.*")
HEAD_WEIGHT = re.compile(r"\.(score|classifier)\.(?!original_module).*weight$")  # a classifier head's weight in PEFT


def stored_names(model: torch.nn.Module, slices: Mapping[str, Slice]) -> dict[str, str]:
    """Map the names in `adapter_model.safetensors` to the adapter's parameters. PEFT stores tied parameters under both names.

    Raises an ExportError if PEFT lists no tensors, or tensors that are not parameters of the model.
    """
    from peft import get_peft_model_state_dict

    peft_model = find_peft_model(model)
    assert peft_model is not None
    meta = {name: torch.empty(piece.shape, device="meta") for name, piece in slices.items()}
    by_identity = {id(tensor): name for name, tensor in meta.items()}
    listed = {id(tensor): name for name, tensor in _named_parameters(model) if name in meta}
    for name, tensor in _named_parameters(model):
        if id(tensor) in listed:  # PEFT asks for each name of tied parameters, and `slices` has one
            meta.setdefault(name, meta[listed[id(tensor)]])
    kept = get_peft_model_state_dict(
        _without_wrappers(model, peft_model),
        state_dict=meta,
        adapter_name=active_adapter(peft_model),
        save_embedding_layers=False,
    )
    found = {stored: by_identity[id(tensor)] for stored, tensor in kept.items() if id(tensor) in by_identity}
    if not kept:
        raise ExportError("PEFT finds no tensors of the adapter to save. Please report this with the adapter's config.")
    if len(found) != len(kept):
        raise ExportError(
            f"PEFT lists {len(kept)} tensors of the adapter, of which {len(found)} are parameters of this model, so the adapter "
            f"cannot be exported. Please report this with the adapter's config."
        )
    return found


def warn_of_new_embeddings(base: "PreTrainedModel", stored: Iterable[str]) -> None:
    """Log a warning on rank 0 if the base model has more or fewer embeddings than on disk, and the adapter does not hold them."""
    from transformers import AutoConfig

    config, before, now = base.config, None, None
    # transformers raises a ValueError if a config has several text parts.
    with contextlib.suppress(OSError, ValueError):
        revision = getattr(config, "_commit_hash", None)
        options = {"revision": revision, "local_files_only": True, "trust_remote_code": False}
        before, now = (
            getattr(one.get_text_config(), "vocab_size", None)
            for one in (AutoConfig.from_pretrained(config.name_or_path, **options), config)
        )
    if before is None or now is None or now == before:
        return
    tied = getattr(base, "all_tied_weights_keys", None) or {}
    held = {TRAINABLE_TOKENS.sub("", name.removeprefix("base_model.model.")) for name in stored}
    names = [parameter_names.without_wrappers(f"{name}.")[:-1] for name in _embeddings(base)]
    lost = " and ".join(name for name in names if not held & {name, f"{name}.weight"} and f"{name}.weight" not in tied)
    if lost:
        distributed.warn_main(
            f"the model has {now:,} embeddings and {config.name_or_path} has {before:,}, but the exported adapter does not hold "
            f"the new rows of {lost}. Export the merged model as well, or add {lost} to modules_to_save."
        )


def _embeddings(model: "PreTrainedModel") -> list[str]:
    """Return the names of the modules that hold a model's input embeddings and its output head, if it has them."""
    with contextlib.suppress(NotImplementedError):
        kept = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
        return [name for name, module in model.named_modules() if any(module is one for one in kept)]
    return []


def _named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield parameter_names.without_wrappers(name), parameter


def _without_wrappers(model: torch.nn.Module, peft_model: "PeftModel") -> "PeftModel":
    """Return a PeftModel without FSDP1 wrappers: `peft_model` itself, or under FSDP1 a copy on meta.

    PEFT looks up adapters by module name, and FSDP1 adds its wrappers to those names.
    """
    if all(name == parameter_names.without_wrappers(name) for name, _ in model.named_parameters()):
        return peft_model
    adapter = active_adapter(peft_model)
    return adapt_on_meta(peft_model.get_base_model(), peft_model.peft_config[adapter], adapter)


def adapt_on_meta(base: "PreTrainedModel", config: "PeftConfig", adapter: str = "default") -> "PeftModel":
    """Return a copy of a transformers model on the meta device, with an adapter of this config."""
    from accelerate import init_empty_weights
    from peft import get_peft_model

    config = copy.deepcopy(config)
    config.init_lora_weights = False  # only names and settings are needed
    with init_empty_weights():
        return get_peft_model(type(base)._from_config(base.config), config, adapter_name=adapter)


def save_config(model: torch.nn.Module, directory: Path) -> None:
    """Write `adapter_config.json` for inference. Rank 0 only."""
    peft_model = find_peft_model(model)
    assert peft_model is not None
    config = copy.deepcopy(peft_model.peft_config[active_adapter(peft_model)])
    base = peft_model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = base.config.name_or_path
    config.auto_mapping = describe_class(base) or config.auto_mapping
    config.inference_mode = True
    config.save_pretrained(str(directory))
    if (start := str(getattr(config, "init_lora_weights", "")).lower()).startswith(CHANGES_BASE):
        logger.warning(
            "%s: the adapter was initialized with %s, which changed the base weights. PEFT repeats this change when it loads the "
            "adapter, but vLLM does not. The merged model (merge_adapter) works everywhere.",
            directory.name,
            start,
        )


def recorded_class(
    config: "PeftConfig", tensors: "Mapping[str, DcpTensor | FileTensor]"
) -> tuple[str | None, dict[str, int]]:
    """Return the class name of an adapter's base model, and the config fields that the model's head needs.

    A class name of None means the class that the base model's config declares; a classifier may get an auto class. `tensors`
    maps the names of the adapter's tensors to objects with a `shape`.
    """
    import transformers

    heads = [tensor.shape[0] for name, tensor in tensors.items() if HEAD_WEIGHT.search(name)]
    is_classifier = config.task_type in ("SEQ_CLS", "TOKEN_CLS")
    mapping = config.auto_mapping or {}
    name = mapping.get("base_model_class")
    found = getattr(transformers, name or "", None)
    if not str(mapping.get("parent_library")).startswith("transformers") or found is None or not task_type_of(found):
        name = None  # use the class that the base model's config declares
    if name is None and is_classifier:  # PEFT records no class if there is a task type
        name = next(auto for auto, task in TASK_TYPES.items() if task == config.task_type)
    fields = {field: mapping[field] for field in HEAD_FIELDS if mapping.get(field) is not None}
    if "id2label" in fields:
        fields["id2label"] = {int(number): label for number, label in fields["id2label"].items()}  # JSON keys are text
    return name, ({"num_labels": heads[-1]} if is_classifier and heads else {}) | fields


@dataclass(frozen=True)
class FileTensor:
    """One tensor of an adapter's safetensors file, with the same interface as a checkpoint's DcpTensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    index: SafetensorsIndex
    name: str

    def read(self, start: int, count: int) -> torch.Tensor:
        """Return `count` elements starting at `start` (1-D, CPU)."""
        out = torch.empty(count, dtype=self.dtype)
        self.index.read_into(as_bytes(out), self.index.tensors[self.name], start * self.dtype.itemsize)
        return out


def read_adapter(directory: Path) -> tuple["PeftConfig", dict[str, FileTensor]]:
    """Return the PEFT config and the `FileTensor`s of an exported adapter; raise an ExportError if it cannot be read."""
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(directory))
        index = SafetensorsIndex(read_header(directory / ADAPTER_FILE))
    except (LoadError, OSError, ValueError) as error:
        raise ExportError(
            f"the adapter in {directory} cannot be read: {summarize(error, 'line')}. Export or copy it again."
        ) from error
    return config, {name: FileTensor(t.shape, t.dtype, index, name) for name, t in index.tensors.items()}
