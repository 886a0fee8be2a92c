"""Replaces what a rehearsal cannot read from the Hub: a gated model's tokenizer, and rows of the datasets in `_ROWS`."""

from pathlib import Path
from typing import TYPE_CHECKING

from datasets import Dataset

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.data.dataset_parts import Rows, read_splits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast
    from trl import ScriptArguments

_TEXT = "This row was made up for a rehearsal, because the dataset cannot be read here. "
# For each dataset that the shipped recipes name, one row with the columns that the dataset's Hub page shows.
_ROWS: dict[str, dict[str, object]] = {
    "tatsu-lab/alpaca": {"instruction": _TEXT, "input": "", "output": _TEXT, "text": _TEXT},
    "smangrul/code-chat-assistant-v1": {"content": f"<|prompter|>{_TEXT}<|assistant|>{_TEXT}<|endoftext|>"},
    "HuggingFaceTB/smoltalk": {"messages": [{"role": role, "content": _TEXT} for role in ("user", "assistant")]},
    "allenai/c4": {"text": _TEXT * 4, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"},
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
)


def read_rows(script: "ScriptArguments", num_rows: int) -> tuple[dict[str, Rows], str]:
    """Return a dict from split names to a dataset's rows, and a description of the rows.

    If the dataset cannot be reached but is listed in `_ROWS`, the rows are made up.
    """
    name = str(script.dataset_name)
    try:
        splits = read_splits(name, script.dataset_config, streaming=not Path(name).exists())
    except DataError as error:
        if name not in _ROWS or not isinstance(error.__cause__, ConnectionError):
            raise
    else:
        return splits, f"the first {num_rows} rows of {name}"
    rows = Dataset.from_list([_ROWS[name]] * num_rows)
    splits = {script.dataset_train_split: rows, script.dataset_test_split: rows}
    return splits, f"{num_rows} made-up rows with the columns of {name}, which cannot be reached"


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a byte-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=_CHAT_TEMPLATE, **tokens)
