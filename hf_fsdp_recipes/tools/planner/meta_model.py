"""The model to be planned for, on meta: from a config alone, with attention, adapters and checkpointing as in the run.

Reads config.json; neither reads nor fetches weights.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_recipes.errors import LoadError, PlanError
from hf_fsdp_recipes.loading.build_on_meta import build_on_meta
from hf_fsdp_recipes.tools.planner.job import Job

BITS4_BYTES = 0.5
BLOCK_OF_4BIT = 64  # values that share a scale: fp32, or one byte with nested quantisation
BLOCK_OF_SCALES = 256  # scales that share one fp32 scale, where they are quantised too


@dataclass(frozen=True)
class Weight:
    """One parameter as FSDP sees it.

    Attributes:
        name: in the model.
        shape: the whole parameter's.
        is_trained: whether it has a gradient.
        stored_bytes: of one element in the shard: fp32 masters, say, or half a byte.
        whole_bytes: of one element when it is gathered.
        is_looked_up: whether rows are picked from it and nothing is multiplied with it.
    """

    name: str
    shape: tuple[int, ...]
    is_trained: bool
    stored_bytes: float
    whole_bytes: float
    is_looked_up: bool = False

    @property
    def num_elements(self) -> int:
        """Elements of the whole parameter."""
        return int(torch.Size(self.shape).numel())

    def padded_elements(self, num_ranks: int) -> int:
        """Elements after dimension 0 is filled up to as many rows on each rank, as FSDP2 does."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // num_ranks) * num_ranks * (self.num_elements // max(rows, 1))


def read_config(name_or_path: str) -> Any:
    """Read a config: a config.json, a directory that holds one, or a Hub id (config.json alone is fetched).

    Raises:
        PlanError: there is none, or it is of no known architecture.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name_or_path)
    except (OSError, ValueError, KeyError) as error:
        hint = "" if Path(name_or_path).exists() else " There is no such file or directory here."
        raise PlanError(f"the config of {name_or_path} cannot be read: {str(error).splitlines()[0]}{hint}") from error


def build(config: Any, job: Job) -> Any:
    """Build the model as the run computes with it: on meta, in the compute dtype.

    Raises:
        PlanError: the architecture cannot be built, or the adapter's targets are not in it.
    """
    config = type(config).from_dict(config.to_dict())
    text = config.get_text_config()
    config.use_cache = text.use_cache = False
    config._attn_implementation = "eager" if job.attention == "eager" else "sdpa"
    try:
        model = build_on_meta(config, job.compute_dtype)
    except LoadError as error:
        raise PlanError(f"no causal language model can be planned for: {error}") from error
    model = model.to("meta").train()
    if job.loss == "fused":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if job.lora_rank:
        model = _add_adapter(model, job)
    if job.checkpointing:
        _checkpoint(model, bool(job.lora_rank))
    return model


def _add_adapter(model: Any, job: Job) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = job.lora_targets if isinstance(job.lora_targets, str) else list(job.lora_targets)
    adapter = LoraConfig(r=job.lora_rank, target_modules=targets, task_type="CAUSAL_LM")
    try:
        return get_peft_model(model, adapter, autocast_adapter_dtype=False)
    except ValueError as error:
        raise PlanError(f"lora_targets: {job.lora_targets}. {str(error).splitlines()[0]}") from error


def _checkpoint(model: Any, has_adapter: bool) -> None:
    # Random state is not kept: meta has none, and its few bytes do not matter.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    if has_adapter:
        model.enable_input_require_grads()  # as Trainer does, so that frozen layers are recomputed at all


def weights(model: Any, job: Job) -> list[Weight]:
    """List the parameters, tied ones once, with what FSDP stores and gathers of each."""
    packed = _packed(model) if job.is_4bit else set()
    tables = _tables(model)
    return [
        _weight(name, parameter, job, name in packed, name in tables) for name, parameter in model.named_parameters()
    ]


def _weight(name: str, parameter: Any, job: Job, is_packed: bool, is_looked_up: bool) -> Weight:
    shape = tuple(parameter.shape)
    if is_packed:
        return Weight(name, shape, False, BITS4_BYTES, BITS4_BYTES)
    # Accelerate keeps what is trained under mixed precision in fp32; what is frozen stays as it was loaded.
    is_master = parameter.requires_grad and job.mixed_precision is not None
    stored = torch.float32 if is_master else job.dtype
    return Weight(name, shape, parameter.requires_grad, stored.itemsize, parameter.dtype.itemsize, is_looked_up)


def _tables(model: Any) -> set[str]:
    """Name the embeddings' weights, but one that is tied to the head."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and module.weight is not head
    }


def _packed(model: Any) -> set[str]:
    """Name the weights that bitsandbytes packs: all linear ones but the head and the adapter's."""
    head = model.get_output_embeddings()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and "lora_" not in name
    }
