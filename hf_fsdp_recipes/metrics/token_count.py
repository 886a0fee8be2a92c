"""Token counts of batches as the model receives them, without padding and without a device synchronization.

Trainer's `include_num_input_tokens_seen` and TRL's `num_tokens` gather and synchronize at every micro-batch. The former
also takes real tokens for padding if the pad token is the end-of-text token and there is no mask (packing). Both counts
remain in the logs.
"""

from collections.abc import Mapping
from typing import Any

import torch


def count_tokens(inputs: Mapping[str, Any], window: int | None = None) -> torch.Tensor:
    """Count a batch's tokens and the pairs of tokens that attend to each other.

    Sequences in packed batches begin at `cu_seq_lens_q`, or else where `position_ids` restart at 0. A packed sequence of one
    token is padding from `pad_to_multiple_of` and does not count.

    Args:
        inputs: the forward pass's keyword arguments; `attention_mask` is (B, T).
        window: length of the sliding attention window in tokens, or None.

    Returns:
        (3,) int64 on the batch's device: the fields of `flops.TokenCounts`. If only `position_ids` separate the
        sequences, `window_pairs` may be too low, by at most window * window / 4 per sequence.
    """
    boundaries, mask, positions = (inputs.get(key) for key in ("cu_seq_lens_q", "attention_mask", "position_ids"))
    if isinstance(boundaries, torch.Tensor):
        lengths = boundaries.diff()
        return _from_lengths(lengths * (lengths > 1), window)
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return _from_lengths(mask.sum(dim=-1), window)
    if isinstance(positions, torch.Tensor) and positions.ndim == 2:
        return _from_positions(positions, window)
    batch = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    return _from_lengths(torch.full((batch.shape[0],), batch.shape[1], device=batch.device), window)


def _from_lengths(lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    lengths = lengths.long()
    seen = lengths if window is None else lengths.clamp(max=window)
    return torch.stack([lengths.sum(), (lengths * lengths).sum(), (lengths * seen).sum()])


def _from_positions(positions: torch.Tensor, window: int | None) -> torch.Tensor:
    # 1 + 3 + 5 + ... + (2 n - 1) = n * n. This avoids looking up sequence lengths, which would synchronize with the device.
    odd = 2 * positions.long() + 1
    next_positions = torch.nn.functional.pad(positions[:, 1:], (0, 1))
    is_counted = ((positions != 0) | (next_positions != 0)).long()
    seen = odd if window is None else odd.clamp(max=window)
    return torch.stack([is_counted.sum(), (odd * is_counted).sum(), (seen * is_counted).sum()])
