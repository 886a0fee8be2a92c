"""Tiny random models whose sizes agree with each other, so that they can be trained."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

from tests.loading.families import MAX_PARAMETERS, shrink
from tests.oracle.cases import AUTO_CLASSES, Case

VOCABULARY = 320
HEAD = 16  # width of an attention head
# Their code has rotary sections for large heads as a default, which their configs do not name.
WITH_SECTIONS = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "glm4v",
    "glm_ocr",
    "paddleocr_vl",
    "ernie4_5_vl",
)
MAMBA_SIZES = {  # 4 heads of 32: twice the model's width
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 16,
}


def make_model(case: Case, work: Path) -> Path:
    """Write a tiny random model of the case's family, once.

    It has no dropout, because each rank has random numbers of its own.
    """
    import torch

    names = (case.family, case.kind, case.model_dtype, str(case.tie))
    folder = work / "models" / "-".join(names)
    if (folder / "config.json").exists():
        return folder
    config = make_config(case)
    model_class = class_of(case, config)
    with torch.device("meta"), contextlib.suppress(NotImplementedError):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
        if size > MAX_PARAMETERS:
            raise ValueError(f"{size} parameters are too many")
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():  # weights that start at zero would give others no gradient
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(0, 0.02)
    shutil.rmtree(folder, ignore_errors=True)
    model.to(getattr(torch, case.model_dtype)).save_pretrained(folder)
    return folder


def class_of(case: Case, config: Any) -> Any:
    import transformers

    from tests.oracle.branching import BranchingForCausalLM

    if case.family == "branching":
        return BranchingForCausalLM
    auto_class = getattr(transformers, AUTO_CLASSES[case.kind])
    found = auto_class._model_mapping[type(config)]
    return found[0] if isinstance(found, list | tuple) else found


def make_config(case: Case) -> Any:
    import transformers

    name = "llama" if case.family == "branching" else case.family
    config = transformers.CONFIG_MAPPING[name]()
    depths = {id(part): getattr(part, "num_hidden_layers", None) for part in parts_of(config)}
    shrink(config)
    for part in parts_of(config):
        repair_sizes(part)
        repair_layers(part, depths.get(id(part)))
        remove_dropout(part)
        set_vocabulary(part)
    if case.tie >= 0:
        config.tie_word_embeddings = bool(case.tie)
    if case.kind == "score":
        config.num_labels = 3
    return config


def parts_of(config: Any) -> list[Any]:
    """Return a config and the configs of its towers."""
    found = [config]
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            found += parts_of(part)
    return found


def repair_sizes(config: Any) -> None:
    """Make widths and numbers of heads agree."""
    if getattr(config, "kv_lora_rank", None) and isinstance(
        getattr(config, "num_key_value_heads", None), int
    ):
        config.num_key_value_heads = config.num_attention_heads
    if getattr(config, "qk_head_dim", None):
        config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if getattr(config, "rotary_dim", None):
        config.rotary_dim = HEAD // 2
    if getattr(config, "mamba_n_heads", None):
        for name, size in MAMBA_SIZES.items():
            if hasattr(config, name):
                setattr(config, name, size)
    if config.model_type == "mamba2":
        config.head_dim = 32
        config.n_groups = 1
    if config.model_type == "rembert":
        config.input_embedding_size = config.hidden_size
        config.output_embedding_size = config.hidden_size
    repair_rotary(config)


def repair_rotary(config: Any) -> None:
    """Let the sections for time, height and width fill half of a head."""
    rope = getattr(config, "rope_parameters", None)
    has_sections = config.model_type.startswith(WITH_SECTIONS)
    if isinstance(rope, dict) and (has_sections or "mrope_section" in rope):
        half = int(HEAD // 2 * rope.get("partial_rotary_factor", 1.0))
        side = 3 * half // 8
        rope["mrope_section"] = [half - 2 * side, side, side]


def repair_layers(config: Any, depth: int | None) -> None:
    """Shorten lists that have a value for each of `depth` layers."""
    if config.model_type.startswith("gemma4"):  # the config lists layers with wider heads
        kinds = getattr(config, "layer_types", None) or []
        wide = {i: {"head_dim": 32} for i, kind in enumerate(kinds) if kind == "full_attention"}
        with contextlib.suppress(Exception):
            config.per_layer_config = wide
    for name, value in list(vars(config).items()):
        if depth and depth > 2 and isinstance(value, list) and len(value) == depth:
            with contextlib.suppress(Exception):
                small = [min(v, 128) if isinstance(v, int) and v > 128 else v for v in value]
                setattr(config, name, small[: config.num_hidden_layers])


def remove_dropout(config: Any) -> None:
    for name, value in list(vars(config).items()):
        is_rate = isinstance(value, int | float) and not isinstance(value, bool)
        if is_rate and ("drop" in name or "jitter" in name):
            with contextlib.suppress(Exception):
                setattr(config, name, 0.0)


def set_vocabulary(config: Any) -> None:
    """Let all families have the vocabulary of the tests' tokenizer."""
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if isinstance(getattr(config, name, None), int):
            with contextlib.suppress(Exception):
                setattr(config, name, VOCABULARY)
