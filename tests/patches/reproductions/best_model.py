"""`load_best_model_at_end` loads an older checkpoint where FSDP2 saves sharded states.

Trainer looks for the directory of the best checkpoint before it creates it. So it finds the best
checkpoint only if it saves another one later. With two ranks, one can find it and wait for the
other, which does not.

accelerate launch --num_processes 1 --use_fsdp --fsdp_version 2 \
  --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_state_dict_type SHARDED_STATE_DICT \
  best_model.py
"""

import tempfile

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

scores = iter([0.5, 0.4, 0.9])


def next_score(_):
    return {"score": next(scores)}


config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
args = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=3,
    save_steps=1,
    eval_steps=1,
    eval_strategy="steps",
    load_best_model_at_end=True,
    metric_for_best_model="score",
    report_to="none",
)
rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 64
trainer = Trainer(
    LlamaForCausalLM(config),
    args,
    train_dataset=rows,
    eval_dataset=rows[:8],
    compute_metrics=next_score,
)
trainer.train()
loaded = trainer.state.best_model_checkpoint
assert str(loaded).endswith("checkpoint-3"), f"checkpoint-3 is the best, but {loaded} was loaded"
