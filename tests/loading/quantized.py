"""Tiny checkpoints in FP8 and MXFP4, in the layouts of published models.

Also the weights that transformers reads from them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SMALL = {
    "vocab_size": 307,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [16, 16],
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
# For each kind of model: config, quantization config, and dtype of the scales.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], torch.dtype]] = {
    "qwen3": (
        {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": False},
        FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"]},
        torch.bfloat16,
    ),
    "qwen3_moe": (
        {
            "model_type": "qwen3_moe",
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
        },
        FP8,
        torch.bfloat16,
    ),
    "deepseek_v3": (
        {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "v_head_dim": 8,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 8,
            "head_dim": 16,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        FP8 | {"scale_fmt": "ue8m0"},
        torch.float32,
    ),
    "mistral": (  # one scale for each weight
        {"model_type": "mistral", "head_dim": 8},
        FP8 | {"activation_scheme": "static", "weight_block_size": None},
        torch.bfloat16,
    ),
    "gpt_oss": (
        {
            "model_type": "gpt_oss",
            "hidden_size": 64,
            "intermediate_size": 32,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        MXFP4,
        torch.uint8,
    ),
}


def make(directory: Path, kind: str, **fields: Any) -> Path:
    """Write a checkpoint with random weights and quantized projections in the layers.

    `fields` change its config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.conftest import make_tokenizer

    changes, quantization, scale_dtype = KINDS[kind]
    config = AutoConfig.for_model(**(SMALL | changes | fields))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    make_tokenizer(directory)
    tensors = load_file(directory / "model.safetensors")
    projections = [
        name
        for name in tensors
        if ".layers." in name and "proj" in name and not name.endswith("bias")
    ]
    for name in projections:
        if name.removesuffix(".weight") not in (quantization.get("modules_to_not_convert") or ()):
            weight = tensors.pop(name)
            if scale_dtype is torch.uint8:
                if "experts" in name:
                    tensors |= mxfp4(name, weight.shape)
                else:
                    tensors[name] = weight
            else:
                tensors |= fp8(name, weight.shape, quantization["weight_block_size"], scale_dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config=quantization)
    return directory


def fp8(
    name: str, shape: torch.Size, block: list[int] | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    grid = []
    if block is not None:
        grid = [-(-size // part) for size, part in zip(shape, block, strict=True)]
    packed = torch.randn(shape).to(torch.float8_e4m3fn)
    return {name: packed, f"{name}_scale_inv": (torch.rand(grid) * 0.05 + 0.001).to(dtype)}


def mxfp4(name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
    experts, columns, rows = shape
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(116, 124, (experts, rows, columns // 32), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def change_config(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change_tensors(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def stock_state(directory: Path, dtype: str = "auto") -> dict[str, torch.Tensor]:
    """Return the weights that transformers dequantizes."""
    return {
        name: value.clone() for name, value in stock_model(directory, dtype).state_dict().items()
    }


def stock_model(directory: Path, dtype: str = "auto") -> Any:
    """Return a model that transformers dequantizes."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    model_config = json.loads((directory / "config.json").read_text())
    method = model_config["quantization_config"]["quant_method"]
    config = (Mxfp4Config if method == "mxfp4" else FineGrainedFP8Config)(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, quantization_config=config)
