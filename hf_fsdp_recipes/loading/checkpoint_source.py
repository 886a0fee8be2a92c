"""Records which bytes of which files fill each parameter and buffer of a model on meta."""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from hf_fsdp_recipes import parameter_names
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading import dora
from hf_fsdp_recipes.loading.bnb_4bit import Quant4bitSpec
from hf_fsdp_recipes.loading.distribute import WeightStream
from hf_fsdp_recipes.loading.safetensors_index import (
    InMemory,
    SafetensorsIndex,
    StoredTensor,
    stored_in_memory,
)
from hf_fsdp_recipes.loading.shard_layout import ShardTarget
from hf_fsdp_recipes.loading.weight_mapping import TensorRange

Source = Literal["rank0", "direct", "auto"]
Verify = Literal["sample", "full"]


@dataclass
class CheckpointSource:
    """The checkpoint of a model whose parameters are still on meta."""

    name_or_path: str  # for messages
    index: SafetensorsIndex | None  # reads the files; only rank 0 has one, unless `is_direct`
    stored: dict[str, StoredTensor]  # the checkpoint's tensors by name, on every rank
    ranges: dict[str, list[TensorRange]]  # for each entry of the model's state dict, the stored ranges that fill it
    is_direct: bool = False  # every rank reads its own shards
    verify: Verify = "sample"  # how much of every tensor is read again and compared with the shards
    random_state: torch.Tensor = field(default_factory=torch.get_rng_state)  # rank 0's, to initialize new values
    # How to fill rows added to embeddings: a mean, or random values of this standard deviation. None if not resized.
    new_rows: Literal["mean"] | float | None = None
    quantized: dict[str, Quant4bitSpec] = field(default_factory=dict)  # how each 4-bit weight is quantized

    def stream(self) -> WeightStream:
        """Return a stream that fills shards with the weights that rank 0 reads."""
        return WeightStream(self.index, verifies_all=self.verify == "full")

    def add_tensor(self, key: str, dtype: torch.dtype, shape: tuple[int, ...], values: InMemory | None) -> TensorRange:
        """Add a tensor that is not in the files. On ranks that read, `values` is the tensor, or a function that creates it."""
        self.stored[key] = stored_in_memory(key, dtype, shape)
        if self.index is not None and values is not None:
            self.index.add_in_memory(self.stored[key], values.to(dtype) if isinstance(values, torch.Tensor) else values)
        return TensorRange(key, shape, 0, math.prod(shape))


def check_sources(model: torch.nn.Module, source: CheckpointSource) -> None:
    """Raise a LoadError if `source` has no values for a parameter on meta. Any rank may call this."""
    unfilled = []
    for name, parameter in model.named_parameters():
        is_filled = parameter_names.in_base_model(name) in source.ranges and (
            not parameter_names.is_adapter(name) or ".modules_to_save." in name
        )
        if parameter.is_meta and not is_filled and not dora.is_magnitude(name):
            unfilled.append(name)
    if unfilled:
        raise LoadError(
            f"{len(unfilled)} parameters are on the meta device, and the checkpoint has no values for them: {unfilled[:3]}. If you "
            f"add modules after load_model, create them on the CPU, or load the model with from_pretrained."
        )


def full_target(name: str, tensor: torch.Tensor, source: CheckpointSource) -> ShardTarget:
    """Describe how to fill a tensor that every rank holds in full."""
    ranges = source.ranges[parameter_names.in_base_model(name)]
    stored_dtype = source.stored[ranges[0].tensor].dtype
    return ShardTarget(name, ranges, stored_dtype, tensor.dtype, 0, tensor.detach().view(-1))


def fill_buffers(model: torch.nn.Module, source: CheckpointSource, stream: WeightStream) -> None:
    """Fill the buffers that are in the checkpoint, on every rank. Collective: every rank must call this."""
    for name, buffer in model.named_buffers():
        if parameter_names.in_base_model(name) in source.ranges:
            staging = torch.empty_like(buffer, memory_format=torch.contiguous_format)
            stream.fill([full_target(name, staging, source)])
            buffer.copy_(staging)
