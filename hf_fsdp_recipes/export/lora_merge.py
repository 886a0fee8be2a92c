"""Merges LoRA adapters into base weights.

Merging adds `scaling * B @ A` to one range of a layer's rows at a time, so no process ever holds a full merged layer. For DoRA, the
norms of the rows are computed first.

Source: peft 0.21 `tuners/lora/layer.py` (`get_delta_weight`), `tuners/lora/variants.py`
(`DoraLinearVariant.merge_unsafe`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import parameter_names
from hf_fsdp_recipes.errors import ExportError, summarize
from hf_fsdp_recipes.export.adapter_files import CHANGES_BASE, FileTensor, adapt_on_meta
from hf_fsdp_recipes.export.slices import gather_full, local_slices
from hf_fsdp_recipes.loading.shard_layout import Slice
from hf_fsdp_recipes.peft_models import active_adapter, find_peft_model

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

    from hf_fsdp_recipes.checkpointing.dcp_reader import DcpTensor

CHUNK_ELEMENTS = 4 * 1024**2
# Fields of LoraConfig for adapters whose change of a weight is not `scaling * B @ A` alone.
UNSUPPORTED_FIELDS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)


def choose_written(model: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Return the parameters that a merged export writes, if the model has an adapter: all but the adapters' matrices.

    For a module in modules_to_save, it writes the active adapter's trained copy, or the original if that adapter has none.
    """
    peft_model = find_peft_model(model)
    adapter = None if peft_model is None else active_adapter(peft_model)
    names = list(names)
    replaced = {parameter_names.in_base_model(name) for name in names if _is_trained_copy(name, adapter)}
    return [
        name
        for name in names
        if _is_trained_copy(name, adapter)
        or not (parameter_names.is_adapter(name) or parameter_names.in_base_model(name) in replaced)
    ]


def _is_trained_copy(name: str, adapter: str | None) -> bool:
    return adapter is not None and ".modules_to_save." in name and parameter_names.adapter_of(name) == adapter


def _check_mergeable(config: "LoraConfig") -> None:
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        raise ExportError(
            "merge_adapter supports LoRA, rsLoRA and DoRA only. Export the adapter and merge it with PEFT."
        )
    if config.use_dora and config.fan_in_fan_out:
        raise ExportError(
            "merge_adapter cannot merge DoRA into Conv1D layers. Export the adapter and merge it with PEFT."
        )
    fields = [name for name in UNSUPPORTED_FIELDS if getattr(config, name, None)]
    if fields:
        raise ExportError(
            f"merge_adapter cannot merge an adapter with {fields[0]}. Export the adapter without merging."
        )


def _check_tied(model: "PreTrainedModel", config: "PeftConfig", changed: Iterable[str]) -> None:
    """Raise an ExportError if an adapter changes only one of two tied weights of a transformers model.

    `changed` are the names of the weights in the base model that the adapter changes or replaces.
    """
    names = set(changed)
    for tied, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if getattr(config, "ensure_weight_tying", False) and source in names:
            continue  # the adapter changes both
        if {tied, source} <= names:
            raise ExportError(
                f"merge_adapter cannot merge {tied} and {source}, which are tied in the base model but are trained separately. "
                f"Export the adapter without merging, or set ensure_weight_tying=True in LoraConfig."
            )
        for name, other in ((tied, source), (source, tied)):
            if name in names:
                raise ExportError(
                    f"merge_adapter cannot merge {name}, which is tied to {other}, without changing both. Export the adapter "
                    f"without merging, or leave {name.removesuffix('.weight')} out of lora_target_modules and "
                    f"lora_modules_to_save, or set ensure_weight_tying=True in LoraConfig."
                )


def _adapted_weight(name: str, layer: torch.nn.Module) -> str:
    """Return the name of the parameter that a LoRA layer adapts. LoRA layers may wrap each other around one base layer."""
    leaf = getattr(layer, "parameter_name", "weight")
    while hasattr(layer, "base_layer"):
        name, layer = f"{name}.base_layer", layer.base_layer
    return f"{name}.{leaf}"


def _is_transposed(layer: "LoraLayer") -> bool:
    """Return whether a layer's weight is (in, out) or (expert, in, out) instead of (out, in) or (expert, out, in)."""
    return bool(layer.fan_in_fan_out or getattr(layer.get_base_layer(), "is_transposed", False))


class ShardMerger:
    """Merges LoRA into this rank's shards of the base weights. Raises an ExportError if this is impossible.

    Create a merger on every rank; `gather` is a collective, `merge` is not.
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
        config = peft_model.peft_config[self._adapter]
        _check_mergeable(config)
        self._layers: dict[str, tuple[str, LoraLayer]] = {}  # name of the adapted weight -> (name of the layer, layer)
        for full_name, module in model.named_modules():
            if hasattr(module, "lora_A") and self._adapter in getattr(module, "lora_A", {}):
                name = parameter_names.without_wrappers(full_name + ".")[:-1]
                self._layers[_adapted_weight(name, module)] = (name, module)
        kinds = ("Linear", "Conv1D", "ParamWrapper")
        layers = self._layers.values()  # a layer that is an FSDP2 unit has the class FSDPLinear
        unsupported = [name for name, layer in layers if type(layer).__name__.removeprefix("FSDP") not in kinds]
        if unsupported:
            raise ExportError(
                f"merge_adapter supports linear layers and experts only, not {unsupported[:3]}. Merge the adapter with PEFT."
            )
        self._slices = local_slices(model)
        own = [name for name in self._slices if parameter_names.adapter_of(name) == self._adapter]
        copies = [name for name in own if _is_trained_copy(name, self._adapter)]
        merged = {f"{name}.{part}" for name, _ in layers for part in self._parameters()}
        unknown = [name for name in own if name not in merged and name not in copies]
        if unknown:
            raise ExportError(f"merge_adapter cannot merge {unknown[0]}. Export the adapter and merge it with PEFT.")
        changed = map(parameter_names.in_base_model, [*self._layers, *copies])
        _check_tied(peft_model.get_base_model(), config, changed)
        self._matrices: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._magnitudes: dict[str, torch.Tensor] = {}  # for DoRA
        self._factors: dict[str, torch.Tensor] = {}
        dora = [weight for weight, (_, layer) in self._layers.items() if self._adapter in layer.lora_magnitude_vector]
        for piece in (self._slices[weight] for weight in dora):
            if piece.first % piece.shape[1] or piece.values.numel() % piece.shape[1]:
                raise ExportError(
                    "merge_adapter merges DoRA under FSDP2 only. Export the adapter and merge it with PEFT."
                )

    def _parameters(self) -> list[str]:
        """Return the names, within a layer, of the parameters that `gather` reads."""
        return [f"{matrix}.{self._adapter}.weight" for matrix in ("lora_A", "lora_B", "lora_magnitude_vector")]

    def gather(self) -> None:
        """Give every rank the full adapter matrices of all layers. Collective: every rank must call this."""
        matrix_a, matrix_b, magnitudes = self._parameters()
        for weight, (name, module) in self._layers.items():
            a, b = (self._slices[f"{name}.{matrix}"] for matrix in (matrix_a, matrix_b))
            device = a.values.device
            self._matrices[weight] = (gather_full(a, device), gather_full(b, device))
            if self._adapter in module.lora_magnitude_vector:
                self._magnitudes[weight] = gather_full(self._slices[f"{name}.{magnitudes}"], device)

    def merge(self, piece: Slice, start: int, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, which start at element `start` of a slice, with the adapter merged in."""
        matrices = self._matrices.get(piece.name)
        if matrices is None or not values.numel():
            return values
        _, layer = self._layers[piece.name]
        scaling, factors = layer.scaling[self._adapter], self._factors.get(piece.name)
        if factors is None and piece.name in self._magnitudes:
            width = piece.shape[1]
            own, first_row = piece.values.view(-1, width), piece.first // width
            magnitude, rows = self._magnitudes[piece.name], range(first_row, first_row + len(own))
            factors = self._factors[piece.name] = dora_factors(
                lambda top, bottom: own[top - first_row : bottom - first_row],
                rows,
                width,
                magnitude,
                *matrices,
                scaling,
            )
        first = piece.first + start
        return add_rows(values, first, piece.shape, *matrices, scaling, _is_transposed(layer), factors)


def add_rows(
    values: torch.Tensor,
    first: int,
    shape: tuple[int, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    is_transposed: bool,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `values`, a weight's elements from `first` on (1-D), plus `scaling * B @ A`, computed as in PEFT.

    The weight has `shape` (out, in), or (in, out) if `is_transposed` (GPT-2's Conv1D); A is (r, in) and B is (out, r).
    `scaling` is alpha / r, or alpha / sqrt(r) for rsLoRA. DoRA multiplies the sum by `factors` (out,) afterwards.
    Fused experts add a leading dimension: A is (experts * r, in), one expert after another, and B is (out, r * experts), with
    the columns of the experts interleaved.
    """
    if len(shape) == 3:
        num_experts, size = shape[0], shape[1] * shape[2]
        a, b = a.view(num_experts, -1, a.shape[1]), b.view(len(b), -1, num_experts)
        merged, end = [], first + values.numel()
        for expert in range(first // size, -(-end // size)):
            start = max(first, expert * size)
            part = values[start - first : (expert + 1) * size - first]
            matrices = a[expert], b[:, :, expert]
            merged.append(add_rows(part, start - expert * size, shape[1:], *matrices, scaling, is_transposed))
        return torch.cat(merged)
    left, right = (a.T, b.T) if is_transposed else (b, a)
    width = shape[1]
    top, bottom = first // width, -(-(first + values.numel()) // width)
    delta = (left[top:bottom] @ right) * scaling
    skipped = first - top * width
    part = delta.reshape(-1)[skipped : skipped + values.numel()]
    if factors is None:
        return values + part.to(values.dtype)
    by_element = factors[top:bottom].repeat_interleave(width)[skipped : skipped + values.numel()]
    return (by_element * (values + part)).to(values.dtype)


def dora_factors(
    read_rows: Callable[[int, int], torch.Tensor],
    rows: range,
    width: int,
    magnitude: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Return the factors (out,) by which DoRA multiplies the rows of `W + scaling * B @ A`; NaN for rows outside `rows`.

    `read_rows(top, bottom)` returns rows [top, bottom) of W as (bottom - top, width). A few megabytes are read at a time.
    """
    factors = torch.full_like(magnitude, torch.nan)
    step = max(1, CHUNK_ELEMENTS // width)
    for top in range(rows.start, rows.stop, step):
        bottom = min(top + step, rows.stop)
        adapted = read_rows(top, bottom) + (b[top:bottom] @ a) * scaling
        factors[top:bottom] = magnitude[top:bottom] / torch.linalg.norm(adapted, dim=1).to(adapted.dtype)
    return factors


def is_equal(one: "DcpTensor | FileTensor", other: "DcpTensor | FileTensor") -> bool:
    """Return whether two tensors of one shape hold the same bytes. Reads both in chunks, until a byte differs."""
    count, step = math.prod(one.shape), CHUNK_ELEMENTS
    parts = ((start, min(step, count - start)) for start in range(0, count, step))
    return all(
        torch.equal(one.read(*part).view(torch.uint8), other.read(*part).view(torch.uint8))  # NaN differs from NaN
        for part in parts
    )


class StoredAdapter:
    """A LoRA adapter on disk, to merge into base weights on disk; raises an ExportError if it cannot be merged row by row."""

    def __init__(
        self,
        config: "LoraConfig",
        tensors: "Mapping[str, DcpTensor | FileTensor]",
        model: "PreTrainedModel",
        adapter_name: str = "default",
    ) -> None:
        _check_mergeable(config)
        start = str(config.init_lora_weights).lower()
        if start.startswith(CHANGES_BASE):
            raise ExportError(
                f"the adapter was initialized with {start}, which changes the base weights, so it cannot be merged into the base "
                f"model's files. Merge it with PEFT: PeftModel.from_pretrained(base, adapter).merge_and_unload()."
            )
        try:
            adapted = dict(adapt_on_meta(model, config).named_modules())
        except ValueError as error:
            raise ExportError(
                f"the adapter does not fit {model.config.name_or_path}: {summarize(error, 'line')}. Pass the base model that the "
                f"adapter was trained on."
            ) from error
        self._layers: dict[str, LoraLayer] = {}  # name of the adapted weight -> layer
        self._matrices: dict[str, dict[str, DcpTensor | FileTensor]] = {}
        self._saved_modules: dict[str, DcpTensor | FileTensor] = {}
        self._config = config
        for name, tensor in tensors.items():
            plain = name.removeprefix("base_model.model.").replace(f".modules_to_save.{adapter_name}.", ".")
            path, marker, matrix = parameter_names.without_adapter_name(plain, adapter_name).rpartition(".lora_")
            layer, weight = adapted.get(f"base_model.model.{path}"), f"{path}.weight"
            if hasattr(layer, "lora_A"):
                weight = parameter_names.in_base_model(_adapted_weight(f"base_model.model.{path}", layer))
                self._layers[weight] = layer
            if marker and matrix in ("A.weight", "B.weight"):
                self._matrices.setdefault(weight, {})[matrix[0]] = tensor
            elif marker and matrix.removesuffix(".weight") == "magnitude_vector" and config.use_dora:
                self._matrices.setdefault(weight, {})["magnitude"] = tensor
            elif marker:
                raise ExportError(f"merge_adapter cannot merge {name}. Export the adapter and merge it with PEFT.")
            elif ".original_module." not in name:
                # A trained bias of an adapted layer is `<layer>.base_layer.bias`.
                weight = plain.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
                self._saved_modules[weight] = tensor
        self._latest: tuple[str, tuple[torch.Tensor, torch.Tensor], torch.Tensor | None] | None = None

    def check_fits(self, model: "PreTrainedModel") -> None:
        """Raise an ExportError if the base model has no parameter of the right shape for one of the adapter's tensors.

        Also raises one if the adapter changes only one of two tied weights.
        """
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        unmatched = [name for name in self._matrices if name not in self._layers]
        unmatched += [name for name in self._saved_modules if name not in shapes]
        unmatched += [n for n, tensor in self._saved_modules.items() if n in shapes and tensor.shape != shapes[n]]
        if unmatched:
            raise ExportError(
                f"the base model lacks the adapter's {unmatched[:3]}, or has them in another shape. Pass the base model "
                f"that the adapter was trained on."
            )
        # PEFT saves resized embeddings under both names of a tied weight.
        copies = self._saved_modules
        tied = (getattr(model, "all_tied_weights_keys", None) or {}).items()
        both = [pair for pair in tied if all(name in copies for name in pair)]
        equal = {name for one, other in both if is_equal(copies[one], copies[other]) for name in (one, other)}
        _check_tied(model, self._config, ({*self._matrices, *copies}) - equal)

    def replaces(self, name: str) -> bool:
        """Return whether the adapter has a trained copy of a base weight."""
        return name in self._saved_modules

    def copy_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the trained copy of a base weight."""
        return self._saved_modules[name].dtype

    def merge(
        self,
        name: str,
        shape: tuple[int, ...],
        first: int,
        values: torch.Tensor,
        read_base: Callable[[int, int], torch.Tensor],
    ) -> torch.Tensor:
        """Return `values`, elements of a base weight from `first` on, with the adapter merged in if it changes that weight.

        `read_base(start, count)` returns `count` elements of the base weight, beginning with element `start`.
        """
        if name in self._saved_modules and values.numel():
            return self._saved_modules[name].read(first, values.numel()).to(values.dtype)
        if name not in self._matrices or not values.numel():
            return values
        if self._latest is None or self._latest[0] != name:
            self._latest = (name, *self._read(name, shape, read_base))
        _, (a, b), factors = self._latest
        layer = self._layers[name]
        return add_rows(values, first, shape, a, b, layer.scaling["default"], _is_transposed(layer), factors)

    def _read(
        self, name: str, shape: tuple[int, ...], read_base: Callable[[int, int], torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
        """Return the matrices A and B that adapt a weight, and DoRA's factors for its rows (None without DoRA)."""
        full = {
            key: tensor.read(0, torch.Size(tensor.shape).numel()).reshape(tensor.shape)
            for key, tensor in self._matrices[name].items()
        }
        if "magnitude" not in full:
            return (full["A"], full["B"]), None

        def read_rows(top: int, bottom: int) -> torch.Tensor:
            return read_base(top * shape[1], (bottom - top) * shape[1]).view(-1, shape[1])

        rows, matrices = range(shape[0]), (full["A"], full["B"])
        scaling = self._layers[name].scaling["default"]
        return matrices, dora_factors(read_rows, rows, shape[1], full["magnitude"].view(-1), *matrices, scaling)
