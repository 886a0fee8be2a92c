"""Exports a model during training, or a checkpoint, to a directory.

`from_pretrained` and vLLM can load this directory. Every file is written by a single rank, so two
nodes never write to the same page of a file. The ranks gather one parameter at a time: they send
their shards to the rank that writes the file with this parameter.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch.nn import Module
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError, explained
from hf_fsdp_recipes.export import merge, output, shells, sources
from hf_fsdp_recipes.export.files import OptionalDtype, PathLike
from hf_fsdp_recipes.export.quantized import with_originals
from hf_fsdp_recipes.export.sources import Sources
from hf_fsdp_recipes.export.steps import Plan, copy_step, plan_in_file_format
from hf_fsdp_recipes.loading.checkpoint import Checkpoint
from hf_fsdp_recipes.saving.directory import MANIFEST, list_checkpoints, read_run_id
from hf_fsdp_recipes.saving.resume import find_damage
from hf_fsdp_recipes.upstream.torch_internals import checkpoint_name
from hf_fsdp_recipes.upstream.transformers_internals import (
    names_not_saved,
    remove_tied_weights_from_state_dict,
)
from hf_fsdp_recipes.weights.files import find_model

# Accelerate's name for the folder of sharded weights in a checkpoint.
MODEL_FOLDER = "pytorch_model_fsdp_0"


def export_model(
    model: Module,
    output_dir: PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    merge_adapter: bool = False,
) -> Path:
    """Write a model, which may be sharded with FSDP2.

    Collective: every rank calls this with the same arguments.

    Args:
        model: a transformers model or a PeftModel. For a PeftModel, only its active adapter is
            written, unless `merge_adapter` is set.
        output_dir: the directory to create. If it exists, `<output_dir>-1` or the next free name
            is used instead.
        dtype: floating-point dtype of the weights in the files. None keeps each parameter's dtype.
        max_shard_size: maximum size of a file, as in `save_pretrained`.
        tokenizer: the tokenizer or processor to save next to the weights.
        merge_adapter: write the base model with the active adapter merged in. If the base is
            quantized, its original files are read.

    Returns:
        The export's directory.

    Raises:
        ExportError: on every rank. The model cannot be exported, and no files are left behind.
    """
    write = plan_export(model, parse_dtype(dtype), merge_adapter)
    return write(output_dir, max_shard_size, tokenizer)


def plan_export(
    model: Module,
    dtype: OptionalDtype,
    merge_adapter: bool,
) -> Callable[..., Path]:
    """Return a function that exports a model, with the arguments of `output.write_weights`.

    Collective. Nothing is written, so this tells before training whether the model can be exported.
    Arguments and errors are as in `export_model`.
    """
    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    is_adapter = isinstance(unwrapped, PeftModel)
    held = sources.from_model(unwrapped, None if is_adapter else dtype)
    with distributed.agreed():
        if is_adapter:
            trained = _find_trained(unwrapped, held)
            if not merge_adapter:
                return output.plan_adapter(unwrapped, held, dtype)
            plan = _plan_merged(unwrapped, held, trained, dtype)
        elif isinstance(unwrapped, PreTrainedModel):
            plan = _plan_full(shells.copy_on_meta(unwrapped), unwrapped, held, dtype)
        else:
            raise ExportError(
                f"{type(unwrapped).__name__} is no transformers model, so it cannot be exported in "
                "Hugging Face format. Train it without export_dir."
            )
    return partial(output.write_weights, plan)


def export_checkpoint(
    checkpoint_dir: PathLike,
    output_dir: PathLike,
    *,
    base_model: PathLike | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    merge_adapter: bool = False,
) -> Path:
    """Export a sharded checkpoint or an exported adapter, in one process without a GPU.

    Args:
        checkpoint_dir: a checkpoint that has the folder `pytorch_model_fsdp_0`, or the directory
            of an exported adapter.
        output_dir: as in `export_model`.
        base_model: directory or Hub id of the model that gives the config and, for a merge, the
            weights. None uses the base model in the checkpoint's `adapter_config.json` or, without
            an adapter, the checkpoint's own config.
        dtype: as in `export_model`.
        max_shard_size: as in `export_model`.
        merge_adapter: write the base model with the adapter merged in, instead of the adapter
            alone.

    Returns:
        The export's directory.

    Raises:
        ExportError: the checkpoint is damaged or does not fit the model, or the export cannot be
            written. Nothing is left behind.
        LoadError: the checkpoint or the base model has no safetensors files.
    """
    checkpoint = Path(checkpoint_dir)
    parsed_dtype = parse_dtype(dtype)
    held, config = _open_checkpoint(checkpoint)
    base = base_model or (config and config.base_model_name_or_path) or checkpoint
    revision = config.revision if config and not base_model else None
    shell = shells.load_on_meta(base, revision)
    processor = _find_processor(checkpoint, base)
    if config is None:
        plan = _plan_full(shell, shell, held, parsed_dtype)
    else:
        adapted_shell = shells.adapt(shell, config, "default")
        held = _rename_adapter(held, adapted_shell.adapted, base)
        if not merge_adapter:
            write = output.plan_adapter(adapted_shell.adapted, held, parsed_dtype)
            return write(output_dir, max_shard_size, processor)
        held = merge.from_base(base, revision, adapted_shell) | held
        plan = merge.plan_merge(adapted_shell, held, parsed_dtype)
    return output.write_weights(plan, output_dir, max_shard_size, processor)


def parse_dtype(dtype: torch.dtype | str | None) -> OptionalDtype:
    """Return `dtype` as a torch.dtype or None. Not a collective.

    Raise an ExportError if it is no floating-point dtype.
    """
    if dtype is None:
        return None
    parsed: Any = getattr(torch, str(dtype).removeprefix("torch."), None)
    is_known = isinstance(parsed, torch.dtype) and parsed.is_floating_point
    if not is_known or parsed.itemsize == 1:  # transformers does not load all kinds of float8
        raise ExportError(f"{dtype!r} cannot be exported. Use float32, bfloat16 or float16.")
    return parsed


def _find_trained(model: PeftModel, held: Sources) -> set[str]:
    """Return the names of trained weights.

    Raise an ExportError if the active adapter lacks one, or if several adapters are active.
    """
    if model.active_adapters != [model.active_adapter]:
        raise ExportError(
            f"the adapters {model.active_adapters} are active, but only one can be exported. "
            "Activate one with the model's set_adapter."
        )
    trained = {
        checkpoint_name(model, name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    metas = {name: source.meta for name, source in held.items()}
    lost = sorted(trained - {*shells.match_adapter(model, metas).values()})
    if lost:
        raise ExportError(
            f"{lost[:3]} are trained, but no part of the adapter, so checkpoints and exports would "
            "lack them. Name their modules in modules_to_save, or freeze them."
        )
    return trained


def _plan_merged(
    model: PeftModel,
    held: Sources,
    trained: set[str],
    dtype: OptionalDtype,
) -> Plan:
    """Return a plan that merges the active adapter into the base model."""
    if any(getattr(module, "merged", False) for module in model.modules()):
        raise ExportError("the adapter is merged already. Call the model's unmerge_adapter first.")
    base: Any = model.get_base_model()
    shell = shells.adapt(shells.copy_on_meta(base), model.active_peft_config, model.active_adapter)
    tensors = merge.by_shell_names(model, shell, held)
    shells.copy_scales(model, shell)
    if getattr(base, "quantization_method", None) is not None:
        tensors = with_originals(model, shell, tensors, trained)
    return merge.plan_merge(shell, tensors, dtype)


def _find_processor(checkpoint: Path, base: PathLike) -> Any:
    """Return the processor or tokenizer of a checkpoint, or else of its base model, or None.

    If the checkpoint has only a tokenizer, the base model's processor gets it.
    """
    own = _load_processor(checkpoint)
    processor = _load_processor(base)
    if isinstance(processor, ProcessorMixin) and isinstance(own, PreTrainedTokenizerBase):
        processor.tokenizer = own
        processor.chat_template = own.chat_template or processor.chat_template
        return processor
    return own or processor


def _load_processor(name: PathLike) -> Any:
    """Return the processor of a directory or Hub id, or else its tokenizer, or None."""
    for kind in (AutoProcessor, AutoTokenizer):
        with (
            explained(ExportError, f"the processor of {name} cannot be loaded"),
            suppress(OSError, ValueError),
        ):
            return kind.from_pretrained(name, trust_remote_code=False)
    return None


def _open_checkpoint(checkpoint: Path) -> tuple[Sources, PeftConfig | None]:
    """Return the tensors of a checkpoint or of an adapter, and the adapter's config."""
    if not checkpoint.is_dir() or list_checkpoints(checkpoint):
        raise ExportError(
            f"{checkpoint} is no checkpoint. `hf-fsdp checkpoints <output_dir>` lists a run's."
        )
    if read_run_id(checkpoint) or (checkpoint / MANIFEST).is_file():
        damage = find_damage(checkpoint, only_model=True)
        if damage:
            raise ExportError(
                f"{checkpoint} cannot be exported: {damage}. Export another checkpoint."
            )
    for folder in (checkpoint / MODEL_FOLDER, checkpoint):
        if (folder / ".metadata").is_file():
            held = sources.from_checkpoint(folder)
            break
    else:
        files = [checkpoint / SAFETENSORS_WEIGHTS_NAME]  # of an adapter
        if not files[0].is_file():
            _, files = find_model(str(checkpoint), {})
        held = sources.from_files(Checkpoint(files))
    if (checkpoint / "adapter_config.json").is_file():
        return held, PeftConfig.from_pretrained(str(checkpoint))
    if any(".lora_" in name for name in held):
        raise ExportError(
            f"{checkpoint} has no adapter_config.json. Copy it there from the run's export."
        )
    return held, None


def _rename_adapter(
    held: Sources,
    adapted: PeftModel,
    base: PathLike,
) -> Sources:
    """Return an adapter's tensors under their names in the state dict of `adapted`."""
    names = shells.match_adapter(adapted, adapted.state_dict())
    differing = sorted(names.keys() ^ held.keys())[:3]
    if differing:
        raise ExportError(
            f"the adapter does not fit its adapter_config.json and {base}: {differing}. "
            "Pass base_model, the model that was trained."
        )
    return {names[key]: source for key, source in held.items()}


def _plan_full(
    shell: PreTrainedModel,
    owner: PreTrainedModel,
    held: Sources,
    dtype: OptionalDtype,
) -> Plan:
    """Return a plan that writes all weights of a model.

    `owner` knows which weights are tied, and may be `shell` itself.
    """
    state = shell.state_dict()
    kept = dict(state)
    for name in names_not_saved(shell):
        kept.pop(name, None)
    with explained(
        ExportError, "a model with changed layers cannot be exported (train it without export_dir)"
    ):
        kept = remove_tied_weights_from_state_dict(kept, owner)
    wrong = [
        name
        for name, value in kept.items()
        if name not in held or held[name].meta.shape != value.shape
    ]
    wrong += sorted(held.keys() - state.keys())
    if wrong:
        raise ExportError(
            f"the weights do not fit the config of {type(shell).__name__}: {wrong[:3]}. "
            "For a checkpoint, pass base_model, the model that was trained. A model with changed "
            "layers cannot be exported: train it without export_dir."
        )
    return plan_in_file_format(
        shell, [copy_step(name, name, held[name], dtype) for name in kept], held
    )
