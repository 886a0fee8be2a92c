"""Drops rows that cannot be trained on, and counts them by reason."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from datasets import Dataset

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.data.dataset_parts import NOT_UTF8_MARK
from hf_fsdp_recipes.training.data.row_formats import Row

NO_LABEL = -100
# The columns of tokenized rows.
TOKEN_COLUMNS = ("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks")


class RowStatus(IntEnum):
    """Whether a row is kept or truncated, or why it is dropped."""

    KEPT = 0
    TRUNCATED = 1
    EMPTY = 2
    NOT_UTF8 = 3
    NO_ANSWER = 4
    REJECTED = 5
    NO_MARKED_ANSWER = 6
    SPECIAL_TOKENS_ONLY = 7
    NOTHING_TO_LEARN = 8
    INVALID_TOKENS = 9  # raises an error, so it is never counted


DROPPED = {
    RowStatus.EMPTY: "empty",
    RowStatus.NOT_UTF8: "not UTF-8",
    RowStatus.NO_ANSWER: "without an answer",
    RowStatus.REJECTED: "rejected by the chat template",
    RowStatus.NO_MARKED_ANSWER: "with no answer marked by the chat template",
    RowStatus.SPECIAL_TOKENS_ONLY: "with special tokens only",
    RowStatus.NOTHING_TO_LEARN: "with nothing to learn",
}


@dataclass
class RowCounts:
    """The numbers of rows read, kept, truncated and dropped, and the chat template's error if it rejected a row."""

    by_status: Counter[RowStatus] = field(default_factory=Counter)
    rejection: str = ""

    @property
    def num_rows(self) -> int:
        """The number of rows read."""
        return self.by_status.total()

    @property
    def num_kept(self) -> int:
        """The number of rows to train on, including truncated ones."""
        return self.num_rows - sum(self.by_status[status] for status in DROPPED)

    def __add__(self, other: "RowCounts") -> "RowCounts":
        return RowCounts(self.by_status + other.by_status, self.rejection or other.rejection)

    def describe(self, max_length: int | None) -> str:
        """Return one line for the log. `max_length`, in tokens, is the length to which rows were truncated."""
        text = f"kept {self.num_kept:,} of {self.num_rows:,} rows"
        found = self.by_status
        dropped = [f"{found[status]:,} {reason}" for status, reason in DROPPED.items() if found[status]]
        if found[RowStatus.NOTHING_TO_LEARN] and max_length is not None:
            dropped[-1] += f" in the first {max_length} tokens"
        if self.rejection:
            dropped = [f"{part} ({self.rejection})" if "rejected" in part else part for part in dropped]
        if dropped:
            text += f"; dropped {', '.join(dropped)}"
        if found[RowStatus.TRUNCATED]:
            text += f"; truncated {found[RowStatus.TRUNCATED]:,} to {max_length} tokens"
        return text

    def as_dict(self) -> dict[str, int]:
        """Return the counts as a JSON-serializable dict, {name: count}."""
        counts = {status.name.lower(): self.by_status[status] for status in (RowStatus.TRUNCATED, *DROPPED)}
        return {"rows": self.num_rows, "kept": self.num_kept} | counts


def filter_rows(rows: Dataset, statuses: np.ndarray) -> tuple[Dataset, RowCounts]:
    """Return the rows to train on, without their `status` column, and the counts of all rows by status."""
    counts = np.bincount(statuses, minlength=len(RowStatus)).tolist()
    kept = np.flatnonzero(~np.isin(statuses, list(DROPPED)))
    selected = rows if len(kept) == len(rows) else rows.select(kept)
    return selected.remove_columns("status"), RowCounts(Counter(dict(zip(RowStatus, counts, strict=True))))


def check_any_kept(counts: RowCounts, name: str, max_length: int | None) -> None:
    """Raise a DataError with the reasons if every row was dropped."""
    if counts.num_kept == 0:
        raise DataError(
            f"{name} has nothing to train on: {counts.describe(max_length)}. Check the columns, the chat template and "
            f"max_length."
        )


def print_counts(counts: Mapping[str, RowCounts], max_length: int | None) -> None:
    """Print one line per dataset and split on rank 0."""
    for name, of_dataset in counts.items():
        distributed.print_main(f"{name}: {of_dataset.describe(max_length)}")


def check_row(row: Row, text_column: str, needs_answer: bool) -> RowStatus:
    """Return KEPT, or the status that says why a row is dropped before tokenization.

    If `needs_answer` is true, a conversation without an assistant message is also dropped.
    """
    if "input_ids" in row:
        return RowStatus.KEPT if row["input_ids"] else RowStatus.EMPTY
    texts, answers = _texts_and_answers(row, text_column)
    if None in texts or not _has_text(texts):
        return RowStatus.EMPTY
    if any(NOT_UTF8_MARK in text for text in texts if text):
        return RowStatus.NOT_UTF8
    if answers is not None and (answers or needs_answer) and not _has_text(answers):
        return RowStatus.NO_ANSWER
    return RowStatus.KEPT


def find_token_fault(row: Row, vocabulary_size: int) -> str | None:
    """Return what is wrong with a tokenized row, or None."""
    for name in TOKEN_COLUMNS:
        values = row.get(name)
        if values is None:
            continue
        if not isinstance(values, list):
            return f"{name} is {values!r:.60}, not a list of integers"
        # Floats such as 1.0 are allowed: a value such as 0.5 turns its entire column into floats, but only that value is wrong.
        for value in values:
            if type(value) not in (int, float) or value % 1:
                return f"{name} has {value!r:.60}, which is not an integer"
        if len(values) != len(row["input_ids"]):
            return f"{name} has {len(values)} values for {len(row['input_ids'])} input_ids"
        end = 2 if "mask" in name else vocabulary_size
        is_labels = name == "labels"
        wrong = {value for value in values if not (0 <= value < end or (is_labels and value == NO_LABEL))}
        if wrong:
            others = f", or {NO_LABEL}" if is_labels else ""
            return f"{name} has {min(wrong)}, but values must be at least 0 and below {end}{others}"
    return None


def _has_text(texts: list[str | None]) -> bool:
    return any(text.strip() for text in texts if text)


def _texts_and_answers(row: Row, text_column: str) -> tuple[list[str | None], list[str | None] | None]:
    """Return all texts of a row, and the answers among them, or None for plain text and malformed messages."""
    if "prompt" in row and "completion" in row:
        answers = _texts(row["completion"])
        return _texts(row["prompt"]) + answers, answers
    if "messages" not in row:
        return _texts(row[text_column]), None
    messages = row["messages"]
    if not isinstance(messages, list):
        return [None], None
    texts = _texts(messages)
    if None in texts:
        return texts, None
    return texts, _texts([message for message in messages if message["role"] == "assistant"])


def _texts(value: object) -> list[str | None]:
    """Return a list with the text of each message, or with the string itself. A malformed text is None."""
    if isinstance(value, list):
        return [_message_text(message) for message in value]
    return [value if isinstance(value, str) else None]


def _message_text(message: object) -> str | None:
    if not isinstance(message, dict) or not message.get("role"):
        return None
    content = message.get("content")
    if isinstance(content, list):  # a list of parts, as multimodal templates expect it
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    if content is None and message.get("tool_calls"):
        return str(message["tool_calls"])
    return content if isinstance(content, str) else None
