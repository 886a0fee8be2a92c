"""New weights come from the model's own initialization, are equal for any number of ranks, and never fill rank 0's memory."""

import hashlib

import pytest
import torch

from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks


def new_values(directory, seed=1):
    """Return a NewValues and the (module, parameter) names of a model's new weights."""
    from hf_fsdp_recipes.loading.build_on_meta import build_on_meta, read_config
    from hf_fsdp_recipes.loading.new_values import NewValues

    model = build_on_meta(read_config(str(directory)), torch.float32)
    names = [name.rpartition(".")[::2] for name, _ in model.named_parameters()]
    modules = list(dict.fromkeys(module for module, _ in names))
    created = NewValues(model, seed)
    return {(m, leaf): lambda m=m, leaf=leaf: created.read(modules.index(m), m, leaf) for m, leaf in names}, created


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2", "qwen3_moe"])
def test_values_are_the_same_in_any_order_and_few_of_them_are_kept(tiny_model, kind, monkeypatch):
    monkeypatch.setattr("hf_fsdp_recipes.loading.new_values.KEPT_BYTES", 0)
    reads, created = new_values(tiny_model(kind))
    forward = {name: read() for name, read in reads.items()}
    for name, read in reversed(reads.items()):
        assert torch.equal(read(), forward[name]), name
        assert len(created._kept) <= 2
    assert all(parameter.is_meta for parameter in created._model.parameters())


def test_spread_is_what_the_model_declares(tiny_model):
    reads, _ = new_values(tiny_model("gpt2"))
    scaled = torch.cat(
        [read().flatten() for (m, leaf), read in reads.items() if m.endswith("c_proj") and leaf == "weight"]
    )
    plain = torch.cat(
        [read().flatten() for (m, leaf), read in reads.items() if m.endswith("c_attn") and leaf == "weight"]
    )
    layers = len([m for m, leaf in reads if m.endswith("attn.c_proj") and leaf == "weight"])
    assert plain.std().item() == pytest.approx(0.02, rel=0.1)
    assert scaled.std().item() == pytest.approx(0.02 / (2 * layers) ** 0.5, rel=0.1)  # initialized by the parent module


def _full_parameters(config, output):
    from accelerate import Accelerator
    from torch.distributed.fsdp import FullyShardedDataParallel
    from transformers import set_seed

    from hf_fsdp_recipes.loading.load_model import initialize_model

    set_seed(3)
    model = initialize_model(str(config))
    accelerator = Accelerator()
    if accelerator.state.fsdp_plugin.fsdp_version == 1:
        model = accelerator.prepare(model)
    else:
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            values = {name.replace("_fsdp_wrapped_module.", ""): p.clone() for name, p in model.named_parameters()}
    else:
        values = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    return {name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest() for name, value in values.items()}


def test_new_model_is_the_same_on_one_rank_and_two_under_fsdp1_and_fsdp2(tiny_model, tmp_path):
    config = tiny_model("llama")
    one, *others = (
        run_ranks(_full_parameters, num_ranks, config, tmp_path, environment=fsdp_environment(fsdp))[0]
        for num_ranks, fsdp in ((1, FSDP2), (2, FSDP2), (2, FSDP1))
    )
    assert len(one) > 10 and others == [one, one]
