"""Checks that FSDP2 ranks change every trained parameter as one plain process does.

One case trains a tiny random model twice for a few steps, with the same rows in the same
micro-batches:

- on FSDP2 ranks on the CPU (gloo), as recipes/sft.py does: `load_model`, SFTTrainer, `adjust`;
- as a reference in one process, without FSDP and without this package: `from_pretrained` and the
  same trainer. The micro-batches of all ranks are its accumulation steps, because Accelerate deals
  batches to the ranks in turn.

The change of each trained parameter is compared, relative to its change in the reference. The
values before the first step, the losses and the gradient norms must agree too. The reference
shares no FSDP with the ranks, so a fault that stock FSDP has too is visible.

    python -m tests.oracle llama lora_head --options tie=0
    python -m tests.oracle --list tests/oracle/cases.txt --results results.jsonl
    python -m tests.oracle --results results.jsonl --table
"""
