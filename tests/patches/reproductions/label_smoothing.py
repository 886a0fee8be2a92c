"""With label smoothing, Trainer does not shift the labels of a model that FSDP2 has sharded.

It looks for the name of the model's class in a list, but `fully_shard` has renamed the class. So
each position learns its own token instead of the next. There is no warning.

accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 \
  --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP label_smoothing.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = LlamaForCausalLM(config)
with torch.no_grad():  # so that each position predicts its own token
    model.lm_head.weight.copy_(50 * model.model.embed_tokens.weight)
args = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=1,
    per_device_train_batch_size=1,
    label_smoothing_factor=0.1,
    average_tokens_across_devices=False,
    save_strategy="no",
    report_to="none",
)
row = {"input_ids": list(range(1, 33)), "labels": list(range(1, 33))}
trainer = Trainer(model, args, train_dataset=[row] * 2)
batch = {name: torch.tensor([tokens], device=args.device) for name, tokens in row.items()}
expected_loss = trainer.compute_loss(model, batch).item()
loss = trainer.train().training_loss
assert abs(loss - expected_loss) < 1e-3 * expected_loss, (
    f"the loss is {loss:.2f} instead of {expected_loss:.2f}"
)
