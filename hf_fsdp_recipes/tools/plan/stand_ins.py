"""What the planner uses in place of bitsandbytes' layers and of some functions.

The functions differ on a GPU, or cannot run on fake tensors.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Linear, Parameter, functional
from transformers import PreTrainedModel

from hf_fsdp_recipes.tools.plan.job import Job
from hf_fsdp_recipes.upstream.planner_internals import (
    MULTIPLY_GROUPS,
    NEEDS_NO_MASK,
    TILES,
    ModTracker,
    chunked_logprob,
    masking_utils,
    moe,
)

SCALE_BYTES = 4 / 64  # of each value: a float32 for each block
NESTED_SCALE_BYTES = 1 / 64 + 4 / (64 * 256)  # the scales are quantized, too


class PackedLinear(Linear):
    """A linear layer with a weight in 4 bits, like bitsandbytes' Linear4bit. It has no data.

    Args:
        linear: the layer that it replaces.
        dtype: in which packed values are stored, and in which they are multiplied.
        is_nested: whether the scales are quantized, too. Every rank has all scales.
    """

    def __init__(self, linear: Linear, dtype: torch.dtype, is_nested: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        num_values = linear.weight.numel()
        packed = torch.empty(num_values // (2 * dtype.itemsize), 1, dtype=dtype, device="meta")
        self.weight = Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        scale_bytes = NESTED_SCALE_BYTES if is_nested else SCALE_BYTES
        scales = torch.empty(round(num_values * scale_bytes), dtype=torch.uint8, device="meta")
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Unpack the weight and multiply rows by it. In the backward pass, unpack it again."""

        def unpack(_: object = None) -> Tensor:
            return self.weight.new_empty(self.in_features, self.out_features)

        rows = rows.to(self.weight.dtype)
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, unpack):
            return rows @ unpack()


def pack_linears(model: PreTrainedModel, dtype: torch.dtype, is_nested: bool) -> None:
    """Pack the weights of linear layers, except the head, into 4 bits."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear) and module is not model.get_output_embeddings():
            model.set_submodule(name, PackedLinear(module, dtype, is_nested))


def replacements(job: Job) -> Iterator[tuple]:
    """Generate (module, name, replacement) of functions that differ on a GPU or on fake tensors."""
    is_flash = "flash" in str(job.arguments.model.attn_implementation)
    is_padded = job.is_padded(job.shape[0])
    # SDPA needs a mask for padded rows, for packed rows and for sliding windows.
    has_mask = not is_flash and (job.is_joined or is_padded)

    # Without its hooks, torch's tracker has no statistics of each module. They would take minutes
    # for a large model.
    yield ModTracker, "register_user_hooks", lambda *hooks: None
    yield (
        masking_utils,
        NEEDS_NO_MASK,
        lambda padding, length, kv_length, offset, kv_offset, window=None: (
            is_flash or not (has_mask or (window is not None and kv_length >= window))
        ),
    )
    yield (
        masking_utils,
        "find_packed_sequence_indices",
        lambda positions: positions if has_mask else None,
    )
    # The result has the same shape as that of the real function.
    yield moe, MULTIPLY_GROUPS, lambda rows, weight, offs: rows.to(weight.dtype) @ weight[0]
    if job.on_cpu:
        return
    # On GPUs, attention kernels have dropout, and Triton kernels work in place.
    attend = functional.scaled_dot_product_attention
    yield (
        functional,
        "scaled_dot_product_attention",
        lambda *args, dropout_p=0.0, **options: attend(*args, **options),
    )
    for name in TILES:
        yield chunked_logprob, name, lambda *args, **kwargs: None
