"""Generates from an export with plain transformers, to check its weights."""

from pathlib import Path

import torch

from hf_fsdp_recipes.errors import ExportError, summarize
from hf_fsdp_recipes.export.load_export import load_export


def generate(
    model: Path, prompt_file: Path, chat: bool = False, system: str | None = None, max_new_tokens: int = 200
) -> str:
    """Return an export's greedy continuation of a prompt; an adapter is loaded onto its base.

    Raises:
        ExportError: the export or prompt cannot be read, `max_new_tokens` is below 1, or the chat template is missing or fails.
    """
    if max_new_tokens < 1:
        raise ExportError(f"max_new_tokens is {max_new_tokens}. Set it to at least 1.")
    if not model.is_dir():
        raise ExportError(f"{model} is not a directory. Pass the directory of an export.")
    try:
        prompt = prompt_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{prompt_file} cannot be read as text: {error}. Check --prompt-file.") from error
    from transformers import AutoTokenizer

    network = load_export(model)
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
    with torch.no_grad():
        output = network.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    new_tokens = output[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new_tokens if chat else output[0], skip_special_tokens=True)
