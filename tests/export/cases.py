"""Small models with FSDP2 shards on ranks, and comparisons of exports with stock code's files."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

COMPARED = (
    "*.safetensors",
    "*.index.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
)
TOKENS = torch.arange(20).view(2, 10)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a model with from_pretrained."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def image_text_model() -> Any:
    """Return a LLaVA model with random weights."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    text = LlamaConfig(**size, vocab_size=307, num_hidden_layers=2)
    vision = CLIPVisionConfig(**size, image_size=16, patch_size=8, num_hidden_layers=2)
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision))


def save_image_text_model(directory: Path, text_model: str) -> None:
    """Save a LLaVA model with its processor, whose tokenizer is that of another model."""
    from transformers import AutoTokenizer, CLIPImageProcessor, LlavaProcessor

    image_text_model().save_pretrained(directory)
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        AutoTokenizer.from_pretrained(text_model),
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template="with images: {{ messages }}",
    ).save_pretrained(directory)


@torch.no_grad()
def change(model: torch.nn.Module, only: str = "") -> None:
    """Add the same random values on every rank to the parameters with `only` in their names."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if only in name:
            parameter.add_(
                (torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter.dtype)
            )


def shard(
    model: torch.nn.Module, is_hybrid: bool = False, is_offloaded: bool = False
) -> torch.nn.Module:
    """Shard a model over all ranks, layer by layer, as Accelerate does."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    connect()
    size = dist.get_world_size()
    names = ("replicate", "shard") if is_hybrid else ("shard",)
    mesh = init_device_mesh("cpu", (2, size // 2) if is_hybrid else (size,), mesh_dim_names=names)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if is_offloaded else {}
    for layer in next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if not is_offloaded:
        with torch.no_grad():
            model(TOKENS)  # leaves the root unsharded, as an evaluation does
    return model


def connect() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")


def adapt(model: torch.nn.Module, **lora: Any) -> Any:
    """Add an adapter with random values."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM"} | lora)).eval()
    for part in ("lora_", "modules_to_save", "trainable_tokens"):
        change(adapted, part)
    return adapted


def merge(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Merge a copy with PEFT in float32, and return it in `dtype`."""
    merged = copy.deepcopy(model).float().merge_and_unload(safe_merge=True).to(dtype)
    merged.config.dtype = dtype
    return merged


def assert_same_files(one: Path, other: Path) -> None:
    """Compare the weights and configs of two directories byte by byte."""
    contents = [
        {f.name: _content(f) for pattern in COMPARED for f in d.glob(pattern)} for d in (one, other)
    ]
    assert len(contents[0]) > 1
    different = [
        name
        for name in contents[0].keys() | contents[1].keys()
        if len({c.get(name) for c in contents}) > 1
    ]
    assert not different, different


def _content(file: Path) -> bytes:
    if file.name != "adapter_config.json":
        return file.read_bytes()
    fields = json.loads(file.read_text()).items()  # PEFT writes sets as lists in any order
    return repr(
        sorted((key, sorted(value) if isinstance(value, list) else value) for key, value in fields)
    ).encode()


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in directory.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = tensors(one), tensors(other)
    assert first and first.keys() == second.keys(), first.keys() ^ second.keys()
    different = [
        n
        for n in first
        if first[n].dtype != second[n].dtype or not torch.equal(first[n], second[n])
    ]
    assert not different, different
