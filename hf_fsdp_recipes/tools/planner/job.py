"""What is planned: a model, how it is trained, over which GPUs. Values and their checks; computes nothing."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hf_fsdp_recipes.errors import PlanError
from hf_fsdp_recipes.tools.planner.strategy import Strategy

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
# Optimizer state in bytes for each trained element, as a function of the parameters' own bytes. Block-wise 8-bit
# states keep one fp32 scale for 256 values. Paged states may move to host memory, so they are counted there.
BLOCK_SCALE_BYTES = 4 / 256
STATE_TENSORS = {
    **dict.fromkeys(["adamw_torch", "adamw_torch_fused", "adamw_anyprecision", "stable_adamw", "paged_adamw"], 2),
    **dict.fromkeys(["paged_adamw_32bit", "adamw_torch_4bit", "adamw_torch_8bit"], 2),
    **dict.fromkeys(["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"], 2),
    **dict.fromkeys(["lion_32bit", "paged_lion_32bit", "lion_8bit", "paged_lion_8bit", "lion"], 1),
    **dict.fromkeys(["adagrad", "rmsprop"], 1),
    "sgd": 0,
}


@dataclass(frozen=True)
class Machine:
    """The GPUs, what connects them, and the hosts around them.

    Attributes:
        num_gpus, gpus_per_node: ranks over all nodes, and on each.
        gpu_bytes, host_bytes: memory of one GPU and of one node; None where nothing is known.
        node_bytes_per_second: what goes into one node from the others (its share of the interconnect).
        gpu_bytes_per_second: what goes into one GPU from the others of its node.
        gpu_flops: peak of dense bf16 arithmetic.
    """

    num_gpus: int = 8
    gpus_per_node: int = 8
    gpu_bytes: int | None = 80 * 10**9
    host_bytes: int | None = None
    node_bytes_per_second: float = 200e9 / 8
    gpu_bytes_per_second: float = 300e9
    gpu_flops: float = 312e12

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks stand on."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def ranks_on_node(self) -> int:
        """Ranks that share a node's memory."""
        return min(self.num_gpus, self.gpus_per_node)


@dataclass(frozen=True)
class Job:
    """One way to train one model.

    Attributes:
        strategy: what is cut over which ranks, FSDP's version, offloading and wrapping.
        machine: what it runs on.
        batch, length, accumulation: rows a rank, tokens a row, micro-batches a step.
        dtype: of the parameters as loaded (TRL's `dtype`, float32 by default).
        mixed_precision: compute dtype of the template, or None for the parameters' own.
        optimizer: Trainer's `optim`.
        checkpointing: whether each layer's activations are recomputed in backward.
        attention: sdpa or flash; sdpa_padded, where rows are padded and so get a mask, with which transformers repeats
            the key and value heads; eager, which holds (B, H, L, L) scores.
        loss: fused (TRL's and Liger's, in tiles), model (transformers' own, logits whole, the loss in fp32) or upcast
            (as transformers up to 4.44: logits themselves in fp32, shifted by a copy).
        lora_rank, lora_targets: adapter, or 0 for full fine-tuning; targets as in PEFT.
        is_4bit: base weights in 4 bits (bitsandbytes), adapters beside them.
        has_nested_scales: whether their scales are quantised too (`use_bnb_nested_quant`).
        sync_each_batch: reduce gradients after each micro-batch instead of keeping them whole between.
        loop: trainer; or script, a plain loop over a model wrapped by torch itself that keeps its outputs and its
            gradients until the next ones are there.
    """

    strategy: Strategy
    machine: Machine = field(default_factory=Machine)
    batch: int = 1
    length: int = 1024
    accumulation: int = 1
    dtype: torch.dtype = torch.float32
    mixed_precision: torch.dtype | None = torch.bfloat16
    optimizer: str = "adamw_torch_fused"
    checkpointing: bool = True
    attention: Literal["sdpa", "sdpa_padded", "flash", "eager"] = "sdpa"
    loss: Literal["fused", "model", "upcast"] = "fused"
    lora_rank: int = 0
    lora_targets: str | tuple[str, ...] = "all-linear"
    is_4bit: bool = False
    has_nested_scales: bool = False
    sync_each_batch: bool = False
    loop: Literal["trainer", "script"] = "trainer"

    def __post_init__(self) -> None:
        """Refuse what cannot be, all at once.

        Raises:
            PlanError: names each fault with its rule.
        """
        machine, faults = self.machine, []
        for name, value in (("batch", self.batch), ("length", self.length), ("accumulation", self.accumulation)):
            if value < 1:
                faults.append(f"{name}: {value}. Rule: at least 1")
        if machine.num_gpus < 1 or machine.gpus_per_node < 1:
            faults.append(f"{machine.num_gpus} GPUs, {machine.gpus_per_node} a node. Rule: at least 1 of each")
        elif machine.num_gpus > machine.gpus_per_node and machine.num_gpus % machine.gpus_per_node:
            faults.append(f"{machine.num_gpus} GPUs on nodes of {machine.gpus_per_node}. Rule: all nodes have as many")
        if self.optimizer not in STATE_TENSORS:
            faults.append(f"optimizer {self.optimizer!r}. Rule: one of {', '.join(sorted(STATE_TENSORS))}")
        if self.is_4bit and not self.lora_rank:
            faults.append("4-bit weights without LoRA. Rule: 4-bit weights stay frozen. Remedy: add an adapter")
        if self.strategy.is_hybrid and machine.num_nodes < 2:
            faults.append(f"{self.strategy.sharding} on one node. Rule: it copies the model between nodes")
        if faults:
            raise PlanError("; ".join(faults) + ".")

    @property
    def shard_ranks(self) -> int:
        """Ranks that one copy of the model is cut over."""
        if self.strategy.sharding == "no_shard":
            return 1
        return self.machine.ranks_on_node if self.strategy.is_hybrid else self.machine.num_gpus

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of gathered parameters and of activations."""
        return self.mixed_precision or self.dtype

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks compute on CPUs, where torch's own kernels stand in for Triton's."""
        return self.strategy.on_cpu

    @property
    def is_offloaded(self) -> bool:
        """Whether shards, gradients and the optimizer live on the host."""
        return self.strategy.is_offloaded and not self.on_cpu


def parse_bytes(text: str) -> int:
    """Read "80GB", "512GiB" or "1.5T" as bytes.

    Raises:
        PlanError: it is no size.
    """
    return int(_parse_quantity(text, r"B?", "a size such as 80GB or 512GiB"))


def parse_bandwidth(text: str) -> float:
    """Read "200Gb/s" (bits) or "25GB/s" (bytes) as bytes a second.

    Raises:
        PlanError: it is no bandwidth.
    """
    quantity = _parse_quantity(text, r"[bB](?:/s|ps|it/s)?", "a bandwidth such as 200Gb/s or 25GB/s")
    is_in_bits = re.search(r"[kKmMgGtT]i?b", text.strip()) is not None
    return quantity / 8 if is_in_bits else quantity


def parse_dtype(text: str | None) -> torch.dtype | None:
    """Read a dtype's name as TRL and Accelerate spell it; None for `no`.

    Raises:
        PlanError: it is none.
    """
    if text is None or text.lower() in ("no", "none", "false"):
        return None
    if text.lower() not in DTYPES:
        raise PlanError(f"dtype {text!r}. Rule: one of {', '.join(DTYPES)}, or no.")
    return DTYPES[text.lower()]


def _parse_quantity(text: str, ending: str, rule: str) -> float:
    match = re.fullmatch(rf"\s*([\d.]+)\s*([kKmMgGtT]?i?)({ending})\s*", text)
    if match is None or match.group(1).count(".") > 1 or match.group(1) == ".":
        raise PlanError(f"{text!r} cannot be read. Rule: {rule}.")
    return float(match.group(1)) * UNITS[match.group(2).upper()]


def describe(job: Job) -> dict[str, Any]:
    """Return what was planned for, as plain values."""
    machine = job.machine
    return {
        "template": job.strategy.name,
        "gpus": machine.num_gpus,
        "gpus_per_node": machine.gpus_per_node,
        "batch": job.batch,
        "length": job.length,
        "accumulation": job.accumulation,
        "dtype": str(job.dtype).removeprefix("torch."),
        "mixed_precision": str(job.mixed_precision).removeprefix("torch.") if job.mixed_precision else "no",
        "optimizer": job.optimizer,
        "gradient_checkpointing": job.checkpointing,
        "attention": job.attention,
        "loss": job.loss,
        "lora_rank": job.lora_rank,
        "quantized": "4bit" if job.is_4bit else None,
    }
