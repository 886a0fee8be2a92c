"""Names of torch, Accelerate, transformers and TRL that only the planner needs, and why.

With a TRL older than 1.16, importing this module raises an ImportError.
"""

import torch
from accelerate.utils.fsdp_utils import (
    fsdp2_apply_ac,  # checkpoints activations as `Accelerator.prepare` does
    fsdp2_prepare_model,  # shards as `Accelerator.prepare` does
)
from torch._subclasses.fake_tensor import FakeTensorMode  # tensors without data
from torch.distributed._tools.mem_tracker import (
    MemTracker,  # counts live tensors
)
from torch.distributed._tools.mem_tracker import (
    _MemRefType as MemoryKind,  # the kinds of memory that it tells apart
)
from torch.distributed._tools.mod_tracker import ModTracker  # its hooks measure each module
from torch.testing._internal.distributed.fake_pg import FakeStore  # ranks that do not exist
from transformers import masking_utils  # decides which masks attention needs
from transformers.integrations import moe  # multiplies with the weights of experts
from trl.kernels import chunked_logprob  # the kernels of the loss
from trl.trainer.utils import add_fused_lm_head  # the loss of SFTTrainer

# Reads a value, which a fake tensor does not have.
READ_VALUE = torch.ops.aten._local_scalar_dense.default

# Functions of `masking_utils` and `moe` that read values, which fake tensors do not have.
NEEDS_NO_MASK = "_ignore_causal_mask_sdpa"
MULTIPLY_GROUPS = "_grouped_mm"
# Functions of `chunked_logprob` that are Triton kernels on GPUs, where they work in place.
TILES = ("_forward_tile", "_backward_tile", "_addmm_fp32")


def current_bytes(tracker: MemTracker) -> dict:
    """Return {kind: bytes} of the live tensors. The public snapshot is a slow copy of it."""
    [snapshot] = tracker._curr_mem_snap.values()
    return snapshot
