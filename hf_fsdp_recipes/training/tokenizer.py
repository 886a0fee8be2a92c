"""The tokenizer: loaded once, as SFTTrainer will have it, and told apart from another one."""

import copy
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import DataError, LoadError

PROBE = "The 3 quick brown Foxes, née Fuchs,\n\tjump: don't they?  <s>"  # what normalizers and pre-tokenizers differ in


def load_tokenizer(arguments: Any) -> Any:
    """Load the model's tokenizer on rank 0 and hand it to all. Collective: every rank must call this."""
    from transformers import AutoTokenizer

    name = arguments.recipe.tokenizer_name or arguments.model.model_name_or_path
    revision = None if arguments.recipe.tokenizer_name else arguments.model.model_revision

    def read() -> Any:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                name, revision=revision, trust_remote_code=getattr(arguments.training, "trust_remote_code", False)
            )
            tokenizer.add_tokens(arguments.recipe.special_tokens or [], special_tokens=True)
        except Exception as error:
            raise LoadError(
                f"no tokenizer at {name}: {str(error).splitlines()[0]} Remedy: check the "
                f"name; a directory needs config.json, safetensors and tokenizer.json."
            ) from error
        return tokenizer

    return distributed.run_on_main(read)


def tokenizer_for_rows(tokenizer: Any, training: Any) -> Any:
    """Return a copy with the end token and chat template that SFTTrainer will give it. No collective.

    Source: trl 1.16, SFTTrainer.__init__, which does this to tokenizer and model together, before it prepares rows.

    Raises:
        DataError: no such token, or no chat template at `chat_template_path`.
    """
    tokenizer = copy.deepcopy(tokenizer)
    if training.eos_token is not None:
        if training.eos_token not in tokenizer.get_vocab():
            raise DataError(f"eos_token: {training.eos_token!r} is not in the vocabulary. Remedy: name one that is.")
        tokenizer.eos_token = training.eos_token
    path = training.chat_template_path
    if path is None:
        return tokenizer
    try:
        if path.endswith((".jinja", ".j2")):
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        else:
            _clone_chat_template(tokenizer, path)
    except Exception as error:
        raise DataError(
            f"chat_template_path: {path} cannot be read: {str(error).splitlines()[0]} Remedy: a .jinja file, or a model."
        ) from error
    return tokenizer


def _clone_chat_template(tokenizer: Any, source: str) -> None:
    """Take template and tokens over from another tokenizer as TRL does, without a model to resize."""
    from trl import clone_chat_template

    model = SimpleNamespace(vocab_size=0, can_generate=lambda: False)
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())

    def resize(new_num_tokens: int, pad_to_multiple_of: int) -> None:
        model.vocab_size = -(-new_num_tokens // pad_to_multiple_of) * pad_to_multiple_of

    model.resize_token_embeddings = resize
    clone_chat_template(model, tokenizer, source)


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a SHA-256 of what decides how rows become tokens: vocabulary, template, special tokens, a probe."""
    facts = [
        sorted(tokenizer.get_vocab().items()),
        tokenizer.chat_template,
        sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"),
        tokenizer(text=PROBE)["input_ids"],
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
