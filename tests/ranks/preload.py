"""Imports for the fork server, so that the tests' ranks need not import these modules."""

import gc
import importlib
import pkgutil

import matplotlib.backends.backend_agg  # noqa: F401
import torch.distributed.checkpoint.state_dict
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

import hf_fsdp_recipes

for module in pkgutil.walk_packages(hf_fsdp_recipes.__path__, "hf_fsdp_recipes."):
    if not module.name.startswith("hf_fsdp_recipes.tools"):  # no rank imports these
        importlib.import_module(module.name)
# transformers builds and keeps the mappings of all models.
get_checkpoint_conversion_mapping("llama")
gc.collect()
# Otherwise every rank's garbage collection would walk these objects and copy their pages.
gc.freeze()
