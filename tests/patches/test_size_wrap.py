"""The patch of size-based wrapping does not change models that are wrapped by class."""

import torch
from accelerate import FullyShardedDataParallelPlugin
from transformers import PreTrainedConfig, PreTrainedModel

from hf_fsdp_recipes.patches import registry


class WithoutEmbeddings(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(2, 2)


def test_model_without_embeddings_keeps_its_policy():
    registry.apply("size wrap")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    plugin.set_auto_wrap_policy(WithoutEmbeddings(PreTrainedConfig()))
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {torch.nn.Linear}}
