"""`hf-fsdp generate`: tries a model or an adapter on a prompt."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from hf_fsdp_recipes.errors import ToolError, explained


def generate(
    model: Annotated[
        Path, Argument(help="Directory of a model or an adapter, such as runs/first/export.")
    ],
    prompt: Annotated[str, Option(help="The prompt.")],
    chat: Annotated[
        bool, Option("--chat", help="Format the prompt with the model's chat template.")
    ] = False,
    max_new_tokens: Annotated[
        int, Option(min=1, help="Maximum number of tokens to generate.")
    ] = 200,
) -> None:
    """Continue a prompt greedily with an exported model or adapter."""
    print(complete(model, [prompt], is_chat=chat, max_new_tokens=max_new_tokens)[0])


def complete(
    model: Path, prompts: Sequence[str], *, is_chat: bool = False, max_new_tokens: int
) -> list[str]:
    """Return the greedy continuation of each prompt or, with `is_chat`, the answer to it.

    If that fails, raise a ToolError.
    """
    if not any(model.glob("*.safetensors")):
        raise ToolError(
            f"{model} is no directory with exported weights. Name an export, such as "
            "runs/first/export."
        )
    from transformers import logging, pipeline

    # The pipeline would warn of image-text classes, which generate from text alone, too.
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    with explained(ToolError, f"{model} cannot generate"):
        # Upstream's annotations know either chats or texts, and the chats only of other types.
        generator: Any = pipeline("text-generation", str(model))
        outputs = generator(
            [[{"role": "user", "content": prompt}] if is_chat else prompt for prompt in prompts],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_full_text=False,
        )
    return [output["generated_text"].strip() for [output] in outputs]
