"""A save that is interrupted leaves a checkpoint that cannot be loaded.

`resume_from_checkpoint=True` chooses it all the same. No callback can prevent that: Trainer writes
to the final name, and calls `on_save` after the checkpoint is written.

python save_checkpoint.py
"""

import tempfile

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class KilledInSecondSave(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        if self.state.global_step == 2:
            raise KeyboardInterrupt
        super()._save_optimizer_and_scheduler(output_dir)


config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
args = TrainingArguments(tempfile.mkdtemp(), max_steps=3, save_steps=1, report_to="none")
rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 64
try:
    KilledInSecondSave(LlamaForCausalLM(config), args, train_dataset=rows).train()
except KeyboardInterrupt:
    print("resuming from the newest checkpoint")
Trainer(LlamaForCausalLM(config), args, train_dataset=rows).train(resume_from_checkpoint=True)
