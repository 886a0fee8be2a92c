"""Dequantizes FP8 and MXFP4 checkpoints while they are read, a few rows at a time.

The index describes a quantized weight as if it were stored in the requested dtype, and each range of the weight is dequantized
when it is read. So all loading options work as for unquantized checkpoints, and no rank holds a full weight.

Source: transformers 5.18 to 5.23, `integrations/finegrained_fp8.py` (`Fp8Dequantize`), `integrations/mxfp4.py`
(`Mxfp4Dequantize`), `quantizers/auto.py` (`get_hf_quantizer`). The values equal transformers' values bit for bit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.safetensors_index import SafetensorsIndex, StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.utils.quantization_config import QuantizationConfigMixin

METHODS = ("fp8", "mxfp4")
GROUP = 32  # number of MXFP4 values that share a scale; such a group takes 16 bytes


@dataclass(frozen=True)
class Fp8Weight:
    """A float8 weight of shape (..., rows, columns). Each block of `block[0]` rows and `block[1]` columns has one scale."""

    packed: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]

    def shape(self) -> tuple[int, ...] | None:
        """Return the shape of the dequantized weight, or None if a dtype is wrong or a block does not have exactly one scale."""
        *matrices, rows, columns = self.packed.shape
        expected = (*matrices, -(-rows // self.block[0]), -(-columns // self.block[1]))
        has_all = self.scales.shape == expected or math.prod(expected) == math.prod(self.scales.shape) == 1
        is_float = _is_float8(self.packed) and self.scales.dtype.is_floating_point
        return self.packed.shape if has_all and is_float else None

    def read(self, index: SafetensorsIndex, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return elements [start, start + count) of the dequantized weight (1-D, CPU). `SafetensorsIndex.read_into` calls this."""
        rows, columns = self.packed.shape[-2:]
        top, bottom = start // columns, -(-(start + count) // columns)
        row = torch.arange(top, bottom)
        scale_row = row // rows * -(-rows // self.block[0]) + row % rows // self.block[0]
        first, width = int(scale_row[0]), -(-columns // self.block[1])
        scales = _read(index, self.scales, first * width, (int(scale_row[-1]) + 1 - first) * width).view(-1, width)
        scales = scales.float()[scale_row - first].repeat_interleave(self.block[1], dim=1)[:, :columns]
        values = _read(index, self.packed, top * columns, (bottom - top) * columns).view(-1, columns).float() * scales
        return values.to(dtype).view(-1)[start - top * columns :][:count]


@dataclass(frozen=True)
class Mxfp4Weight:
    """The weights of a layer's experts, of shape (experts, columns, rows) when dequantized.

    They are stored as bytes of shape (experts, rows, groups, 16), with one scale per group.
    """

    packed: StoredTensor
    scales: StoredTensor

    def shape(self) -> tuple[int, ...] | None:
        """Return the shape of the dequantized weights, or None if a dtype is wrong or a group does not have exactly one scale."""
        has_all = len(self.scales.shape) == 3 and self.packed.shape == (*self.scales.shape, GROUP // 2)
        if not has_all or {self.packed.dtype, self.scales.dtype} != {torch.uint8}:
            return None
        return self.scales.shape[0], self.scales.shape[2] * GROUP, self.scales.shape[1]

    def read(self, index: SafetensorsIndex, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return elements [start, start + count) of the dequantized weight (1-D, CPU)."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        _, rows, groups = self.scales.shape
        parts, end, expert_elements = [], start + count, groups * GROUP * rows
        while start < end:
            expert, first = divmod(start, expert_elements)
            last = min(first + end - start, expert_elements)
            left, right = first // (GROUP * rows), -(-last // (GROUP * rows))
            # Read the full expert, a few megabytes: the needed groups are only a few bytes in each of its many rows.
            packed, scales = (
                _read(index, tensor, expert * size, size).view(1, *tensor.shape[1:])[:, :, left:right]
                for tensor, size in ((each, math.prod(each.shape[1:])) for each in (self.packed, self.scales))
            )
            values = convert_moe_packed_tensors(packed, scales, dtype=dtype).view(-1)
            parts.append(values[first - left * GROUP * rows : last - left * GROUP * rows])
            start += last - first
        return torch.cat(parts)


def _read(index: SafetensorsIndex, tensor: StoredTensor, start: int, count: int) -> torch.Tensor:
    values = torch.empty(count, dtype=tensor.dtype)
    index.read_into(values.view(torch.uint8), tensor, start * tensor.dtype.itemsize)
    return values


def _is_float8(tensor: StoredTensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1


def take_quantization(
    config: "PreTrainedConfig", name_or_path: str, is_quantizing: bool = False
) -> "QuantizationConfigMixin | None":
    """Remove the quantization config from a model's config; return the config that dequantizes the checkpoint, or None.

    Returns None if the checkpoint is not quantized. Any rank may call this.

    Raises:
        LoadError: the checkpoint cannot be dequantized while it loads, or `is_quantizing` asks to quantize it again.
        ValueError, TypeError: the quantization config is invalid.
    """
    method, quantization = find_quantization(config)
    for part in (config, config.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    if method is not None and quantization is None:
        raise LoadError(
            f"{name_or_path} is already quantized: the quant_method in its config is {method}, and only {' and '.join(METHODS)} "
            f"can be dequantized. Use the unquantized model's id; load_in_4bit quantizes it while it loads."
        )
    if quantization is not None and is_quantizing:
        raise LoadError(
            f"{name_or_path} is already quantized ({method}) and is dequantized while it loads, so it cannot be quantized with "
            f"load_in_4bit or quantization_config. Remove them, or use the unquantized model's id; or export this model, and load "
            f"the export in 4 bits."
        )
    return quantization


def find_quantization(config: "PreTrainedConfig") -> tuple[str | None, "QuantizationConfigMixin | None"]:
    """Return a checkpoint's quantization method, and the transformers config that dequantizes the checkpoint.

    Both are None if the checkpoint is not quantized. If the method is not supported, only the config is None.
    """
    from transformers.quantizers.auto import AutoQuantizationConfig

    found = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    quantization = next((each for each in found if each is not None), None)
    if quantization is None:
        return None, None
    quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = quantization.get("quant_method", quantization)
    if method not in METHODS:
        return str(method), None
    return method, AutoQuantizationConfig.from_dict(quantization | {"dequantize": True})


def dequantizing_arguments(
    config: "PreTrainedConfig", part: "PreTrainedConfig"
) -> "dict[str, QuantizationConfigMixin]":
    """Return the arguments that make `from_pretrained` dequantize FP8 and MXFP4 on every device; {} for other checkpoints.

    `part` is the config to load: `config` itself or its text part. This function sets `part`'s quantization config.
    """
    _, quantization = find_quantization(config)
    if quantization is None:
        return {}
    part.quantization_config = quantization.to_dict()
    return {"quantization_config": quantization}


def describe_dequantized(
    stored: Mapping[str, StoredTensor], quantization: "QuantizationConfigMixin | None", dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """Describe a checkpoint's tensors as if it were not quantized: each quantized weight and its scales become one entry.

    That entry has the dtype and shape of the dequantized weight. Reads no values. Any rank may call this.

    Raises:
        LoadError: a weight is not quantized as `quantization` says, or lacks its scales.
    """
    result = dict(stored)
    for name, scales in stored.items():
        weight: Fp8Weight | Mxfp4Weight
        target = name.removesuffix("_scale_inv").removesuffix("_scales")
        if name.endswith("_scales") and f"{target}_blocks" in stored:
            weight = Mxfp4Weight(stored[f"{target}_blocks"], scales)
        elif name.endswith("_scale_inv") and target in stored and len(stored[target].shape) > 1:
            packed = stored[target]
            block = getattr(quantization, "weight_block_size", None) or packed.shape[-2:]
            weight = Fp8Weight(packed, scales, (block[0], block[1]))
        else:
            continue
        packed, shape = weight.packed, weight.shape()
        if quantization is None or shape is None:
            raise LoadError(
                f"{packed.name} is {packed.dtype} of shape {list(packed.shape)}, with scales in {scales.dtype} of shape "
                f"{list(scales.shape)}; this does not fit the quantization_config in the model's config.json "
                f"({quantization and quantization.to_dict()}). Download the checkpoint again, or use the unquantized model's id."
            )
        del result[name], result[packed.name]
        num_bytes = math.prod(shape) * dtype.itemsize
        result[target] = StoredTensor(target, packed.file, dtype, shape, packed.start, num_bytes, weight)
    unscaled = [name for name, tensor in result.items() if quantization is not None and _is_float8(tensor)]
    if unscaled:
        raise LoadError(
            f"{len(unscaled)} tensors are in float8 without scales that can be read: the checkpoint has no "
            f"{unscaled[0]}_scale_inv. Use the unquantized model's id."
        )
    return result
