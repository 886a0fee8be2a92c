"""Exports LoRA adapters, or merges them into base weights.

Merging adds `scaling * B @ A` to a range of rows at a time, so no process ever holds a full merged layer.

Source: peft 0.21 `utils/save_and_load.py` (names), `tuners/lora/layer.py` (`get_delta_weight`).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hf_fsdp_recipes import parameter_names
from hf_fsdp_recipes.errors import ExportError, LoadError, summarize
from hf_fsdp_recipes.export.slices import gather_full, local_slices
from hf_fsdp_recipes.loading.read_ranges import as_bytes
from hf_fsdp_recipes.loading.safetensors_index import SafetensorsIndex, read_header
from hf_fsdp_recipes.loading.shard_layout import Slice
from hf_fsdp_recipes.peft_models import active_adapter, find_peft_model

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"


class StoredValues(Protocol):
    """A tensor on disk that can be read in ranges of elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    def read(self, start: int, count: int) -> torch.Tensor:
        """Return `count` elements starting at `start` (1-D, CPU)."""


def is_merged_or_unused(name: str) -> bool:
    """Return whether a merged export omits a parameter.

    Adapter matrices are merged into the base weight, and trained copies of modules replace the originals.
    """
    return ".original_module." in name or (parameter_names.is_adapter(name) and ".modules_to_save." not in name)


def stored_names(model: torch.nn.Module, slices: Mapping[str, Slice]) -> dict[str, str]:
    """Map the adapter's parameters to their names in `adapter_model.safetensors`. Any rank may call this.

    Raises:
        ExportError: PEFT finds no adapter parameters, or parameters that the model does not have.
    """
    from peft import get_peft_model_state_dict

    peft_model = find_peft_model(model)
    assert peft_model is not None
    meta = {name: torch.empty(piece.shape, device="meta") for name, piece in slices.items()}
    by_identity = {id(tensor): name for name, tensor in meta.items()}
    kept = get_peft_model_state_dict(
        _without_wrappers(model, peft_model),
        state_dict=meta,
        adapter_name=active_adapter(peft_model),
        save_embedding_layers=False,
    )
    found = {by_identity[id(tensor)]: stored for stored, tensor in kept.items() if id(tensor) in by_identity}
    if not found or len(found) != len(kept):
        raise ExportError(f"PEFT lists {len(kept)} adapter tensors, but the model has {len(found)} of them")
    return found


def _without_wrappers(model: torch.nn.Module, peft_model: "PeftModel") -> "PeftModel":
    """Return a PeftModel without FSDP1 wrappers: the model's own, or under FSDP1 a copy on meta.

    PEFT looks up adapters by module name, and FSDP1 adds its wrappers to those names.
    """
    if all(name == parameter_names.without_wrappers(name) for name, _ in model.named_parameters()):
        return peft_model
    from accelerate import init_empty_weights
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    adapter = active_adapter(peft_model)
    config = copy.deepcopy(peft_model.peft_config[adapter])
    config.init_lora_weights = False  # only the names are needed
    with init_empty_weights():
        base = AutoModelForCausalLM.from_config(peft_model.get_base_model().config)
        return get_peft_model(base, config, adapter_name=adapter)


def save_config(model: torch.nn.Module, directory: Path) -> None:
    """Write `adapter_config.json`, set for inference. Rank 0 only."""
    peft_model = find_peft_model(model)
    assert peft_model is not None
    config = copy.deepcopy(peft_model.peft_config[active_adapter(peft_model)])
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = peft_model.get_base_model().config.name_or_path
    config.inference_mode = True
    config.save_pretrained(str(directory))


def _check_mergeable(config: Any) -> None:
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA" or config.use_dora:
        raise ExportError("merge_adapter supports LoRA and rsLoRA only. Export the adapter and merge it with PEFT.")


class ShardMerger:
    """Merges LoRA into this rank's shards of the base weights.

    Construct it on every rank; `gather` is a collective, `merge` is not.

    Raises:
        ExportError: the model has no adapter, a 4-bit base, or an adapter that cannot be merged by rows.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        peft_model = find_peft_model(model)
        if peft_model is None:
            raise ExportError("merge_adapter is set, but the model has no adapter. Export it without merge_adapter.")
        self._adapter = active_adapter(peft_model)
        if getattr(peft_model.get_base_model(), "is_loaded_in_4bit", False):
            raise ExportError(
                "merge_adapter cannot merge into 4-bit base weights. Export the adapter, then merge it into the unquantized base "
                "with export_checkpoint(adapter_dir, ..., merge_adapter=True)."
            )
        _check_mergeable(peft_model.peft_config[self._adapter])
        self._layers: dict[str, Any] = {}
        for full_name, module in model.named_modules():
            if hasattr(module, "lora_A") and self._adapter in getattr(module, "lora_A", {}):
                self._layers[parameter_names.without_wrappers(full_name + ".")[:-1]] = module
        unsupported = [n for n, m in self._layers.items() if type(m).__name__ not in ("Linear", "Conv1D")]
        if unsupported:
            raise ExportError(
                f"merge_adapter supports linear layers only, not {unsupported[:3]}. Merge the adapter with PEFT."
            )
        self._slices = local_slices(model)
        self._matrices: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def gather(self) -> None:
        """Gather A and B of every layer on every rank. Collective: every rank must call this."""
        for name in self._layers:
            a, b = (self._slices[f"{name}.lora_{x}.{self._adapter}.weight"] for x in "AB")
            device = a.values.device
            self._matrices[f"{name}.base_layer.weight"] = (gather_full(a, device), gather_full(b, device))

    def merge(self, piece: Slice, start: int, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, which start at element `start` of a slice, with the adapter merged in."""
        matrices = self._matrices.get(piece.name)
        if matrices is None or not values.numel():
            return values
        layer = self._layers[piece.name.removesuffix(".base_layer.weight")]
        scaling = layer.scaling[self._adapter]
        return add_rows(values, piece.first + start, piece.shape, *matrices, scaling, layer.fan_in_fan_out)


def add_rows(
    values: torch.Tensor,
    first: int,
    shape: tuple[int, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    fan_in_fan_out: bool,
) -> torch.Tensor:
    """Add `scaling * B @ A` to a range of a weight's elements.

    Args:
        values: the range, 1-D.
        first: position of the range's first element in the weight.
        shape: shape of the weight: (out, in), or (in, out) with `fan_in_fan_out`.
        a, b: LoRA's matrices, (r, in) and (out, r).
        scaling: alpha / r, or alpha / sqrt(r) for rsLoRA.
        fan_in_fan_out: whether the weight is stored transposed (GPT-2's Conv1D).

    Returns:
        The sum in the weight's dtype, computed as in PEFT.
    """
    left, right = (a.T, b.T) if fan_in_fan_out else (b, a)
    width = shape[1]
    top, bottom = first // width, -(-(first + values.numel()) // width)
    delta = (left[top:bottom] @ right) * scaling
    skipped = first - top * width
    return values + delta.reshape(-1)[skipped : skipped + values.numel()].to(values.dtype)


@dataclass(frozen=True)
class FileTensor:
    """One tensor of an adapter's safetensors file, as `StoredValues`."""

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
    """Return the PEFT config and the tensors of an exported adapter. Any rank may call this.

    Raises:
        ExportError: the adapter cannot be read.
    """
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(directory))
        index = SafetensorsIndex(read_header(directory / ADAPTER_FILE))
    except (LoadError, OSError, ValueError) as error:
        raise ExportError(f"the adapter in {directory} cannot be read: {summarize(error, 'line')}") from error
    return config, {name: FileTensor(t.shape, t.dtype, index, name) for name, t in index.tensors.items()}


class StoredAdapter:
    """A LoRA adapter on disk, to merge into base weights that are read from disk.

    Raises:
        ExportError: the adapter cannot be merged by rows.
    """

    def __init__(
        self, config: "LoraConfig", tensors: Mapping[str, StoredValues], adapter_name: str = "default"
    ) -> None:
        _check_mergeable(config)
        self._config = config
        self._matrices: dict[str, dict[str, StoredValues]] = {}
        self._saved_modules: dict[str, StoredValues] = {}
        for name, tensor in tensors.items():
            plain = name.removeprefix("base_model.model.").replace(f".modules_to_save.{adapter_name}.", ".")
            layer, marker, matrix = plain.replace(f".{adapter_name}.", ".").rpartition(".lora_")
            if marker and matrix in ("A.weight", "B.weight"):
                self._matrices.setdefault(f"{layer}.weight", {})[matrix[0]] = tensor
            elif marker:
                raise ExportError(f"merge_adapter cannot merge {name}. Export the adapter and merge it with PEFT.")
            elif ".original_module." not in name:
                self._saved_modules[plain.replace(".modules_to_save.", ".")] = tensor
        self._latest: tuple[str, tuple[torch.Tensor, torch.Tensor]] | None = None

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every adapter tensor has a base parameter of the right shape.

        Raises:
            ExportError: names what does not match.
        """
        unmatched = [name for name in [*self._matrices, *self._saved_modules] if name not in shapes]
        unmatched += [n for n, tensor in self._saved_modules.items() if n in shapes and tensor.shape != shapes[n]]
        if unmatched:
            raise ExportError(
                f"the adapter's {unmatched[:3]} have no match in the base model, or one of another shape. Pass the base model "
                f"that the adapter was trained on."
            )

    def merge(self, name: str, shape: tuple[int, ...], first: int, values: torch.Tensor) -> torch.Tensor:
        """Return a range of a base weight with the adapter merged in; other tensors are returned unchanged."""
        if name in self._saved_modules and values.numel():
            return self._saved_modules[name].read(first, values.numel()).to(values.dtype)
        if name not in self._matrices or not values.numel():
            return values
        a, b = self._read(name)
        return add_rows(values, first, shape, a, b, self._scaling(name, a.shape[0]), self._config.fan_in_fan_out)

    def _read(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._latest is None or self._latest[0] != name:
            found = self._matrices[name]
            a, b = (found[m].read(0, torch.Size(found[m].shape).numel()).reshape(found[m].shape) for m in "AB")
            self._latest = (name, (a, b))
        return self._latest[1]

    def _scaling(self, name: str, rank: int) -> float:
        from peft.utils.other import get_pattern_key

        patterns = self._config.alpha_pattern or {}
        layer = name.removesuffix(".weight")
        alpha = patterns.get(get_pattern_key(patterns.keys(), layer), self._config.lora_alpha)
        return float(alpha / (rank**0.5 if self._config.use_rslora else rank))
