"""The one place in Accelerate that saving and resuming patch: adapters under FSDP1.

PEFT looks adapter tensors up by module name; FSDP1 puts wrapper names between, so Accelerate's adapter-only
state dict comes out empty: a checkpoint without adapters, and a resume that silently starts them anew.
For FSDP1 with PEFT the adapter entries of the model's own state dict are taken instead. Everything else
passes through untouched.

Source: accelerate 1.15 `utils/fsdp_utils.py`, `_get_model_state_dict`, `_set_model_state_dict`,
`_prepare_sd_options`; seen with peft 0.21 (0 of 70 adapter tensors saved).
"""

import functools
import inspect
import logging
from importlib.metadata import version
from typing import Any

from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.load import names

_is_installed = False


def install() -> None:
    """Patch Accelerate's FSDP state dicts. Idempotent; no collective.

    Raises:
        CheckpointError: the place has moved.
    """
    global _is_installed
    if _is_installed:
        return
    from accelerate.utils import fsdp_utils

    for name, parameters in (
        ("_get_model_state_dict", ["model", "adapter_only", "sd_options"]),
        ("_set_model_state_dict", ["model", "state_dict", "adapter_only", "sd_options"]),
        ("_prepare_sd_options", ["fsdp_plugin"]),
    ):
        found = getattr(fsdp_utils, name, None)
        if found is None or list(inspect.signature(found).parameters) != parameters:
            raise CheckpointError(
                f"accelerate {version('accelerate')} has no fsdp_utils.{name}({', '.join(parameters)}), which sharded "
                f"checkpoints lean on. Rule: tried with accelerate 1.15. Remedy: install that."
            )
    get, put = fsdp_utils._get_model_state_dict, fsdp_utils._set_model_state_dict

    @functools.wraps(get)
    def get_with_fsdp1_adapters(model: Any, adapter_only: bool = False, sd_options: Any = None) -> Any:
        if adapter_only and sd_options is None and _is_fsdp1_peft(model):
            return {name: tensor for name, tensor in model.state_dict().items() if names.is_adapter(name)}
        return get(model, adapter_only=adapter_only, sd_options=sd_options)

    @functools.wraps(put)
    def put_with_fsdp1_adapters(model: Any, state_dict: Any, adapter_only: bool = False, sd_options: Any = None) -> Any:
        if adapter_only and sd_options is None and _is_fsdp1_peft(model):
            return _load_quietly(model, state_dict)
        return put(model, state_dict, adapter_only=adapter_only, sd_options=sd_options)

    fsdp_utils._get_model_state_dict = get_with_fsdp1_adapters
    fsdp_utils._set_model_state_dict = put_with_fsdp1_adapters
    _is_installed = True


def model_state(model: Any, plugin: Any) -> dict[str, Any]:
    """Return the sharded state that Trainer resumes a model from: adapters only, where there are any."""
    from accelerate.utils import fsdp_utils

    return fsdp_utils._get_model_state_dict(
        model, adapter_only=True, sd_options=fsdp_utils._prepare_sd_options(plugin)
    )


def state_options(plugin: Any) -> Any:
    """Return the StateDictOptions that Accelerate uses for a plugin (None under FSDP1)."""
    from accelerate.utils import fsdp_utils

    return fsdp_utils._prepare_sd_options(plugin)


def _is_fsdp1_peft(model: Any) -> bool:
    from peft import PeftModel
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    return isinstance(model, FSDP) and isinstance(model.module, PeftModel)


def _load_quietly(model: Any, state_dict: Any) -> Any:
    # FSDP1 warns once for every base weight that an adapter-only state dict leaves as it is.
    logger = logging.getLogger("torch.distributed.fsdp._state_dict_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return model.load_state_dict(state_dict, strict=False)
    finally:
        logger.setLevel(level)
