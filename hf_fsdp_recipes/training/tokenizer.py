"""Loads the recipe's tokenizer, sets its end token and chat template as SFTTrainer does, and computes its hash.

The hash is stored with prepared rows, so that a run with another tokenizer refuses them.
"""

import copy
import hashlib
import json
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import DataError, LoadError, summarize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl import SFTConfig

    from hf_fsdp_recipes.training.arguments import Arguments

# A text whose tokens change if the normalizer or the pre-tokenizer changes. Its token ids are part of `tokenizer_hash`.
PROBE = "The 3 quick brown Foxes, née Fuchs,\n\tjump: don't they?  <s>"
CLONED_VOCABULARY_MULTIPLE = 64  # TRL pads the vocabulary to a multiple of this when it clones a chat template


def load_tokenizer(arguments: "Arguments") -> "PreTrainedTokenizerBase":
    """Load the recipe's tokenizer on rank 0 and broadcast it, or load it on every rank if it has custom code. Collective."""
    from transformers import AutoTokenizer

    name = arguments.recipe.tokenizer_name or arguments.model.model_name_or_path
    revision = None if arguments.recipe.tokenizer_name else arguments.model.model_revision

    def read() -> "PreTrainedTokenizerBase":
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                name, revision=revision, trust_remote_code=arguments.training.trust_remote_code
            )
            tokenizer.add_tokens(arguments.recipe.special_tokens or [], special_tokens=True)
        except Exception as error:
            cure = "Check the name; a local directory needs tokenizer.json and config.json."
            if "trust_remote_code" in str(error):
                cure = "Set trust_remote_code: true if you trust that code."
            reason = summarize(error.__cause__ or error)
            raise LoadError(f"cannot load a tokenizer from {name}: {reason}. {cure}") from error
        return tokenizer

    def read_if_builtin() -> "PreTrainedTokenizerBase | None":
        # A class from custom code exists only on the rank that imported it, so the tokenizer cannot be broadcast.
        tokenizer = read()
        return None if type(tokenizer).__module__.startswith("transformers_modules") else tokenizer

    tokenizer = distributed.run_on_main(read_if_builtin)
    return distributed.main_first(read) if tokenizer is None else tokenizer


def tokenizer_for_rows(tokenizer: "PreTrainedTokenizerBase", training: "SFTConfig") -> "PreTrainedTokenizerBase":
    """Return a copy of a tokenizer with the end token and chat template that SFTTrainer sets later. Not a collective.

    Source: trl 1.16 `SFTTrainer.__init__`, which changes tokenizer and model together before it prepares rows.
    """
    tokenizer = copy.deepcopy(tokenizer)
    if training.eos_token is not None:
        if training.eos_token not in tokenizer.get_vocab():
            raise DataError(f"eos_token: {training.eos_token!r} is not in the vocabulary. Choose a token that is.")
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
            f"chat_template_path: {path} cannot be read: {summarize(error, 'line')}. Pass a .jinja file or a model with a "
            f"chat template."
        ) from error
    check_chat_template(tokenizer, f"chat_template_path: {path}")
    return tokenizer


def check_chat_template(tokenizer: "PreTrainedTokenizerBase", source: str) -> None:
    """Raise a DataError that names the line if a tokenizer's chat template has a syntax error."""
    from jinja2 import TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        raise DataError(
            f"{source} is not valid Jinja, {describe_template_error(error)}. Correct it, or choose another template."
        ) from error
    except Exception:
        return  # not a syntax error: some templates reject this message


def describe_template_error(error: Exception) -> str:
    """Return the message of an error in a chat template, with the template's line if known."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    message = summarize(error, "line")
    return message if line is None else f"line {line}: {message}"


def _clone_chat_template(tokenizer: "PreTrainedTokenizerBase", source_path: str) -> None:
    """Copy another tokenizer's chat template and added tokens, as `trl.clone_chat_template` does, but without a model to resize."""
    from transformers import AddedToken, AutoTokenizer

    source = AutoTokenizer.from_pretrained(source_path, trust_remote_code=False)
    tokenizer.chat_template = source.get_chat_template()
    added = source.added_tokens_decoder.values()
    tokenizer.add_tokens([token for token in added if token.content not in tokenizer.vocab])
    tokenizer.eos_token = source.eos_token
    index = 0
    while len(tokenizer.vocab) % CLONED_VOCABULARY_MULTIPLE:
        tokenizer.add_tokens(AddedToken(f"<extra_id_{index}>"))
        index += 1


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a SHA-256 hash of what affects tokenization: vocabulary, template, special tokens, and the token ids of PROBE."""
    facts = [
        sorted(tokenizer.get_vocab().items()),
        tokenizer.chat_template,
        sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"),
        tokenizer(text=PROBE)["input_ids"],
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
