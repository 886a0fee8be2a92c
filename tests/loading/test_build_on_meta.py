"""A model built on meta has the buffers that transformers gives it, and its weights are never initialized."""

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_fsdp_recipes.loading.build_on_meta import build_on_meta, resolve_directory

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WIDTH = {"intermediate_size": 48, "head_dim": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": YARN, "max_position_embeddings": 256}),
        ("gemma3_text", {"sliding_window": 16}),
        ("qwen3", {}),
        ("mixtral", EXPERTS),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
        ("bloom", {"n_layer": 2, "n_head": 4}),
        ("phi3", {"pad_token_id": 0}),
        ("gpt_neox", {}),
    ],
)
def test_buffers_are_those_of_a_model_that_is_not_on_meta(model_type, fields):
    config = AutoConfig.for_model(model_type, **{**SMALL, **WIDTH, **fields})
    ours = dict(build_on_meta(config, torch.float32).named_buffers())
    stock = dict(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_buffers())
    assert ours.keys() == stock.keys()
    for name, buffer in stock.items():
        assert torch.equal(ours[name], buffer), name


class FilledLaterConfig(PreTrainedConfig):
    model_type = "filled_later"


class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("values", torch.empty(3), persistent=False)


class FilledLater(PreTrainedModel):
    config_class = FilledLaterConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        self.table = Table()
        self.linear = torch.nn.Linear(2, 2)
        self.post_init()

    def _init_weights(self, module):
        assert not isinstance(module, torch.nn.Linear), "a weight on meta has no value to give"
        if isinstance(module, Table):
            module.values.copy_(torch.tensor([1.0, 2.0, 3.0]))


def test_buffer_that_only_the_models_init_fills_is_filled():
    AutoConfig.register("filled_later", FilledLaterConfig, exist_ok=True)
    AutoModelForCausalLM.register(FilledLaterConfig, FilledLater, exist_ok=True)
    model = build_on_meta(FilledLaterConfig(), torch.float32)
    assert model.table.values.tolist() == [1.0, 2.0, 3.0]
    assert model.linear.weight.is_meta


DEEPSEEK = {
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parameters_and_buffers_have_the_dtypes_of_from_pretrained(tmp_path, dtype):
    config = AutoConfig.for_model("deepseek_v3", **SMALL | DEEPSEEK)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    ours = build_on_meta(config, dtype).state_dict()
    assert {name: tensor.dtype for name, tensor in ours.items()} == {name: t.dtype for name, t in stock.items()}
    assert ours["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_subfolder_of_a_hub_model_is_where_its_files_are(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **kwargs: asked.append((name, kwargs)) or str(tmp_path)
    )
    assert resolve_directory("owner/name", {"subfolder": "part", "revision": "v1"}) == tmp_path / "part"
    assert resolve_directory("owner/name", {"subfolder": None}) == tmp_path
    name, kwargs = asked[0]
    assert (name, kwargs["revision"]) == ("owner/name", "v1")
    found = filter_repo_objects(["part/config.json", "part/model.safetensors"], allow_patterns=kwargs["allow_patterns"])
    assert list(found) == ["part/config.json", "part/model.safetensors"]
