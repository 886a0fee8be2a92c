"""Counts the tokens of a batch as the model gets it, padding left out, without waiting for the device.

Trainer's `include_num_input_tokens_seen` and TRL's `num_tokens` gather and wait at every micro-batch, and the first
takes real tokens for padding where the pad token is also the end of a text and there is no mask (packing), so neither
is used here. Their figures stay in the logs.
"""

from collections.abc import Mapping
from typing import Any

import torch


def count_work(inputs: Mapping[str, Any], window: int | None = None) -> torch.Tensor:
    """Count a batch's tokens and pairs of tokens that attend to each other.

    Packed batches say where sequences begin: by `cu_seq_lens_q`, else by `position_ids` that start anew. A packed
    "sequence" of one token is what `pad_to_multiple_of` leaves (and has nothing to predict): it does not count.

    Args:
        inputs: the forward pass's keyword arguments; `attention_mask` as (B, T), others as transformers has them.
        window: tokens that a layer with a sliding window sees, or None.

    Returns:
        (3,) int64 on the batch's device: tokens, pairs, window pairs, as in `flops.Work`. Where only `position_ids`
        tell sequences apart, the last is a lower bound, off by at most a quarter of window * window a sequence.
    """
    boundaries, mask, positions = (inputs.get(key) for key in ("cu_seq_lens_q", "attention_mask", "position_ids"))
    if isinstance(boundaries, torch.Tensor):
        lengths = boundaries.diff()
        return _of_lengths(lengths * (lengths > 1), window)
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return _of_lengths(mask.sum(dim=-1), window)
    if isinstance(positions, torch.Tensor) and positions.ndim == 2:
        return _of_positions(positions, window)
    batch = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    return _of_lengths(torch.full((batch.shape[0],), batch.shape[1], device=batch.device), window)


def _of_lengths(lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    lengths = lengths.long()
    seen = lengths if window is None else lengths.clamp(max=window)
    return torch.stack([lengths.sum(), (lengths * lengths).sum(), (lengths * seen).sum()])


def _of_positions(positions: torch.Tensor, window: int | None) -> torch.Tensor:
    # 1 + 3 + 5 + ... + (2 n - 1) = n * n: no need to find where sequences end, which would wait for the device.
    odd = 2 * positions.long() + 1
    next_positions = torch.nn.functional.pad(positions[:, 1:], (0, 1))
    counts = ((positions != 0) | (next_positions != 0)).long()
    seen = odd if window is None else odd.clamp(max=window)
    return torch.stack([counts.sum(), (odd * counts).sum(), (seen * counts).sum()])
