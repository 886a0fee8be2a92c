"""`hf-fsdp generate`: tries a model or an adapter on prompts."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Optional

import yaml
from typer import Argument, Option

from hf_fsdp_recipes.errors import ToolError, explained

Turns = list[dict[str, str]]  # messages with a role and a content


def generate(
    model: Annotated[
        Path, Argument(help="Directory of a model or an adapter, such as runs/first/export.")
    ],
    fields: Annotated[
        Optional[list[str]],
        Argument(help="Fields of GenerationConfig, such as do_sample=true temperature=0.7."),
    ] = None,
    prompt: Annotated[
        Optional[list[str]],
        Option(help="A prompt. Without one, each line of standard input is a prompt."),
    ] = None,
    chat: Annotated[
        bool,
        Option("--chat", help="The prompts are the turns of a chat. An empty one starts anew."),
    ] = False,
    stop: Annotated[Optional[list[str]], Option(help="End an answer before this text.")] = None,
    base_model: Annotated[Optional[str], Option(help="Base model of an adapter.")] = None,
    max_new_tokens: Annotated[
        int, Option(min=1, help="Maximum number of tokens to generate.")
    ] = 200,
) -> None:
    """Continue prompts or chat, greedily unless `do_sample=true`.

    The answers go to standard output; the prompts, with their times, to standard error.
    """
    words = [f"max_new_tokens={max_new_tokens}", *(fields or ())]
    answer = _load(model, words, chat, stop or (), base_model)
    if not prompt:
        print("Write a prompt on each line, and end with Ctrl-D.", file=sys.stderr)
    turns: Turns = []
    for line in prompt or sys.stdin:
        text = line.rstrip("\n")
        if text:
            began_at = perf_counter()
            answered = answer(turns, text)
            print(f"> {text} ({perf_counter() - began_at:.2f} s)", file=sys.stderr)
            print(answered, flush=True)
        else:
            turns.clear()


def complete(
    model: Path, prompts: Sequence[str], *, is_chat: bool = False, max_new_tokens: int
) -> list[str]:
    """Return the greedy continuation of each prompt or, with `is_chat`, the answer to it.

    If that fails, raise a ToolError.
    """
    answer = _load(model, [f"max_new_tokens={max_new_tokens}"], is_chat)
    return [answer([], prompt) for prompt in prompts]


def _load(
    model: Path,
    fields: Sequence[str],
    is_chat: bool,
    stops: Sequence[str] = (),
    base_model: str | None = None,
) -> Callable[[Turns, str], str]:
    """Return a function that answers a prompt after some turns, and adds both to the turns.

    Raise a ToolError if the model cannot be loaded, or if transformers would ignore a field.
    """
    if not any(model.glob("*.safetensors")):
        raise ToolError(
            f"{model} is no directory with exported weights. Name an export, such as "
            "runs/first/export."
        )
    from transformers import GenerationConfig, logging, pipeline

    # The pipeline would warn of image-text classes, which generate from text alone, too.
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    config = GenerationConfig(do_sample=False)
    with explained(ToolError, f"cannot generate with {' '.join(fields)} (write NAME=VALUE)"):
        pairs = [field.split("=", 1) for field in fields]
        unknown = config.update(**{name: yaml.safe_load(value) for name, value in pairs})
        config.validate(strict=True)
    if unknown:
        raise ToolError(f"transformers' GenerationConfig has no field {', '.join(unknown)}.")
    # An adapter's tokenizer can have another chat template than that of its base model.
    has_tokenizer = (model / "tokenizer_config.json").exists()
    with explained(ToolError, f"{model} cannot be loaded (an adapter may need --base-model)"):
        generator = pipeline(
            "text-generation",
            base_model or str(model),
            tokenizer=str(model) if has_tokenizer else None,
            device_map="auto",
        )
        if base_model:
            generator.model.load_adapter(str(model))
        ends = [*stops]
        if is_chat:
            ends += _find_end_of_turn(generator.tokenizer)
    config.stop_strings = ends or None
    return partial(_answer, generator, config, is_chat)


def _find_end_of_turn(tokenizer: Any) -> list[str]:
    """Return the token that ends a turn of the chat template in a list, or no token.

    A base model's generation_config.json often names another one.
    """
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    added = tokenizer.get_added_vocab()
    following = tokenizer.tokenize(text.rpartition("ANSWER")[2])
    return [token for token in following if token in added][:1]


def _answer(generator: Any, config: Any, is_chat: bool, turns: Turns, prompt: str) -> str:
    turns.append({"role": "user", "content": prompt})
    with explained(ToolError, "generation failed"):
        [output] = generator(
            turns if is_chat else prompt,
            generation_config=config,
            tokenizer=generator.tokenizer,
            return_full_text=False,
        )
    text = output["generated_text"]
    for end in config.stop_strings or ():
        text = text.partition(end)[0]
    turns.append({"role": "assistant", "content": text.strip()})
    return text.strip()
