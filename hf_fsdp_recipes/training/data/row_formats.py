"""Recognizes the row format of a dataset by its columns, and converts the rows to a format of SFTTrainer."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from hf_fsdp_recipes.errors import DataError

Row = dict[str, Any]
CHAT_OPTIONS = ("tools", "chat_template_kwargs")
# Required and optional columns of the known formats. The first matching format is used.
FORMATS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("input_ids",), ("labels", "attention_mask", "completion_mask", "assistant_masks")),
    (("prompt", "completion"), CHAT_OPTIONS),
    (("messages",), CHAT_OPTIONS),
    (("conversations",), ("system", *CHAT_OPTIONS)),
    (("instruction", "output"), ("input", "history", "system")),
]
ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "user", "assistant", "tool")}
# The prompts that the alpaca models were trained with. Source: tatsu-lab/stanford_alpaca.
ALPACA_TASK = "Below is an instruction that describes a task"
ALPACA_REQUEST = "Write a response that appropriately completes the request."
ALPACA_WITHOUT_INPUT = f"{ALPACA_TASK}. {ALPACA_REQUEST}"
ALPACA_WITH_INPUT = f"{ALPACA_TASK}, paired with an input that provides further context. {ALPACA_REQUEST}"


def find_format(columns: Sequence[str], text_column: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the format of a dataset with these columns, as a pair of its required and its optional columns.

    Returns None if the dataset has none of the known formats.
    """
    formats = [*FORMATS, ((text_column,), ())]
    return next((known for known in formats if set(known[0]) <= set(columns)), None)


def to_sft_format(
    rows: Dataset, name: str, text_column: str = "text", prompt_template: str = "alpaca", first: int = 1
) -> Dataset:
    """Return rows in one of SFTTrainer's formats: input_ids, messages, prompt + completion, or text.

    Raises a DataError for a row or columns that cannot be converted. Its message numbers the rows from `first`.
    """
    columns = list(rows.column_names)
    known = find_format(columns, text_column)
    if known is None:
        formats = [" + ".join(required) for required, _ in FORMATS]
        raise DataError(
            f"{name} has columns {columns}, which match none of the known formats: {'; '.join(formats)}; or text. Rename "
            f"columns, or set dataset_text_field to the one with the text."
        )
    if known[0] == ("conversations",):
        convert = _conversation_to_messages
    elif known[0] == ("instruction", "output"):
        convert = _alpaca_to_messages if prompt_template == "chat" else _alpaca_to_completion
    else:
        return rows

    def convert_row(row: Row, index: int) -> Row:
        try:
            return convert(row)
        except ValueError as error:
            raise DataError(f"{name}, row {first + index}: {error}") from error

    dropped = [column for column in columns if column not in CHAT_OPTIONS]
    return rows.map(convert_row, with_indices=True, remove_columns=dropped)


# A row without an instruction gets a null prompt, so that it is dropped and counted as empty.
def _alpaca_to_completion(row: Row) -> Row:
    return {"prompt": alpaca_prompt(row) if row["instruction"] else None, "completion": row["output"]}


def _alpaca_to_messages(row: Row) -> Row:
    parts = [row["instruction"], row.get("input")]
    question = "\n\n".join(part for part in parts if part) if row["instruction"] else None
    turns = [*_earlier_turns(row), (question, row["output"])]
    messages: list[object] = []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": _with_system(row, messages)}


def _conversation_to_messages(row: Row) -> Row:
    """Convert a ShareGPT conversation to messages: rename its keys and roles.

    TRL's `maybe_convert_to_chatml` is not used, because it would keep roles that chat templates do not know.
    """
    messages = row["conversations"]
    return {"messages": _with_system(row, [_to_message(message) for message in messages]) if messages else messages}


def _to_message(message: object) -> object:
    if not isinstance(message, dict) or message.get("from") is None:
        return message
    sender = message["from"]
    if sender not in ROLES:
        raise ValueError(f"a message is from {sender!r}. Use one of {', '.join(ROLES)}.")
    return {"role": ROLES[sender], "content": message.get("value")}


def _with_system(row: Row, messages: list[object]) -> list[object]:
    return [{"role": "system", "content": row["system"]}, *messages] if row.get("system") else messages


def alpaca_prompt(row: Row) -> str:
    """Return the alpaca prompt of a row with `instruction`, and optional `input`, `history` and `system`.

    Earlier turns come before the instruction, and a system message replaces the prompt's opening sentences.
    """
    sections = [row.get("system") or (ALPACA_WITH_INPUT if row.get("input") else ALPACA_WITHOUT_INPUT)]
    for question, answer in _earlier_turns(row):
        sections += [f"### Instruction:\n{question}", f"### Response:\n{answer}"]
    sections.append(f"### Instruction:\n{row['instruction']}")
    if row.get("input"):
        sections.append(f"### Input:\n{row['input']}")
    return "\n\n".join([*sections, "### Response:\n"])


def _earlier_turns(row: Row) -> list[list[str]]:
    turns = row.get("history") or []
    for turn in turns if isinstance(turns, list) else [turns]:
        if not isinstance(turn, list) or list(map(type, turn)) != [str, str]:
            raise ValueError(f"history has {turn!r:.60}, which is not a pair of texts [question, answer].")
    return turns
