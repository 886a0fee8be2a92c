"""A differential fuzzer: a Trainer with this package against a stock Trainer.

A combination is drawn at random: TrainingArguments, callbacks that act at some event, calls before
and after `train()`, and perhaps a second session that resumes. It runs twice on CPU ranks: with a
stock Trainer, and with `load_model` and `ShardedCheckpointCallback`. After each call these are
compared: its result or exception, the callbacks' events, the trainer's state and arguments, signal
handlers and random states, the weights, and all files, tensor by tensor. The combinations run under
FSDP2 on one and two ranks, under DDP on two, and in one process, with and without LoRA.

A difference must stand in the table in announced.py, with the sentence that announces it.

    python -m tests.fuzz --seed 1 --cases 200 --results results.jsonl
    python -m tests.fuzz --replay '{"world": "fsdp1", "save_total_limit": -1}'
    python -m tests.fuzz --replay '{...}' --minimize
    python -m tests.fuzz --list tests/fuzz/cases.txt
    python -m tests.fuzz --summary results.jsonl
"""
