"""Imported once by the fork server, so that the ranks of the tests need not import these modules themselves."""

import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401
from peft import LoraConfig  # noqa: F401
from transformers import (  # noqa: F401
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralForCausalLM,
    Qwen3MoeForCausalLM,
    Trainer,
)
from trl import SFTConfig, SFTTrainer  # noqa: F401
