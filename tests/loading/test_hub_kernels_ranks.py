"""Kernels from the Hub in models from `load_model`. A local repository stands in for the Hub, so no network is needed.

Most of these tests need the version of the kernels package that transformers supports, and are skipped without it.
"""

import json

import pytest
import torch
from transformers.utils.import_utils import is_kernels_available

from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks

needs_kernels = pytest.mark.skipif(not is_kernels_available(), reason="needs the kernels package")
ATTENTION = "kernels-community/tiny-flash-attn"
METADATA = {
    "id": "tiny-cpu", "name": "tiny", "version": 1, "license": "Apache-2.0", "python-depends": [], "backend": {"type": "cpu"},
}  # fmt: skip
KERNELS = """
import torch
from torch.nn.functional import scaled_dot_product_attention
from . import layers

CALLS = []

def flash_attn_func(q, k, v, softmax_scale=None, causal=True, **rest):
    CALLS.append("attention")
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    found = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return found.transpose(1, 2)

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **rest):
    ends = cu_seqlens_q.tolist()
    return torch.cat([flash_attn_func(q[None, a:b], k[None, a:b], v[None, a:b], **rest)[0] for a, b in zip(ends, ends[1:])])
"""
LAYERS = """
import torch

CALLS = []

class Norm(torch.nn.Module):
    has_backward = True

    def forward(self, hidden_states):
        CALLS.append("norm")
        values = hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * values
"""


@pytest.fixture
def repository(tmp_path):
    """Return a local kernel repository with a normalization layer and an attention function for CPUs."""
    directory = tmp_path / "kernel" / "build" / "torch-universal"
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text(json.dumps(METADATA))
    (directory / "__init__.py").write_text(KERNELS)
    (directory / "layers.py").write_text(LAYERS)
    return tmp_path / "kernel"


def train(model, repository, output_dir, has_kernels):
    """Train two steps and evaluate; return the losses, the calls of each kernel, and what was printed."""
    import contextlib
    import io

    from accelerate import Accelerator

    from hf_fsdp_recipes import export_model, load_model

    kwargs = {}
    if has_kernels:
        from kernels import LocalLayerRepository, get_local_kernel, register_kernel_mapping

        kernel = get_local_kernel(repository)
        register_kernel_mapping({"RMSNorm": {"cpu": LocalLayerRepository(repository, layer_name="Norm")}})
        kwargs = {"use_kernels": True, "attn_implementation": ATTENTION}
    loaded = load_model(str(model), dtype="float32", **kwargs)
    accelerator = Accelerator()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if accelerator.state.fsdp_plugin.fsdp_version == 1:
            prepared = accelerator.prepare(loaded)
            optimizer = accelerator.prepare(torch.optim.AdamW(prepared.parameters(), lr=1e-2))
        else:
            prepared, optimizer = accelerator.prepare(loaded, torch.optim.AdamW(loaded.parameters(), lr=1e-2))
    tokens, losses = torch.arange(16)[None] % 5, []
    for is_training in (True, True, False):
        prepared.train(is_training)
        loss = prepared(input_ids=tokens, labels=tokens, use_cache=False).loss
        losses.append(loss.item())
        if is_training:
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    export_model(prepared, output_dir)
    calls = (len(kernel.layers.CALLS), len(kernel.CALLS)) if has_kernels else (0, 0)
    return losses, calls, printed.getvalue()


@needs_kernels
@pytest.mark.parametrize("fsdp", [FSDP2, FSDP1], ids=["fsdp2", "fsdp1"])
def test_kernels_of_layers_and_attention_are_used_in_training_and_evaluation(fsdp, tiny_model, repository, tmp_path):
    from safetensors.torch import load_file

    variables = fsdp_environment(fsdp) | {"LOCAL_KERNELS": f"{ATTENTION}={repository}"}
    exports = [tmp_path / "plain", tmp_path / "export"]
    plain, found = (
        run_ranks(train, 2, tiny_model("llama"), repository, export, export == exports[1], environment=variables)
        for export in exports
    )
    for (losses, _, _), (with_kernels, calls, _) in zip(plain, found, strict=True):
        assert with_kernels == pytest.approx(losses, rel=1e-5)
        assert calls == (3 * 5, 3 * 2)  # 2 layers with 2 norms each, and the final norm
    assert "kernels: 5 RMSNorm" in found[0][2]
    before, after = (load_file(export / "model.safetensors") for export in exports)
    assert all(torch.allclose(before[name], after[name], atol=1e-4) for name in before)
    config = json.loads((exports[1] / "config.json").read_text())
    assert not [name for name in config if "kernel" in name or "attn_implementation" in name]


def refuse(model, arguments):
    """Load with each of the arguments; return the errors."""
    from transformers import KernelConfig

    from hf_fsdp_recipes import load_model
    from hf_fsdp_recipes.errors import LoadError

    found = []
    for kwargs in arguments:
        if isinstance(kwargs.get("kernel_config"), str):
            kwargs = {"kernel_config": KernelConfig({"RMSNorm": kwargs["kernel_config"]})}
        try:
            load_model(str(model), **kwargs)
            found.append(None)
        except LoadError as error:
            found.append(str(error))
    return found


def test_what_cannot_work_is_one_sentence_before_weights_are_read(tiny_model):
    expected = [
        (
            {"use_kernel": True},
            "use_kernel: load_model has no such argument, and LlamaConfig no such field. Remove it.",
        ),
        ({"kernel_config": {"RMSNorm": "publisher/repository:Norm"}}, "Pass a transformers.KernelConfig"),
    ]
    if is_kernels_available():
        text = "the kernels for LlamaForCausalLM cannot be used: "
        expected.append(({"kernel_config": "publisher/repository:Norm"}, text))
    else:
        expected.append(({"use_kernels": True}, "use_kernels needs kernels>="))
        expected.append(({"attn_implementation": ATTENTION}, f"attn_implementation {ATTENTION} needs kernels>="))
    run = (tiny_model("llama"), [arguments for arguments, _ in expected])
    for found in run_ranks(refuse, 2, *run, environment=fsdp_environment(FSDP2)):
        for message, (_, text) in zip(found, expected, strict=True):
            assert text in message
