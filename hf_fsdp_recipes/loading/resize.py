"""Embeddings that were resized between `load_model` and sharding: more or fewer rows than the checkpoint has.

transformers cannot average embeddings that are on meta, so the wish is noted and met when the rows arrive:
added rows are the mean of the rows that the checkpoint holds, or freshly initialised where that is asked for.

Source: transformers 5.23 `modeling_utils.py`, `_init_added_embeddings_weights_with_mean`, which draws from a
normal distribution around the mean with a covariance scaled by 1e-9; here it is the mean itself.
"""

import functools
import math
from typing import Any

import torch

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading import names
from hf_fsdp_recipes.loading.safetensors_index import StoredTensor
from hf_fsdp_recipes.loading.weight_mapping import TensorRange

_ROWS_AT_ONCE = 4096


def track_resize(model: Any, source: Any) -> None:
    """Let `model.resize_token_embeddings` work on meta, and remember that it was called. No collective."""
    original = model.resize_token_embeddings

    @functools.wraps(original)
    def resize(
        new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> Any:
        source.resized = "mean" if mean_resizing else "initialised"
        return original(new_num_tokens, pad_to_multiple_of, mean_resizing=False)

    model.resize_token_embeddings = resize


def untrack_resize(model: Any) -> None:
    """Give the model its own method back."""
    model.__dict__.pop("resize_token_embeddings", None)


def apply_resize(model: torch.nn.Module, source: Any) -> None:
    """Change the pieces of resized embeddings to their new number of rows. Every rank; no collective.

    Raises:
        LoadError: another tensor has another size than the checkpoint, or rows are longer now.
    """
    for full_name, parameter in model.named_parameters():
        name = names.in_base_model(full_name)
        pieces = source.pieces.get(name)
        if pieces is None or not parameter.is_meta or name in source.quantized:
            continue
        num_stored = sum(piece.num_elements for piece in pieces)
        if num_stored == parameter.numel():
            continue
        width = math.prod(parameter.shape[1:])
        if (
            source.resized is None
            or len(pieces) != 1
            or num_stored % width
            or pieces[0].shape[1:] != parameter.shape[1:]
        ):
            raise LoadError(
                f"{name} has shape {list(parameter.shape)} and the checkpoint has {list(pieces[0].shape)}. Remedy: change "
                f"the size of embeddings with model.resize_token_embeddings, and nothing else."
            )
        source.pieces[name] = _fitted(name, pieces[0], tuple(parameter.shape), source)


def _fitted(name: str, stored: TensorRange, shape: tuple[int, ...], source: Any) -> list[TensorRange]:
    width = math.prod(shape[1:])
    if math.prod(shape) < stored.num_elements:
        return [TensorRange(stored.tensor, stored.shape, 0, math.prod(shape))]
    num_added = shape[0] - stored.num_elements // width
    key = f"<resized>{name}"
    origin = source.stored[stored.tensor]
    added_shape = (num_added, *shape[1:])
    added = StoredTensor(key, origin.file, origin.dtype, added_shape, 0, num_added * width * origin.dtype.itemsize)
    source.stored[key] = added
    if source.checkpoint is not None:
        row = _mean_row(source.checkpoint, origin) if source.resized == "mean" else None
        values = (
            torch.empty(added_shape).normal_(0.0, 0.02)
            if row is None
            else row.expand(num_added, -1).reshape(added_shape)
        )
        source.checkpoint.keep(added, values.to(origin.dtype))
    return [stored, TensorRange(key, added_shape, 0, num_added * width)]


def _mean_row(checkpoint: Any, stored: StoredTensor) -> torch.Tensor:
    """Average the rows of a stored matrix, a few thousand at a time, in double precision."""
    num_rows, width = stored.shape[0], math.prod(stored.shape[1:])
    total = torch.zeros(width, dtype=torch.float64)
    row_bytes = width * stored.dtype.itemsize
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, num_rows - start)
        buffer = torch.empty(count * row_bytes, dtype=torch.uint8)
        checkpoint.read_into(buffer, stored, start * row_bytes)
        total += buffer.view(stored.dtype).reshape(count, width).to(torch.float64).sum(dim=0)
    return total / num_rows
