"""Generates text from an export with plain transformers, to check the export's weights."""

import time
from pathlib import Path

import torch

from hf_fsdp_recipes.errors import ExportError, summarize
from hf_fsdp_recipes.export.load_export import load_export


def generate(
    model: Path, prompt: str | Path, chat: bool = False, system: str | None = None, max_new_tokens: int = 200
) -> str:
    """Return an export's greedy continuation of a prompt. The arguments are those of `generate_timed`."""
    return generate_timed(model, prompt, chat, system, max_new_tokens)[0]


def generate_timed(
    model: Path, prompt: str | Path, chat: bool = False, system: str | None = None, max_new_tokens: int = 200
) -> tuple[str, int, float]:
    """Return an export's greedy continuation of a prompt, the number of new tokens, and the generation time in seconds.

    `prompt` is the text, or the path of a text file. Without `chat`, the returned text begins with the prompt. An adapter is
    loaded onto its base model. Runs on the accelerator if there is one. Raises an ExportError if an argument or a file cannot be
    used.
    """
    if max_new_tokens < 1:
        raise ExportError(f"max_new_tokens is {max_new_tokens}. Set it to at least 1.")
    if not model.is_dir():
        raise ExportError(f"{model} is not a directory. Pass the directory of an export.")
    prompt = _read_prompt(prompt) if isinstance(prompt, Path) else prompt.strip()
    if not prompt:
        raise ExportError("the prompt is empty. Write a question, or the beginning of a text.")
    from transformers import AutoTokenizer

    network = load_export(model)
    if not network.can_generate():
        raise ExportError(
            f"{model} is a {network.config.architectures[0]}, which classifies text and cannot generate. Load it with "
            f"from_pretrained instead."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many types
        raise ExportError(f"the tokenizer of {model} cannot be loaded: {summarize(error, 'line')}") from error
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    network = network.to(device) if device is not None else network
    if chat:
        if tokenizer.chat_template is None:
            raise ExportError(f"{model} has no chat template. Leave out --chat.")
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        try:
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # a template may fail in any way
            raise ExportError(f"the chat template of {model} fails: {error}") from error
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = {key: value.to(network.device) for key, value in inputs.items() if key != "token_type_ids"}
    started = time.perf_counter()
    with torch.no_grad():
        output = network.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)[0].tolist()
    seconds = time.perf_counter() - started
    new_tokens = output[inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new_tokens if chat else output, skip_special_tokens=True), len(new_tokens), seconds


def _read_prompt(file: Path) -> str:
    try:
        prompt = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{file} cannot be read as text: {error}. Check --prompt-file.") from error
    if not prompt:
        raise ExportError(f"{file} is empty. Write the prompt into it.")
    return prompt
