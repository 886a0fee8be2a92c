"""PEFT adapters at export: which parameters are theirs, what they are called in a file, and merging them.

The adapter is written as PEFT writes it. Merging adds `scaling * B @ A` to the rows that a rank holds, so no
rank ever has a whole merged layer, let alone a model.

Source: peft 0.21 `utils/save_and_load.py` (names), `tuners/lora/layer.py` (`get_delta_weight`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_recipes.errors import ExportError, LoadError
from hf_fsdp_recipes.export.slices import Slice, gather_whole, local_slices
from hf_fsdp_recipes.loading import names
from hf_fsdp_recipes.loading.safetensors_index import SafetensorsIndex, read_header
from hf_fsdp_recipes.loading.shard_layout import as_bytes

ADAPTER_PATTERN = "adapter_model{suffix}.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"


def find_peft_model(model: torch.nn.Module) -> Any | None:
    """Return the PeftModel in a possibly wrapped model, or None."""
    from peft import PeftModel

    return next((module for module in model.modules() if isinstance(module, PeftModel)), None)


def has_adapter(model: torch.nn.Module) -> bool:
    """Tell whether a model carries PEFT adapters."""
    return find_peft_model(model) is not None


def is_left_out(name: str) -> bool:
    """Tell whether a parameter has no place of its own in a merged or plain model.

    Adapter matrices go into the base weight; of a saved module the trained copy counts, not the original.
    """
    return ".original_module." in name or (names.is_adapter(name) and ".modules_to_save." not in name)


def stored_names(model: torch.nn.Module, slices: Mapping[str, Slice]) -> dict[str, str]:
    """Map the adapter's parameters to their names in `adapter_model.safetensors`. Any rank; no collective.

    Raises:
        ExportError: PEFT keeps nothing, which would be an empty adapter.
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
        raise ExportError(f"PEFT names {len(kept)} adapter tensors and {len(found)} of them were found in the model")
    return found


def _without_wrappers(model: torch.nn.Module, peft_model: Any) -> Any:
    """Return a PeftModel whose module names are plain: the model's own, or under FSDP1 a twin on meta.

    PEFT looks adapters up by module name, and FSDP1 puts its wrappers into those names.
    """
    if all(name == names.without_wrappers(name) for name, _ in model.named_parameters()):
        return peft_model
    import copy

    from accelerate import init_empty_weights
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    adapter = active_adapter(peft_model)
    config = copy.deepcopy(peft_model.peft_config[adapter])
    config.init_lora_weights = False  # names do not need values
    with init_empty_weights():
        base = AutoModelForCausalLM.from_config(peft_model.get_base_model().config)
        return get_peft_model(base, config, adapter_name=adapter)


def save_config(model: torch.nn.Module, directory: Path) -> None:
    """Write `adapter_config.json`, ready for inference. Main rank only."""
    import copy

    peft_model = find_peft_model(model)
    assert peft_model is not None
    config = copy.deepcopy(peft_model.peft_config[active_adapter(peft_model)])
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = peft_model.get_base_model().config.name_or_path
    config.inference_mode = True
    config.save_pretrained(str(directory))


def active_adapter(peft_model: Any) -> str:
    """Return the name of the adapter in use."""
    active = peft_model.active_adapter
    return active if isinstance(active, str) else active[0]


class Merger:
    """Adds LoRA to the rows of base weights that a rank holds.

    Construct it on every rank; `gather` is collective, `merged` is not.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        peft_model = find_peft_model(model)
        if peft_model is None:
            raise ExportError("merge_adapter: the model has no adapter. Remedy: export it without merge_adapter.")
        self._adapter = active_adapter(peft_model)
        config = peft_model.peft_config[self._adapter]
        if getattr(peft_model.get_base_model(), "is_loaded_in_4bit", False):
            raise ExportError(
                "merge_adapter: the base weights here are 4-bit. Remedy: export the adapter, then merge it into the "
                "unquantised base with export_checkpoint(adapter_dir, ..., merge_adapter=True), which recipes do."
            )
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA" or config.use_dora:
            raise ExportError("merge_adapter knows LoRA and rsLoRA. Remedy: export the adapter and merge it with PEFT.")
        self._layers: dict[str, Any] = {}
        for full_name, module in model.named_modules():
            if hasattr(module, "lora_A") and self._adapter in getattr(module, "lora_A", {}):
                self._layers[names.without_wrappers(full_name + ".")[:-1]] = module
        unsupported = [n for n, m in self._layers.items() if type(m).__name__ not in ("Linear", "Conv1D")]
        if unsupported:
            raise ExportError(f"merge_adapter cannot merge {unsupported[:3]}: only linear layers are merged by slices.")
        self._slices = local_slices(model)
        self._matrices: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def gather(self) -> None:
        """Bring every layer's two small matrices to every rank. Collective: every rank must call this."""
        for name in self._layers:
            a, b = (self._slices[f"{name}.lora_{x}.{self._adapter}.weight"] for x in "AB")
            device = a.values.device
            self._matrices[f"{name}.base_layer.weight"] = (gather_whole(a, device), gather_whole(b, device))

    def merged(self, piece: Slice, start: int, values: torch.Tensor) -> torch.Tensor:
        """Return values of a slice, from `start` of the slice on, with the adapter added in."""
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
    """Add `scaling * B @ A` to a run of a weight's elements.

    Args:
        values: the run, 1-D, from element `first` of the weight on.
        first: the run's first element.
        shape: the weight's, (out, in), or (in, out) with `fan_in_fan_out`.
        a, b: LoRA's matrices, (r, in) and (out, r).
        scaling: LoRA's alpha over r, or over its root.
        fan_in_fan_out: whether the weight is stored transposed (GPT-2's Conv1D).

    Returns:
        The sum in the weight's dtype, as PEFT's own merge takes it.
    """
    rows_of, columns_of = (a.T, b.T) if fan_in_fan_out else (b, a)
    width = shape[1]
    top, bottom = first // width, -(-(first + values.numel()) // width)
    delta = (rows_of[top:bottom] @ columns_of) * scaling
    skipped = first - top * width
    return values + delta.reshape(-1)[skipped : skipped + values.numel()].to(values.dtype)


@dataclass(frozen=True)
class FileTensor:
    """One tensor of an adapter's safetensors file, read by runs like a tensor of a sharded checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    checkpoint: SafetensorsIndex
    name: str

    def read(self, start: int, count: int) -> torch.Tensor:
        """Return `count` elements from `start` on (1-D, CPU)."""
        out = torch.empty(count, dtype=self.dtype)
        self.checkpoint.read_into(as_bytes(out), self.checkpoint.tensors[self.name], start * self.dtype.itemsize)
        return out


def read_adapter(directory: Path) -> tuple[Any, dict[str, FileTensor]]:
    """Return the PEFT config and the tensors of an exported adapter. Any rank; no collective.

    Raises:
        ExportError: the directory holds no adapter that can be read.
    """
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(directory))
        checkpoint = SafetensorsIndex(read_header(directory / ADAPTER_FILE))
    except (LoadError, OSError, ValueError) as error:
        raise ExportError(f"{directory} holds no adapter that can be read: {str(error).splitlines()[0]}") from error
    return config, {name: FileTensor(t.shape, t.dtype, checkpoint, name) for name, t in checkpoint.tensors.items()}


class StoredAdapter:
    """A LoRA adapter in files, added to base weights that are read from files."""

    def __init__(self, config: Any, tensors: Mapping[str, Any], adapter_name: str = "default") -> None:
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA" or config.use_dora:
            raise ExportError("merge_adapter knows LoRA and rsLoRA. Remedy: export the adapter and merge it with PEFT.")
        self._config = config
        self._matrices: dict[str, dict[str, Any]] = {}
        self._whole: dict[str, Any] = {}
        for name, tensor in tensors.items():
            plain = name.removeprefix("base_model.model.").replace(f".modules_to_save.{adapter_name}.", ".")
            layer, marker, matrix = plain.replace(f".{adapter_name}.", ".").rpartition(".lora_")
            if marker and matrix in ("A.weight", "B.weight"):
                self._matrices.setdefault(f"{layer}.weight", {})[matrix[0]] = tensor
            elif marker:
                raise ExportError(
                    f"merge_adapter cannot merge {name}. Remedy: export the adapter and merge it with PEFT."
                )
            elif ".original_module." not in name:
                self._whole[plain.replace(".modules_to_save.", ".")] = tensor
        self._latest: tuple[str, Any] = ("", None)

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that everything in the adapter has a place in the base model.

        Raises:
            ExportError: names what has none, or has another size there.
        """
        lost = [name for name in [*self._matrices, *self._whole] if name not in shapes]
        lost += [name for name, tensor in self._whole.items() if name in shapes and tensor.shape != shapes[name]]
        if lost:
            raise ExportError(
                f"{lost[:3]} of the adapter have no place in the base model, or another size there. Rule: linear layers and "
                f"saved modules of the base model's size are merged. Remedy: merge with PEFT, or name the right base model."
            )

    def merged(self, name: str, shape: tuple[int, ...], first: int, values: torch.Tensor) -> torch.Tensor:
        """Return a run of a base weight with the adapter added in; other tensors come back as they are."""
        if name in self._whole and values.numel():
            return self._whole[name].read(first, values.numel()).to(values.dtype)
        if name not in self._matrices or not values.numel():
            return values
        a, b = self._read(name)
        return add_rows(values, first, shape, a, b, self._scaling(name, a.shape[0]), self._config.fan_in_fan_out)

    def _read(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._latest[0] != name:
            found = self._matrices[name]
            whole = [found[m].read(0, torch.Size(found[m].shape).numel()).reshape(found[m].shape) for m in "AB"]
            self._latest = (name, tuple(whole))
        return self._latest[1]

    def _scaling(self, name: str, rank: int) -> float:
        from peft.utils.other import get_pattern_key

        patterns = self._config.alpha_pattern or {}
        layer = name.removesuffix(".weight")
        alpha = patterns.get(get_pattern_key(patterns.keys(), layer), self._config.lora_alpha)
        return alpha / (rank**0.5 if self._config.use_rslora else rank)
