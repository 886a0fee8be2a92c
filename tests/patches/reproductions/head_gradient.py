"""A trained output head learns from the rows of one rank: its gradient is not summed over ranks.

TRL's fused loss reads the head's weight without calling the head. Accelerate has made the head an
FSDP2 unit of its own, because it finds no final norm in a PeftModel. So FSDP reduces no gradient.

accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 \
  --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP head_gradient.py
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
directory = tempfile.mkdtemp()
LlamaForCausalLM(config).save_pretrained(directory)
model = LlamaForCausalLM.from_pretrained(directory, dtype="float32")
words = Tokenizer(WordLevel({"<unk>": 0, "<pad>": 1}, unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
# One row a rank. Half of the words occur in the first row only, and half in the second only.
rows = torch.arange(2, 62).reshape(2, 30)

before = model.lm_head.weight.detach().clone()
model(input_ids=rows, labels=rows).loss.backward()
expected_change = -model.lm_head.weight.grad
model.zero_grad(set_to_none=True)

args = SFTConfig(
    tempfile.mkdtemp(),
    max_steps=1,
    per_device_train_batch_size=1,
    optim="sgd",
    learning_rate=1.0,
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    bf16=False,
    gradient_checkpointing=False,
    save_strategy="no",
    report_to="none",
)
lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
trainer = SFTTrainer(
    model,
    args,
    train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}),
    processing_class=tokenizer,
    peft_config=lora,
)
trainer.train()
head = trainer.model.base_model.model.lm_head.modules_to_save["default"].weight
change = head.full_tensor().detach() - before
error = ((change - expected_change).norm() / expected_change.norm()).item()
assert error < 1e-3, f"the head's change is wrong by {error:.0%}"
