"""Checks an export before it gets its final name: every tensor exists, has the right size and matches the config."""

import json
import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path

from hf_fsdp_recipes import model_class
from hf_fsdp_recipes.errors import ExportError, LoadError
from hf_fsdp_recipes.export.tensor_files import FilePlan
from hf_fsdp_recipes.loading.safetensors_index import read_header
from hf_fsdp_recipes.loading.weight_mapping import WeightMapping

logger = logging.getLogger(__name__)


def has_weights(directory: Path) -> bool:
    """Return whether an export holds readable weights. Ignores hidden files, such as macOS's `._model.safetensors`."""
    try:
        return any(read_header(file) for file in directory.glob("[!.]*.safetensors"))
    except (LoadError, OSError):
        return False


def check_headers(directory: Path, plan: FilePlan) -> None:
    """Raise an ExportError if a file lacks the planned header or size. Rank 0 only, after all ranks have closed the files."""
    for file, header in plan.headers.items():
        with (directory / file).open("rb") as stream:
            if stream.read(len(header)) != header or stream.seek(0, os.SEEK_END) != plan.num_bytes[file]:
                raise ExportError(f"{directory / file} does not have the planned header and size. Export again.")


def check_adapter_rows(directory: Path, plan: FilePlan) -> None:
    """Raise an ExportError if a `lora_A` matrix has a row of zeros, which shows that a rank's shard is missing. Rank 0 only."""
    from safetensors import safe_open

    for file in plan.headers:
        with safe_open(directory / file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - safetensors' handle is not a mapping
                if ".lora_A." in name and not stored.get_tensor(name).any(dim=1).all():
                    raise ExportError(
                        f"{directory}: {name} has rows of zeros, so a rank's shard is missing. Export again."
                    )


def check_config(directory: Path, plan: FilePlan) -> None:
    """Raise an ExportError if the planned tensors do not fit the model in the export's config. Rank 0 only."""
    import transformers
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    if "auto_map" in json.loads((directory / "config.json").read_text()):
        return  # building this model would run its own code
    config = AutoConfig.from_pretrained(directory)
    declared = getattr(transformers, model_class.declared_class(config) or "", None)
    with init_empty_weights():  # build the trained class, with its head
        model = model_class.build(config) if declared is None else declared._from_config(config)
    model.tie_weights()
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes = {name: tensor.shape for name, tensor in plan.tensors.items()}
    ranges, unexpected = WeightMapping(model).to_parameters(shapes, state)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = sorted(set(state) - set(ranges) - tied)
    mismatched = [name for name, r in ranges.items() if sum(x.num_elements for x in r) != math.prod(state[name])]
    if missing or unexpected or mismatched:
        raise ExportError(
            f"{directory} does not match its config.json: missing {missing[:3]}, unexpected {unexpected[:3]}, wrong size "
            f"{mismatched[:3]}. Export again."
        )


def warn_non_finite(of_ranks: Iterable[dict[str, int]]) -> None:
    """Warn once about tensors with NaN or infinity. `of_ranks` has, for each rank, their number per tensor. Rank 0 only."""
    total: dict[str, int] = {}
    for counts in of_ranks:
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
    if total:
        worst = sorted(total.items(), key=lambda item: -item[1])[:3]
        logger.warning("%d exported tensors contain NaN or infinity: %s", len(total), worst)
