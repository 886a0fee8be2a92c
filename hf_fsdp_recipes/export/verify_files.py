"""Checks an export before it gets its name: every tensor there, of the right size, and loadable by its config.

Reads headers only; the bytes were checked while they were written.
"""

import json
import logging
from pathlib import Path

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError, LoadError
from hf_fsdp_recipes.export.tensor_files import FilePlan
from hf_fsdp_recipes.loading.safetensors_index import read_header
from hf_fsdp_recipes.loading.weight_mapping import WeightMapping

logger = logging.getLogger(__name__)


def looks_like_export(directory: Path) -> bool:
    """Tell whether a directory holds what an export holds, or nothing at all."""
    if not directory.is_dir():
        return False
    held = {file.name for file in directory.iterdir()}
    return not held or bool(held & {"config.json", "adapter_config.json"})


def has_weights(directory: Path) -> bool:
    """Tell whether an export holds weights that can be read."""
    try:
        return any(read_header(file) for file in directory.glob("*.safetensors"))
    except (LoadError, OSError):
        return False


def check_headers(directory: Path, plan: FilePlan, is_adapter_only: bool) -> None:
    """Check what the files say they hold against the plan and the model of their config. Main rank only.

    Raises:
        ExportError: names the first thing that is not as it should be.
    """
    try:
        found = {tensor.name: tensor for file in plan.headers for tensor in read_header(directory / file)}
    except LoadError as error:
        raise ExportError(str(error)) from error
    for name, planned in plan.tensors.items():
        tensor = found.get(name)
        if tensor is None or (tensor.shape, tensor.dtype) != (planned.shape, planned.dtype):
            raise ExportError(f"{directory}: tensor {name!r} is missing or not {planned.shape} {planned.dtype}")
    if not is_adapter_only:
        _check_against_config(directory, {name: tensor.shape for name, tensor in found.items()})


def check_adapter_rows(directory: Path, plan: FilePlan) -> None:
    """Refuse an adapter with rows of zeros in a matrix that never starts as zeros: a rank's part would be missing.

    Main rank only, when all is written.

    Raises:
        ExportError: names the first such tensor.
    """
    from safetensors import safe_open

    for file in plan.headers:
        with safe_open(directory / file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - safetensors' handle is no mapping
                if ".lora_A." in name and not stored.get_tensor(name).any(dim=1).all():
                    raise ExportError(f"{directory}: {name} has rows of zeros; what one rank holds is missing")


def _check_against_config(directory: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    if "auto_map" in json.loads((directory / "config.json").read_text()):
        return  # its code is not in the export, so there is nothing to build it with here
    config = AutoConfig.from_pretrained(directory)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    pieces, unexpected = WeightMapping(model).to_parameters(shapes, state)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    lacking = sorted(set(state) - set(pieces) - tied)
    wrong = [n for n, p in pieces.items() if sum(x.num_elements for x in p) != _numel(state[n])]
    if lacking or unexpected or wrong:
        raise ExportError(
            f"{directory} does not fit its own config.json: missing {lacking[:3]}, unexpected {unexpected[:3]}, of another "
            f"size {wrong[:3]}"
        )


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def warn_non_finite(mine: dict[str, int]) -> None:
    """Name tensors with NaN or infinity, once. Collective: every rank must call this."""
    total: dict[str, int] = {}
    for counts in distributed.gather_objects(mine):
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
    if total and distributed.is_main():
        worst = sorted(total.items(), key=lambda item: -item[1])[:3]
        logger.warning("%d exported tensors hold NaN or infinity: %s", len(total), worst)
