"""What the planner runs in place of bitsandbytes' layers and of some functions.

The functions differ on a GPU, or cannot run on fake tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from transformers import PreTrainedModel, masking_utils
from transformers.integrations import moe
from trl.kernels import chunked_logprob

from hf_fsdp_recipes.tools.plan.job import Job

SCALE_BYTES = 4 / 64  # of each value: a float32 for each block
NESTED_SCALE_BYTES = 1 / 64 + 4 / (64 * 256)  # the scales are quantized, too


class PackedLinear(torch.nn.Linear):
    """A linear layer with a weight in 4 bits, like bitsandbytes' Linear4bit. It has no data.

    Args:
        linear: the layer that it replaces.
        dtype: in which packed values are stored, and in which they are multiplied.
        is_nested: whether the scales are quantized, too. Every rank has all scales.
    """

    scales: torch.Tensor

    def __init__(self, linear: torch.nn.Linear, dtype: torch.dtype, is_nested: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        num_values = self.weight.numel()
        packed = torch.empty(num_values // (2 * dtype.itemsize), 1, dtype=dtype, device="meta")
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        scale_bytes = NESTED_SCALE_BYTES if is_nested else SCALE_BYTES
        scales = torch.empty(round(num_values * scale_bytes), dtype=torch.uint8, device="meta")
        self.register_buffer("scales", scales, persistent=False)
        self.stored_dtype = dtype

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Unpack the weight and multiply rows by it. In the backward pass, unpack it again."""

        def unpack(_: object = None) -> torch.Tensor:
            return self.weight.new_empty(self.out_features, self.in_features).t()

        rows = rows.to(self.stored_dtype)
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, unpack):
            return rows @ unpack()


def pack_linears(model: PreTrainedModel, dtype: torch.dtype, is_nested: bool) -> None:
    """Pack the weights of linear layers, except the head, into 4 bits."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and module is not head:
            model.set_submodule(name, PackedLinear(module, dtype, is_nested))


@contextmanager
def replaced_functions(job: Job) -> Iterator[None]:
    """Replace functions that differ on a GPU or fail on fake tensors. Restore them at the end."""
    with ExitStack() as stack:
        for module, name, replacement in _replacements(job):
            stack.enter_context(mock.patch.object(module, name, replacement))
        yield


def _replacements(job: Job) -> Iterator[tuple[object, str, Callable[..., object]]]:
    """Generate (module, name, replacement) of each function."""
    is_flash = "flash" in str(job.arguments.model.attn_implementation)
    is_padded = job.shape[0] > 1 and not job.arguments.training.packing
    # SDPA needs a mask for padded rows, for packed rows and for sliding windows.
    has_mask = not is_flash and (job.is_joined or is_padded)

    def ignore_mask(
        padding: object,
        length: int,
        kv_length: int,
        offset: object,
        kv_offset: object,
        window: int | None = None,
    ) -> bool:
        is_windowed = window is not None and kv_length >= window
        return is_flash or not (has_mask or is_windowed)

    yield masking_utils, "_ignore_causal_mask_sdpa", ignore_mask
    find_packed = lambda position_ids: position_ids if has_mask else None  # noqa: E731
    yield masking_utils, "find_packed_sequence_indices", find_packed
    # The result has the same shape as that of the real function.
    yield moe, "_grouped_mm", lambda rows, weight, offs: rows.to(weight.dtype) @ weight[0]
    if not job.on_cpu:
        # On GPUs, attention kernels have dropout, and Triton kernels work in place.
        attend = torch.nn.functional.scaled_dot_product_attention
        without_dropout = lambda *args, dropout_p=0.0, **kwargs: attend(*args, **kwargs)  # noqa: E731
        yield torch.nn.functional, "scaled_dot_product_attention", without_dropout
        for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
            yield chunked_logprob, name, lambda *args, **kwargs: None
