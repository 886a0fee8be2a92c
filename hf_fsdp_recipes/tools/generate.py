"""`hf-fsdp generate`: tries a model or an adapter on prompts."""

import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Optional

import yaml
from typer import Argument, Option

from hf_fsdp_recipes.errors import ToolError, explained


def generate(
    model: Annotated[
        Path, Argument(help="Directory of a model or an adapter, such as runs/first/export.")
    ],
    fields: Annotated[
        list[str],
        Argument(help="Fields of GenerationConfig, such as do_sample=true temperature=0.7."),
    ] = [],  # noqa: B006
    prompt: Annotated[
        list[str], Option(help="A prompt. Without one, each line of standard input is a prompt.")
    ] = [],  # noqa: B006
    chat: Annotated[bool, Option("--chat", help="The prompts are the turns of a chat.")] = False,
    stop: Annotated[list[str], Option(help="End an answer before this text.")] = [],  # noqa: B006
    base_model: Annotated[Optional[str], Option(help="Base model of an adapter.")] = None,
    max_new_tokens: Annotated[int, Option(help="Maximum number of tokens to generate.")] = 200,
) -> None:
    """Continue prompts or chat, greedily unless `do_sample=true`.

    The answers go to standard output; the prompts, with their times, to standard error.
    """
    from transformers import GenerationConfig

    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
    with explained(ToolError, "cannot generate with these settings (write NAME=VALUE)"):
        for field in fields:
            name, value = field.split("=", 1)
            options[name] = yaml.safe_load(value)
        GenerationConfig(**options).validate(strict=True)
    generator = _load(model, base_model)
    if not prompt:
        print("Write a prompt on each line, and end with Ctrl-D.", file=sys.stderr)
    turns = []
    for line in filter(str.strip, prompt or sys.stdin):
        text = line.rstrip("\n")
        turns.append({"role": "user", "content": text})
        began_at = perf_counter()
        answer = _answer(generator, turns if chat else text, stop, **options)
        print(f"> {text} ({perf_counter() - began_at:.2f} s)", file=sys.stderr)
        print(answer, flush=True)
        turns.append({"role": "assistant", "content": answer})


def complete(
    model: Path, prompts: Sequence[str], *, is_chat: bool = False, max_new_tokens: int
) -> list[str]:
    """Return the greedy continuation of each prompt or, with `is_chat`, the answer to it.

    If that fails, raise a ToolError.
    """
    generator = _load(model)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [
        _answer(generator, prompt, do_sample=False, max_new_tokens=max_new_tokens)
        for prompt in (chats if is_chat else prompts)
    ]


def _load(model: Path, base_model: str | None = None) -> Any:
    """Return a text-generation pipeline. It uses several accelerators if the model needs them."""
    if not any(model.glob("*.safetensors")):
        raise ToolError(
            f"{model} is no directory with exported weights. Name an export, such as "
            "runs/first/export."
        )
    from transformers import logging, pipeline

    # The pipeline would warn of image-text classes, which generate from text alone, too.
    logging.get_logger("transformers.pipelines.base").setLevel(logging.CRITICAL)
    logging.disable_progress_bar()
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
    return generator


def _answer(generator: Any, prompt: Any, stops: Sequence[str] = (), **options: Any) -> str:
    """Return the continuation of a text, or the next turn of a chat."""
    ends = list(filter(None, stops))
    with explained(ToolError, "generation failed"):
        if not isinstance(prompt, str):
            ends += _find_end_of_turn(generator.tokenizer, prompt)
        [output] = generator(
            prompt,
            stop_strings=ends or None,
            tokenizer=generator.tokenizer,
            return_full_text=False,
            **options,
        )
    text = output["generated_text"]
    for end in ends:
        text = text.partition(end)[0]
    return text.strip()


def _find_end_of_turn(tokenizer: Any, turns: Sequence[dict]) -> list[str]:
    """Return what a chat template writes after an answer; of special tokens, only the first.

    The generation_config.json of a base model often lacks it.
    """
    answered = [*turns, {"role": "assistant", "content": "ANSWER"}]
    chat = tokenizer.apply_chat_template(answered, tokenize=False)
    ending = chat.rpartition("ANSWER")[2].strip()
    for token in tokenizer.tokenize(ending)[:1]:
        return [token] if token in tokenizer.get_added_vocab() else [ending]
    return []
