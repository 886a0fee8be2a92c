"""A model in which each micro-batch uses one of two experts, so that a rank may lack a gradient."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaMLP

NUM_EXPERTS = 2


class BranchingMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(NUM_EXPERTS))
        self.chosen = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.experts[self.chosen](hidden)


class BranchingModel(LlamaModel):
    """Chooses the expert by the first token of a micro-batch."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = BranchingMLP(config)
        self.post_init()

    def forward(self, input_ids: torch.Tensor | None = None, **options: Any) -> Any:
        for layer in self.layers:
            layer.mlp.chosen = int(input_ids[0, 0]) % NUM_EXPERTS
        return super().forward(input_ids, **options)


class BranchingForCausalLM(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = BranchingModel(config)
        self.post_init()
