"""SIZE_BASED_WRAP with fsdp_version 2 wraps the module list of the layers and fails.

The list has no forward.

accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy SIZE_BASED_WRAP \
  --fsdp_min_num_params 2000 wrap_by_size.py
"""

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator()
config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = LlamaForCausalLM(config)
model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
tokens = torch.ones(1, 8, dtype=torch.long, device=accelerator.device)
model(input_ids=tokens, labels=tokens).loss.backward()
