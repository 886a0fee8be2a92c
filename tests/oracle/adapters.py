"""Which parameters of a case are trained."""

import zlib
from typing import Any

from tests.oracle.cases import Case

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class DoesNotApply(ValueError):
    """The case makes no sense for its family."""


def plain_name(name: str) -> str:
    """Return a parameter's name without those of wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def freeze(model: Any, what: str) -> None:
    """Let some parameters keep their values."""
    if not what:
        return
    embeddings = set(map(id, model.get_input_embeddings().parameters()))
    head = set(map(id, head_of(model).parameters())) if what == "body" else set()
    frozen = {
        "embeddings": lambda name, parameter: id(parameter) in embeddings,
        "layers": lambda name, parameter: ".0." in name,
        "body": lambda name, parameter: id(parameter) not in head,
        "tower": lambda name, parameter: "vision" in name or "visual" in name,
    }[what]
    found = [parameter for name, parameter in model.named_parameters() if frozen(name, parameter)]
    if not found:
        raise DoesNotApply(f"the model has no {what} to freeze")
    for parameter in found:
        parameter.requires_grad_(False)


def head_of(model: Any) -> Any:
    head = model.get_output_embeddings()
    if head is None:
        raise DoesNotApply("the model has no output head")
    return head


def adapter_config(model: Any, case: Case) -> Any:
    """Return the LoraConfig of a method, or None for `full`."""
    from peft import LoraConfig

    if case.method == "full":
        return None
    options: dict[str, Any] = {"target_modules": "all-linear"}
    if case.method == "lora_experts":
        options = {
            "target_modules": ["q_proj", "v_proj"],
            "target_parameters": stacked_experts(model),
        }
    return LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        task_type="SEQ_CLS" if case.kind == "score" else "CAUSAL_LM",
        modules_to_save=saved_modules(model, case.method) or None,
        **options,
    )


def stacked_experts(model: Any) -> list[str]:
    found = {
        ".".join(name.split(".")[-3:])
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and "expert" in name
    }
    if not found:
        raise DoesNotApply("the family has no stacked experts")
    return sorted(found)


def saved_modules(model: Any, method: str) -> list[str]:
    """Return the names of modules that are trained as a whole, next to the adapters."""
    if method == "lora_score":
        return [name for name, _ in model.named_children() if name in ("score", "classifier")]
    modules = []
    if method in ("lora_embed", "lora_both"):
        modules.append(model.get_input_embeddings())
    if method in ("lora_head", "lora_both", "qlora_head"):
        modules.append(head_of(model))
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)].rpartition(".")[2] for module in modules]


def fill_adapters(model: Any) -> None:
    """Give adapters that start at zero small values, so that every adapter has a gradient.

    The values are the same in both runs.
    """
    import torch

    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name or "lora_embedding_A" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(plain_name(name).encode()))
            values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data = values * 0.02


def keep_float32(model: Any) -> None:
    """Undo TRL's cast of QLoRA's adapters to bfloat16, whose rounding would hide errors."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
