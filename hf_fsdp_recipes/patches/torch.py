"""torch: private parts that are used, not replaced, each with its own check."""

from importlib.metadata import version
from typing import Any

import torch

from hf_fsdp_recipes.errors import PatchError


def set_local_tensor(dtensor: Any, local: torch.Tensor) -> Any:
    """Give a DTensor another local tensor of the same shape and dtype, perhaps in host memory, and return it.

    `DTensor.from_local` would move the local tensor to the mesh's device.

    Raises:
        PatchError: this torch keeps a DTensor's local tensor elsewhere.
    """
    if not isinstance(getattr(dtensor, "_local_tensor", None), torch.Tensor):
        raise PatchError(
            f"torch {version('torch')} does not keep a DTensor's local tensor in _local_tensor. Install torch 2.11 to 2.13."
        )
    dtensor._local_tensor = local
    return dtensor
