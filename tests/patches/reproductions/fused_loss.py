"""SFTTrainer's loss is not that of the model's own logits.

python fused_loss.py
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1}
config = ModernBertDecoderConfig(
    vocab_size=32, num_attention_heads=2, sep_token_id=2, **sizes, **special
)
model = ModernBertDecoderForCausalLM(config)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 2}, unk_token="<pad>")),
    pad_token="<pad>",
    eos_token="<eos>",
)
rows = Dataset.from_list([{"input_ids": list(range(16))}] * 2)
args = SFTConfig(tempfile.mkdtemp(), report_to="none", use_cpu=True, bf16=False)
trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
batch = next(iter(trainer.get_train_dataloader()))
model.eval()
with torch.no_grad():
    own_loss = model(**batch).loss.item()
    loss = trainer.compute_loss(model, batch).item()
assert abs(loss - own_loss) < 1e-3 * own_loss, (
    f"SFTTrainer computes a loss of {loss:.4f}, and the model {own_loss:.4f}"
)
