"""Rows without a label for the loss are counted as the trainer's own collator labels them."""

import itertools
import random

import pytest
import torch
from datasets import Dataset

from hf_fsdp_recipes.training.labels import num_taught

LONG = "The big fox runs over the fence. " * 9
PROMPTS = [{"prompt": LONG[:size], "completion": "So."} for size in range(0, 290, 10)]


# {% generation %} marks the tokens of the assistant.
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
)
CHATS = [
    {"messages": [{"role": "user", "content": LONG[:size]}, {"role": "assistant", "content": "So"}]}
    for size in range(0, 290, 10)
]


def _random_rows():
    """Return tokenized rows of 0 to 12 tokens, of which many have few labels or none."""
    draw = random.Random(0)
    rows = []
    for _ in range(2500):
        ids = [draw.randrange(5, 300) for _ in range(draw.randrange(13))]
        share = draw.choice((0, 0.1, 1))
        labels = [token if draw.random() < share else -100 for token in ids]
        rows.append({"input_ids": ids, "labels": labels})
    return [*rows, {"input_ids": [], "labels": []}]


def _trainer(model_dir, rows, output, **arguments):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = MARKED
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir),
        args=SFTConfig(str(output), bf16=False, use_cpu=True, report_to="none", **arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def _num_taught_by_collator(trainer):
    """Count as the collator labels each row, and the loss shifts its labels by one."""
    number = 0
    for row in trainer.train_dataset:
        if not row["input_ids"]:
            continue  # the collator cannot collate an empty row alone
        batch = trainer.data_collator([row])
        labels = batch["labels"][0].tolist()
        positions = batch.get("position_ids", torch.arange(len(labels))[None])[0]
        starts = (positions == 0).nonzero().flatten().tolist()
        for start, end in itertools.pairwise([*starts, len(labels)]):
            number += any(label != -100 for label in labels[start + 1 : end])
    return number


@pytest.mark.parametrize(
    ("rows", "arguments"),
    [
        ("random", {"max_length": None}),
        ("random", {"max_length": None, "shuffle_dataset": True}),
        ("random", {"max_length": 6}),
        ("random", {"max_length": 6, "truncation_mode": "keep_end"}),
        ("random", {"max_length": None, "padding_free": True}),
        ("random", {"max_length": 32, "packing": True}),
        ("random", {"max_length": 8, "packing": True, "packing_strategy": "bfd_split"}),
        ("random", {"max_length": 8, "packing": True, "packing_strategy": "wrapped"}),
        ("prompts", {"max_length": 64}),
        ("prompts", {"max_length": 64, "completion_only_loss": False}),
        ("prompts", {"max_length": 64, "packing": True}),
        ("prompts", {"max_length": None}),
        ("texts", {"max_length": 64}),
        ("chats", {"max_length": 64, "assistant_only_loss": True}),
        ("chats", {"max_length": 64, "assistant_only_loss": True, "packing": True}),
    ],
)
def test_rows_are_counted_as_the_collator_labels_them(rows, arguments, tiny_model, tmp_path):
    texts = [{"text": text} for text in ("", "a", LONG, "")]
    made = {"random": _random_rows(), "prompts": PROMPTS, "texts": texts, "chats": CHATS}
    trainer = _trainer(tiny_model("llama"), made[rows], tmp_path, **arguments)
    expected = _num_taught_by_collator(trainer)
    assert 0 < expected == num_taught(trainer.train_dataset)


def test_of_all_rows_none_teaches_if_no_label_is_used():
    rows = [{"labels": [-100, -100]}, {"labels": [7]}, {"labels": [7, -100]}, {"labels": []}]
    assert num_taught(Dataset.from_list(rows)) == 0 == num_taught(Dataset.from_list([]))
    assert num_taught(Dataset.from_list([*rows, {"labels": [-100, 7]}]).select([4, 3, 0])) == 1
