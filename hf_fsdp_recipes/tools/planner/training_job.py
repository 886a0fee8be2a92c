"""The job to plan: how a model is trained, and on which GPUs."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hf_fsdp_recipes.configs.strategy import Strategy
from hf_fsdp_recipes.errors import PlanError
from hf_fsdp_recipes.precision import format_dtype

# For each optimizer, the number of state tensors per trained parameter.
NUM_STATES = {
    **dict.fromkeys(["adamw_torch", "adamw_torch_fused", "adamw_anyprecision", "stable_adamw", "paged_adamw"], 2),
    **dict.fromkeys(["paged_adamw_32bit", "adamw_torch_4bit", "adamw_torch_8bit"], 2),
    **dict.fromkeys(["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"], 2),
    **dict.fromkeys(["lion_32bit", "paged_lion_32bit", "lion_8bit", "paged_lion_8bit", "lion"], 1),
    **dict.fromkeys(["adagrad", "rmsprop"], 1),
    "sgd": 0,
}
BLOCK_SCALE_BYTES = 4 / 256  # per value: in 8-bit and 4-bit states, 256 values share one fp32 scale


@dataclass(frozen=True)
class Cluster:
    """The GPUs, the links between them, and their hosts."""

    num_gpus: int = 8  # ranks on all nodes
    gpus_per_node: int = 8
    gpu_bytes: int | None = 80 * 10**9  # memory of one GPU; None if unknown
    host_bytes: int | None = None  # memory of one node; None if unknown
    node_bytes_per_second: float = 200e9 / 8  # bandwidth into one node from the other nodes
    gpu_bytes_per_second: float = 300e9  # bandwidth into one GPU from the other GPUs of its node
    gpu_flops: float = 312e12  # peak dense bf16 FLOP/s of one GPU

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the job uses."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return min(self.num_gpus, self.gpus_per_node)


@dataclass(frozen=True)
class TrainingJob:
    """One way to train a model."""

    strategy: Strategy
    cluster: Cluster = field(default_factory=Cluster)
    batch: int = 1  # rows per rank
    length: int = 1024  # tokens per row
    accumulation: int = 1  # micro-batches per step
    dtype: torch.dtype = torch.float32  # dtype of the loaded parameters (TRL's `dtype`)
    mixed_precision: torch.dtype | None = torch.bfloat16  # compute dtype of the template; None to compute in `dtype`
    reduce_dtype: torch.dtype = torch.float32  # dtype of gradient reduction and accumulation in mixed precision
    optimizer: str = "adamw_torch_fused"  # Trainer's `optim`
    gradient_checkpointing: bool = True
    # With sdpa_padded, rows are padded and need a mask, which makes transformers repeat key and value heads. Eager
    # attention keeps scores of shape (batch, heads, length, length).
    attention: Literal["sdpa", "sdpa_padded", "flash", "eager"] = "sdpa"
    # fused: computed in tiles, as in TRL and Liger; model: transformers' loss, which needs the full logits
    loss: Literal["fused", "model"] = "fused"
    lora_rank: int = 0  # 0 for full fine-tuning
    lora_targets: str | tuple[str, ...] = "all-linear"  # as in PEFT
    lora_parameters: tuple[str, ...] = ()  # PEFT's target_parameters, such as experts
    is_4bit: bool = False  # base weights in 4 bits (bitsandbytes), under an adapter
    has_nested_scales: bool = False  # quantize the scales of 4-bit weights too (`use_bnb_nested_quant`)
    sync_each_batch: bool = False  # reduce gradients after each micro-batch instead of once per step

    def __post_init__(self) -> None:
        """Raise a PlanError that lists all invalid settings."""
        cluster, faults = self.cluster, []
        for name in ("batch", "length", "accumulation"):
            if getattr(self, name) < 1:
                faults.append(f"{name} is {getattr(self, name)}; use at least 1")
        if cluster.num_gpus < 1 or cluster.gpus_per_node < 1:
            faults.append(f"{cluster.num_gpus} GPUs, {cluster.gpus_per_node} per node; use at least 1 of each")
        elif cluster.num_gpus > cluster.gpus_per_node and cluster.num_gpus % cluster.gpus_per_node:
            faults.append(f"{cluster.num_gpus} GPUs do not fill nodes of {cluster.gpus_per_node}; fill every node")
        if self.optimizer not in NUM_STATES:
            faults.append(f"cannot plan optimizer {self.optimizer!r}; use one of {', '.join(sorted(NUM_STATES))}")
        if self.is_4bit and not self.lora_rank:
            faults.append("4-bit weights cannot be trained; add a LoRA adapter")
        if self.strategy.is_hybrid and cluster.num_nodes < 2:
            faults.append(
                f"{self.strategy.sharding} replicates the model across nodes, but the job has one node; use full_shard or "
                "shard_grad_op"
            )
        if faults:
            raise PlanError("; ".join(faults) + ".")

    @property
    def num_shards(self) -> int:
        """Number of ranks that share one replica of the model."""
        if self.strategy.sharding == "no_shard":
            return 1
        return self.cluster.ranks_per_node if self.strategy.is_hybrid else self.cluster.num_gpus

    @property
    def num_communicators(self) -> int:
        """NCCL communicators per rank: one for all ranks and, with hybrid sharding, two more: within and across replicas."""
        return 0 if self.cluster.num_gpus == 1 else 3 if self.strategy.is_hybrid else 1

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of gathered parameters and of activations."""
        return self.mixed_precision or self.dtype

    @property
    def reduction_factor(self) -> float:
        """Size of a reduced or accumulated gradient, relative to the gradient that backward computes."""
        return self.reduce_dtype.itemsize / self.mixed_precision.itemsize if self.mixed_precision else 1.0

    @property
    def is_offloaded(self) -> bool:
        """Whether parameters, gradients and optimizer state are kept on the host instead of the GPU."""
        return self.strategy.is_offloaded and not self.strategy.on_cpu

    def replace(self, **fields: Any) -> "TrainingJob":
        """Return a copy with some fields changed; fields of `strategy` and `cluster` can be named directly."""
        for name in ("strategy", "cluster"):
            part = fields.get(name, getattr(self, name))
            inner = {key: fields.pop(key) for key in list(fields) if key in part.__dataclass_fields__}
            fields[name] = dataclasses.replace(part, **inner)
        return dataclasses.replace(self, **fields)

    def describe(self) -> dict[str, object]:
        """Return the settings as JSON values."""
        return {
            "template": self.strategy.name,
            "gpus": self.cluster.num_gpus,
            "gpus_per_node": self.cluster.gpus_per_node,
            "batch": self.batch,
            "length": self.length,
            "accumulation": self.accumulation,
            "dtype": format_dtype(self.dtype),
            "mixed_precision": format_dtype(self.mixed_precision) if self.mixed_precision else "no",
            "optimizer": self.optimizer,
            "gradient_checkpointing": self.gradient_checkpointing,
            "attention": self.attention,
            "loss": self.loss,
            "lora_rank": self.lora_rank,
            "quantized": "4bit" if self.is_4bit else None,
        }
