"""A model on meta stays without weights when Accelerate has sharded it.

There is no hook to load the shards. The only way is `fsdp_cpu_ram_efficient_loading`, for which
rank 0 holds the full model in host memory.

accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
  --fsdp_cpu_ram_efficient_loading false fill_shards.py
"""

import torch
from accelerate import Accelerator, init_empty_weights
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator()
config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
with init_empty_weights(include_buffers=False):
    model = LlamaForCausalLM(config)
model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
assert not empty, (
    f"{len(empty)} parameters have no values and no place to load them, such as {empty[0]}"
)
