"""Imported once by the fork server, so that the ranks of the tests need not import these modules themselves."""

import gc

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
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from trl import SFTConfig, SFTTrainer  # noqa: F401

get_checkpoint_conversion_mapping("llama")  # transformers builds and keeps the mappings of all models
gc.collect()
gc.freeze()  # otherwise every rank's collections would walk these objects and copy their pages
