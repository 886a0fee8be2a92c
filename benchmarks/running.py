"""Shared by the benchmarks: random models of a given size, the results page."""

import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "measured.md"
PACKAGES = ("torch", "accelerate", "transformers", "trl", "peft")


def sharded_llama(num_parameters: float) -> Any:
    """Return a Llama in bf16, sharded over gloo ranks, with uninitialized parameters.

    Every rank calls this.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama_config(num_parameters), dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device="cpu")


def llama_config(num_parameters: float) -> Any:
    """Return a Llama config of about `num_parameters`, with the proportions of TinyLlama 1.1B."""
    from transformers import LlamaConfig

    layers = max(2, round(22 * (num_parameters / 1.1e9) ** (1 / 3)))
    per_layer = (num_parameters * 0.88) / layers
    hidden = max(64, round((per_layer / 10.5) ** 0.5 / 64) * 64)
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=round(hidden * 2.75 / 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 64 // 8)
        if (hidden // 64) % max(1, hidden // 64 // 8) == 0
        else hidden // 64,
        vocab_size=32000,
        tie_word_embeddings=False,
    )


def make_checkpoint(
    directory: Path, num_parameters: float, max_shard_size: str = "500MB", config: Any | None = None
) -> int:
    """Write a random bf16 checkpoint in the Hub's layout; return its size in bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    if not (directory / "config.json").is_file():
        torch.manual_seed(0)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = AutoModelForCausalLM.from_config(
                config or llama_config(num_parameters), dtype=torch.bfloat16
            )
        finally:
            torch.set_default_dtype(previous)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def machine() -> str:
    """Describe machine and versions in one line."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {system}, {versions}"


def write_section(title: str, lines: Sequence[str]) -> None:
    """Replace one section of docs/measured.md."""
    text = RESULTS.read_text() if RESULTS.is_file() else "# Measured\n"
    section = f"## {title}\n\n" + "\n".join(lines) + "\n"
    pattern = rf"## {re.escape(title)}\n.*?(?=\n## |\Z)"
    replaced, count = re.subn(pattern, lambda _: section, text, flags=re.DOTALL)
    RESULTS.write_text(replaced if count else text.rstrip("\n") + "\n\n" + section)
