"""Tells whether values are finite."""

import torch
from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity. It takes no temporary memory.

    Float8 tensors are not checked and count as finite.
    """
    if not tensor.numel() or not tensor.is_floating_point() or tensor.itemsize == 1:
        return True
    extremes = torch.stack(torch.aminmax(tensor))  # which are NaN if any element is
    return bool(extremes.isfinite().all())
