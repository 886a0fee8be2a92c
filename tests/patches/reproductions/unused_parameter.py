"""A run with a trained parameter that never got a gradient cannot be resumed under FSDP2.

The optimizer has no state for it, so none is saved. Loading asks for the state of each parameter.
This example trains an image-text model on text.

accelerate launch --num_processes 1 --use_fsdp --fsdp_version 2 \
  --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
  --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer \
  --fsdp_state_dict_type SHARDED_STATE_DICT unused_parameter.py
"""

import tempfile

from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

size = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
vision_config = CLIPVisionConfig(image_size=8, patch_size=4, **size)
text_config = LlamaConfig(vocab_size=256, **size)
config = LlavaConfig(vision_config=vision_config, text_config=text_config, image_token_index=255)
args = TrainingArguments(tempfile.mkdtemp(), max_steps=2, save_steps=1, report_to="none")
rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 64
Trainer(LlavaForConditionalGeneration(config), args, train_dataset=rows).train()
print("resuming from the newest checkpoint")
args.max_steps = 3
trainer = Trainer(LlavaForConditionalGeneration(config), args, train_dataset=rows)
trainer.train(resume_from_checkpoint=True)
