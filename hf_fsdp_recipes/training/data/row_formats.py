"""Recognizes the row format of a dataset by its columns."""

from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from hf_fsdp_recipes.errors import DataError

KNOWN_FORMATS = (
    "messages",
    "prompt + completion",
    "instruction (+ input) + output",
    "text (or the column that dataset_text_field names)",
    "input_ids (+ labels), already tokenized",
)
# The prompts that the alpaca models were trained with. Source: tatsu-lab/stanford_alpaca.
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def to_sft_format(rows: Dataset, name: str, text_column: str = "text", prompt_template: str = "alpaca") -> Dataset:
    """Return rows in one of SFTTrainer's formats: input_ids, messages, prompt + completion, or text.

    Raises:
        DataError: the columns match no known format.
    """
    columns = list(rows.column_names)
    if "input_ids" in columns or "messages" in columns or {"prompt", "completion"} <= set(columns):
        return rows
    if {"instruction", "output"} <= set(columns):
        convert = _alpaca_to_messages if prompt_template == "chat" else _alpaca_to_completion
        return rows.map(convert, remove_columns=columns)
    if text_column in columns:
        return rows
    raise DataError(
        f"{name} has columns {columns}, which match none of the known formats: {'; '.join(KNOWN_FORMATS)}. Rename columns, or "
        f"set dataset_text_field to the one with the text."
    )


# A row without an instruction gets a null prompt, so that it is dropped and counted as empty.
def _alpaca_to_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": alpaca_prompt(row) if row["instruction"] else None, "completion": row["output"]}


def _alpaca_to_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    parts = [row["instruction"], row.get("input")]
    question = "\n\n".join(part for part in parts if part) if row["instruction"] else None
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]}


def alpaca_prompt(row: Mapping[str, Any]) -> str:
    """Return the alpaca prompt of a row with `instruction` and optional `input`."""
    template = ALPACA_WITH_INPUT if row.get("input") else ALPACA_WITHOUT_INPUT
    return template.format(instruction=row["instruction"], input=row.get("input"))
