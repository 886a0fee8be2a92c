"""The places where saving and resuming lean on what is not public: two losses under FSDP1, and torch DCP's files.

PEFT looks adapter tensors up by module name; FSDP1 puts wrapper names between, so Accelerate's adapter-only
state dict comes out empty: a checkpoint without adapters, and a resume that silently starts them anew.
For FSDP1 with PEFT the adapter entries of the model's own state dict are taken instead.

`load_fsdp_optimizer` reads a checkpoint into the state that the optimizer already has; under FSDP1 a fresh
optimizer has none, so nothing is read and Adam starts from zero. Its state is made first.

`FileSystemWriter` keeps the file system that it writes to in `fs`; there our own streams go in. A DTensor keeps this
rank's part in `_local_tensor`; there a copy in host memory, or paged memory, goes in.

Everything else passes through untouched.

Source: accelerate 1.15 `utils/fsdp_utils.py`, `_get_model_state_dict`, `_set_model_state_dict`,
`_prepare_sd_options`, `load_fsdp_optimizer`; seen with peft 0.21 (0 of 70 adapter tensors saved) and with a
stock FSDP1 resume (losses differ from the second step on); torch 2.13 `distributed/checkpoint/filesystem.py`,
`distributed/tensor/_api.py`.
"""

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_recipes.checkpointing.direct_io import ChecksummedStream
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.loading import names

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
    _patch_optimizer_loading()
    _is_installed = True


def _patch_optimizer_loading() -> None:
    from torch.distributed.checkpoint import state_dict as dcp_state_dict
    from transformers import trainer

    for module, name in ((trainer, "load_fsdp_optimizer"), (dcp_state_dict, "_init_optim_state")):
        if not hasattr(module, name):
            raise CheckpointError(
                f"{module.__name__} has no {name}, which an FSDP1 resume leans on. Rule: tried with transformers 5.23 and "
                f"torch 2.13. Remedy: install those, or use FSDP2."
            )
    load = trainer.load_fsdp_optimizer

    @functools.wraps(load)
    def load_into_made_state(fsdp_plugin: Any, accelerator: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if fsdp_plugin.fsdp_version == 1:
            dcp_state_dict._init_optim_state(getattr(optimizer, "optimizer", optimizer))
        return load(fsdp_plugin, accelerator, optimizer, *args, **kwargs)

    trainer.load_fsdp_optimizer = load_into_made_state


def storage_writer(
    directory: Path, notify: Callable[[int], Any] = lambda num_bytes: None
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return a DCP writer that goes past the page cache, and what it will have written: bytes and checksum by file.

    Its `.distcp` files are durable when they are written; `.metadata` is left to the caller. `notify` is told of bytes as
    they are given to be written.

    Raises:
        CheckpointError: the place has moved.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystem

    described: dict[str, dict[str, Any]] = {}

    class DirectFileSystem(FileSystem):
        @contextlib.contextmanager
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
            if mode != "wb" or not str(path).endswith(".distcp"):
                with super().create_stream(path, mode) as stream:
                    yield stream
                return
            with ChecksummedStream(Path(path), notify) as stream:
                yield stream
            described[Path(path).name] = stream.described()

    writer = dcp.FileSystemWriter(directory, sync_files=False)
    if not isinstance(getattr(writer, "fs", None), FileSystem):
        raise CheckpointError(
            f"torch {version('torch')} keeps the file system of FileSystemWriter elsewhere. Rule: tried with torch 2.13. "
            f"Remedy: install that."
        )
    writer.fs = DirectFileSystem()
    return writer, described


def put_local(tensor: Any, local: torch.Tensor) -> Any:
    """Let a DTensor stand for another local tensor of the same shape and dtype, perhaps in host memory, and return it.

    `DTensor.from_local` would move it to the mesh's device.

    Raises:
        CheckpointError: DTensor keeps its local tensor elsewhere.
    """
    if not isinstance(getattr(tensor, "_local_tensor", None), torch.Tensor):
        raise CheckpointError(
            f"torch {version('torch')} keeps a DTensor's local tensor elsewhere. Rule: tried with torch 2.13. Remedy: install "
            f"that."
        )
    tensor._local_tensor = local
    return tensor


def model_state(model: Any, plugin: Any) -> dict[str, Any]:
    """Return the sharded state that Trainer resumes a model from: adapters only, where there are any."""
    from accelerate.utils import fsdp_utils

    return fsdp_utils._get_model_state_dict(model, adapter_only=True, sd_options=fsdp_utils._prepare_sd_options(plugin))


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
