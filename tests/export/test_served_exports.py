"""Exports have what vLLM's loader (source of vLLM 0.32) relies on; vLLM and llama.cpp, if installed, run the exports."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hf_fsdp_recipes import export_checkpoint, export_model
from tests.conftest import make_tokenizer, tiny_config

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm/config/lora.py, MaxLoRARanks
WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module.", "base_model", "base_layer")


def lora(model):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # initially zeros, which would change nothing
            torch.nn.init.normal_(parameter, std=0.2)
    return adapted


@pytest.fixture(scope="module")
def exports(tiny_model, tmp_path_factory):
    """Return four export directories: a single file, several files, an adapter, and that adapter merged."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, root = tiny_model("llama_tied", "bfloat16"), tmp_path_factory.mktemp("exports")
    tokenizer = AutoTokenizer.from_pretrained(source)

    def load():
        return AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")

    found = {
        "one_file": export_model(load(), root / "one_file", tokenizer=tokenizer),
        "files": export_model(load(), root / "files", tokenizer=tokenizer, max_shard_size="20KB"),
        "adapter": export_model(lora(load()), root / "adapter", tokenizer=tokenizer),
    }
    merged = export_checkpoint(found["adapter"], root / "merged", base_model=source, merge_adapter=True)
    return found | {"merged": Path(merged or root / "merged")}


FULL = ("one_file", "files", "merged")


@pytest.mark.parametrize("kind", FULL)
def test_every_weight_is_in_one_file_that_the_index_names_and_there_is_no_other_file(exports, kind):
    # vLLM's model_executor/model_loader/weight_utils.py reads all *.safetensors, or the index's files, which must exist
    directory, index = exports[kind], exports[kind] / "model.safetensors.index.json"
    files = {file.name: set(load_file(file)) for file in directory.glob("*.safetensors")}
    held = [name for names in files.values() for name in names]
    assert len(held) == len(set(held))
    if index.exists():
        assert json.loads(index.read_text())["weight_map"] == {n: file for file, names in files.items() for n in names}
    else:
        assert set(files) == {"model.safetensors"}
    assert index.exists() == (kind == "files") and (kind != "files" or len(files) > 1)
    assert not [file for file in directory.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".distcp")]


@pytest.mark.parametrize("kind", FULL)
def test_names_are_the_architectures_own_and_a_tied_weight_is_written_once(exports, kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(exports[kind]))
    held = {name for file in exports[kind].glob("*.safetensors") for name in load_file(file)}
    assert held == set(model.state_dict()) - {"lm_head.weight"}
    assert not [name for name in held for wrapper in WRAPPERS if wrapper in name]


@pytest.mark.parametrize("kind", FULL)
def test_config_states_class_dtype_and_tied_weights_and_the_tokenizer_is_there(exports, kind):
    from transformers import AutoTokenizer, GenerationConfig

    config = json.loads((exports[kind] / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    dtypes = {t.dtype for file in exports[kind].glob("*.safetensors") for t in load_file(file).values()}
    assert dtypes == {getattr(torch, config["dtype"])}  # the dtype that vLLM's --dtype auto uses
    assert AutoTokenizer.from_pretrained(exports[kind]).chat_template
    assert GenerationConfig.from_pretrained(exports[kind]).eos_token_id == config["eos_token_id"]


def test_adapter_has_the_names_rank_and_features_that_vllm_accepts(exports):
    # vLLM: lora/peft_helper.py refuses settings; lora/utils.py parses tensor names; lora/lora_model.py has the file's name
    config = json.loads((exports["adapter"] / "adapter_config.json").read_text())
    assert config["r"] in VLLM_RANKS and config["lora_alpha"] == 16 and config["base_model_name_or_path"]
    assert config["target_modules"] and not config["modules_to_save"] and config["bias"] == "none"
    assert not config.get("use_dora") and not config.get("lora_bias") and not config.get("layer_replication")
    assert config["init_lora_weights"] is True
    assert [file.name for file in exports["adapter"].glob("*.safetensors")] == ["adapter_model.safetensors"]
    matrices = {}
    with safe_open(exports["adapter"] / "adapter_model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            module, matrix = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name).groups()
            matrices.setdefault(module, {})[matrix] = file.get_slice(name).get_shape()
    for module, shapes in matrices.items():
        assert any(f".{module}".endswith(f".{target}") for target in config["target_modules"])
        assert shapes["A"][0] == shapes["B"][1] == config["r"]


VLLM_SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
model, merged, adapter, ids = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
texts = []
for path, lora in ((model, None), (model, LoRARequest("adapter", 1, adapter)), (merged, None)):
    llm = LLM(path, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=2,
              enable_lora=lora is not None, max_lora_rank=8)
    [row] = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
                         lora_request=lora)
    texts.append(list(row.outputs[0].token_ids))
    del llm
print("TOKENS", json.dumps(texts))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")
@pytest.mark.timeout(900)
def test_vllm_generates_what_transformers_generates(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = large_heads()
    make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    base = export_model(model, tmp_path / "base", tokenizer=tokenizer)
    model = AutoModelForCausalLM.from_pretrained(base)
    adapter = export_model(lora(model), tmp_path / "adapter", tokenizer=tokenizer)
    export_checkpoint(adapter, tmp_path / "merged", base_model=base, merge_adapter=True)
    ids = tokenizer("The big fox runs", return_tensors="pt").input_ids
    expected = [greedy(AutoModelForCausalLM.from_pretrained(path), ids) for path in (base, tmp_path / "merged")]
    arguments = [base, tmp_path / "merged", adapter, json.dumps(ids[0].tolist())]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-c", VLLM_SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert expected[0] != expected[1]
    assert json.loads(line.removeprefix("TOKENS ")) == [expected[0], expected[1], expected[1]]


def large_heads():
    """Return a tiny Llama with heads of 64 values, the smallest that vLLM's kernels for CPUs and GPUs share."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config("llama_tied")
    config.update({"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64})
    return AutoModelForCausalLM.from_config(config)


def greedy(model, ids):
    with torch.no_grad():
        output = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return output[0, ids.shape[1] :].tolist()


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP is not the directory of llama.cpp's source")
def test_llama_cpps_converter_keeps_the_weights_and_the_greedy_tokens(tmp_path):
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    # llama.cpp identifies byte-level tokenizers by their tokens for a text and knows only published ones, so use Llama 2's kind.
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    model = large_heads()
    model.resize_token_embeddings(len(tokens))
    export = export_model(model, tmp_path / "export", tokenizer=tokenizer)
    command = [sys.executable, str(Path(os.environ["LLAMA_CPP"]) / "convert_hf_to_gguf.py"), str(export)]
    command += ["--outtype", "f32", "--outfile", str(tmp_path / "model.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(export)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in expected.state_dict().items())
    ids = tokenizer("the big fox runs", return_tensors="pt").input_ids
    assert greedy(loaded, ids) == greedy(expected, ids)
