"""Supports `resize_token_embeddings` between `load_model` and sharding.

transformers cannot average embeddings on meta, so the resize is recorded and applied when the weights load: each added row is
the mean of the checkpoint's rows, or random with the config's `initializer_range` if `mean_resizing=False`.

Source: transformers 5.23 `modeling_utils.py`, `_init_added_embeddings_weights_with_mean`. That function also adds noise,
with a covariance scaled by 1e-9; this module adds none.
"""

import functools
import math
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import parameter_names
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.checkpoint_source import CheckpointSource
from hf_fsdp_recipes.loading.safetensors_index import SafetensorsIndex, StoredTensor
from hf_fsdp_recipes.loading.weight_mapping import TensorRange

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS_PER_READ = 4096


def track_resize(model: "PreTrainedModel", source: CheckpointSource) -> None:
    """Make `model.resize_token_embeddings` work on meta and record its calls. Not a collective."""
    original = model.resize_token_embeddings

    @functools.wraps(original)
    def resize(
        new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> torch.nn.Module:
        std = getattr(model.config.get_text_config(decoder=True), "initializer_range", 0.02)
        source.new_rows = "mean" if mean_resizing else std
        return original(new_num_tokens, pad_to_multiple_of, mean_resizing=False)

    model.resize_token_embeddings = resize


def apply_resize(model: torch.nn.Module, source: CheckpointSource) -> None:
    """Fit the ranges of resized embeddings to their new number of rows; raise a LoadError if any other shape has changed.

    Every rank must call this; it does not communicate.
    """
    # Ranks that read must draw the same rows: each keeps only its shard of them, and replicas must be equal.
    generator = torch.Generator()
    generator.set_state(source.random_state)
    # Values of a new head are drawn from the same state, and must not appear again as rows.
    generator.manual_seed(int(torch.randint(2**31, (), generator=generator)))
    for full_name, parameter in model.named_parameters():
        name = parameter_names.in_base_model(full_name)
        ranges = source.ranges.get(name)
        if ranges is None or not parameter.is_meta or name in source.quantized:
            continue
        num_stored = sum(part.num_elements for part in ranges)
        if num_stored == parameter.numel():
            continue
        width = math.prod(parameter.shape[1:])
        is_resized = source.new_rows is not None and len(ranges) == 1 and num_stored % width == 0
        if not is_resized or ranges[0].shape[1:] != parameter.shape[1:]:
            raise LoadError(
                f"{name} has shape {list(parameter.shape)} in the model and {list(ranges[0].shape)} in the checkpoint. Only "
                f"the number of embeddings may change, with model.resize_token_embeddings."
            )
        source.ranges[name] = _resized_ranges(name, ranges[0], tuple(parameter.shape), source, generator)


def _resized_ranges(
    name: str, stored: TensorRange, shape: tuple[int, ...], source: CheckpointSource, generator: torch.Generator
) -> list[TensorRange]:
    width = math.prod(shape[1:])
    if math.prod(shape) < stored.num_elements:
        return [TensorRange(stored.tensor, stored.shape, 0, math.prod(shape))]
    num_added = shape[0] - stored.num_elements // width
    origin = source.stored[stored.tensor]
    added_shape = (num_added, *shape[1:])
    values = None
    if source.index is not None and source.new_rows == "mean":
        values = _mean_row(source.index, origin).expand(num_added, -1).reshape(added_shape)
    elif source.index is not None and source.new_rows is not None:
        values = torch.empty(added_shape).normal_(0.0, source.new_rows, generator=generator)
    return [stored, source.add_tensor(f"<resized>{name}", origin.dtype, added_shape, values)]


def _mean_row(index: SafetensorsIndex, stored: StoredTensor) -> torch.Tensor:
    """Average the rows of a stored matrix, a few thousand at a time, in double precision."""
    num_rows, width = stored.shape[0], math.prod(stored.shape[1:])
    total = torch.zeros(width, dtype=torch.float64)
    row_bytes = width * stored.dtype.itemsize
    for start in range(0, num_rows, _ROWS_PER_READ):
        count = min(_ROWS_PER_READ, num_rows - start)
        buffer = torch.empty(count * row_bytes, dtype=torch.uint8)
        index.read_into(buffer, stored, start * row_bytes)
        total += buffer.view(stored.dtype).reshape(count, width).to(torch.float64).sum(dim=0)
    return total / num_rows
