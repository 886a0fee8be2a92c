"""What an exported adapter records of its base model's config, and where that config is read from, in one process."""

import json
import shutil

import pytest
import torch

from hf_fsdp_recipes import export_checkpoint, export_model, load_model
from hf_fsdp_recipes.errors import ExportError, LoadError
from hf_fsdp_recipes.export import from_checkpoint
from hf_fsdp_recipes.export.load_export import load_export

LABELS = {0: "good", 1: "bad", 2: "ugly"}
HEAD = {"id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}, "pad_token_id": 7}
HUB = {"revision": "v1", "token": "secret"}


@pytest.fixture(scope="module")
def classifier(tiny_model):
    """Return a LoRA classifier whose base model declares no labels and another padding token."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForSequenceClassification

    base = LlamaForSequenceClassification.from_pretrained(tiny_model("llama"), **HEAD)
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS", revision="v0")
    return get_peft_model(base, lora).eval()


@pytest.fixture(scope="module")
def adapter(classifier, tmp_path_factory):
    return export_model(classifier, tmp_path_factory.mktemp("exports") / "adapter")


def head_of(model):
    return {name: getattr(model.config, name) for name in HEAD}


def test_classifiers_labels_and_padding_survive_a_merge(classifier, adapter, tmp_path):
    from transformers import AutoModelForSequenceClassification

    merged = AutoModelForSequenceClassification.from_pretrained(
        export_checkpoint(adapter, tmp_path / "merged", merge_adapter=True)
    )
    loaded = load_export(adapter)
    assert head_of(merged) == head_of(loaded.get_base_model()) == HEAD
    ids = torch.tensor([[5, 6, 7, 7], [8, 9, 10, 11]])  # batches of several rows need the padding token
    with torch.no_grad():
        expected = classifier(ids).logits
        for model in (merged, loaded):
            torch.testing.assert_close(model(ids).logits, expected)


def test_new_head_is_merged_even_if_the_bases_first_tensor_holds_integers(classifier, adapter, tiny_model, tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSequenceClassification

    base = shutil.copytree(tiny_model("llama"), tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(4)}  # such names are ignored
    save_file(buffer | weights, base / "model.safetensors", {"format": "pt"})
    merged = export_checkpoint(adapter, tmp_path / "merged", base_model=base, merge_adapter=True)
    head = AutoModelForSequenceClassification.from_pretrained(merged).score.weight
    assert torch.equal(head, classifier.base_model.model.score.modules_to_save["default"].weight)


def test_adapter_that_is_not_lora_is_exported(tiny_model, tmp_path):
    from peft import IA3Config, get_peft_model
    from transformers import AutoModelForCausalLM

    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model("llama")), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter)
        tokens = torch.arange(12)[None]
        loaded = load_export(export_model(model, tmp_path / "adapter"))
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("saved", [None, ["embed_tokens", "lm_head"]])
def test_adapter_without_its_models_new_embeddings_is_named_and_not_merged(tiny_model, tmp_path, caplog, saved):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, tokenizer = (kind.from_pretrained(tiny_model("llama")) for kind in (AutoModelForCausalLM, AutoTokenizer))
    tokenizer.add_tokens([f"<|{number}|>" for number in range(40)])
    base.resize_token_embeddings(len(tokenizer))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved))
    adapter = export_model(model, tmp_path / "adapter", tokenizer=tokenizer)
    assert (
        "has 307, but the exported adapter does not hold the new rows of model.embed_tokens and lm_head" in caplog.text
    ) == (saved is None)
    words = "or has them in another shape" if saved else rf"a tokenizer of {len(tokenizer)} tokens, but the base model"
    with pytest.raises(ExportError, match=words):
        export_checkpoint(adapter, tmp_path / "merged", merge_adapter=True)


@pytest.mark.parametrize(
    ("kind", "name", "change", "words"),
    [
        ("llama", "model.layers.0.mlp.down_proj", lambda w: w.T.contiguous(), r"lacks .*down_proj\.weight of shape"),
        ("qwen3_moe", "model.layers.0.mlp.experts.0.down_proj", torch.Tensor.half, "have different dtypes"),
    ],
)
def test_base_weights_that_do_not_fit_the_model_are_not_merged(tiny_model, tmp_path, kind, name, change, words):
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    base = shutil.copytree(tiny_model(kind), tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    adapter = export_model(model, tmp_path / "adapter")
    weights = load_file(base / "model.safetensors")
    weights[f"{name}.weight"] = change(weights[f"{name}.weight"])
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match=words):
        export_checkpoint(adapter, tmp_path / "merged", merge_adapter=True)


@pytest.mark.parametrize(
    ("lora", "lost"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "model.embed_tokens and lm_head"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "lm_head"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [310]}, "lm_head"),
    ],
)
def test_new_rows_that_an_adapter_does_not_hold_are_named(tiny_model, tmp_path, caplog, lora, lost):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    base.resize_token_embeddings(320)
    export_model(get_peft_model(base, LoraConfig(r=4, **lora)), tmp_path / "adapter")
    assert f"does not hold the new rows of {lost}. Export" in caplog.text


def test_adapter_of_a_model_without_token_embeddings_is_exported(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    convolutions = {"conv_dim": (16,), "conv_stride": (5,), "conv_kernel": (10,), "num_conv_pos_embeddings": 16}
    config = Wav2Vec2Config(**sizes, **convolutions, num_feat_extract_layers=1, num_conv_pos_embedding_groups=2)
    model = get_peft_model(Wav2Vec2ForSequenceClassification(config), LoraConfig(target_modules=["q_proj"]))
    assert (export_model(model, tmp_path / "adapter") / "adapter_model.safetensors").is_file()


def test_tied_embeddings_that_peft_stores_twice_are_merged(tiny_model, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    resized = AutoModelForCausalLM.from_pretrained(tiny_model("llama_tied"))
    resized.resize_token_embeddings(320)
    resized.save_pretrained(tmp_path / "resized")
    model = get_peft_model(resized, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).eval()
    model.save_pretrained(tmp_path / "adapter")  # with both embeddings, because their number has changed
    merged = export_checkpoint(
        tmp_path / "adapter", tmp_path / "merged", base_model=tmp_path / "resized", merge_adapter=True
    )
    tokens = torch.arange(12)[None]
    found = AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
    torch.testing.assert_close(found, model(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS"])
def test_adapter_of_stock_peft_with_biases_or_a_head_is_merged(tmp_path, task):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=64, intermediate_size=32, pad_token_id=0, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    kind = AutoModelForCausalLM if task == "CAUSAL_LM" else AutoModelForSequenceClassification
    base = kind.from_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj"], bias="lora_only", task_type=task, init_lora_weights=False)
    model = get_peft_model(base, lora).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_proj.base_layer.bias"):
                parameter += 1
    model.save_pretrained(tmp_path / "adapter")
    merged = kind.from_pretrained(export_checkpoint(tmp_path / "adapter", tmp_path / "merged", merge_adapter=True))
    tokens = torch.arange(1, 12)[None]
    torch.testing.assert_close(merged(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


def test_adapter_of_another_program_keeps_the_base_models_fields(adapter, tmp_path):
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert set(config["auto_mapping"]) == {"base_model_class", "parent_library", *HEAD}
    config["auto_mapping"] = {name: config["auto_mapping"][name] for name in ("base_model_class", "parent_library")}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    base = load_export(tmp_path).get_base_model()
    assert head_of(base) == {
        "id2label": {n: f"LABEL_{n}" for n in range(3)}, "label2id": {f"LABEL_{n}": n for n in range(3)}, "pad_token_id": 0
    }  # fmt: skip


@pytest.fixture
def reads(monkeypatch):
    """Return a list that gets the arguments of each call of AutoConfig.from_pretrained."""
    from transformers import AutoConfig

    found, read = [], AutoConfig.from_pretrained

    def record(name, **kwargs):
        found.append((str(name), {key: kwargs.get(key) for key in HUB}))
        return read(name, **kwargs)

    monkeypatch.setattr(AutoConfig, "from_pretrained", record)
    return found


def test_base_config_is_read_with_token_and_revision(adapter, tiny_model, reads):
    base = str(tiny_model("llama"))
    load_model(adapter, num_labels=3, ignore_mismatched=True, **HUB)
    load_model(adapter, num_labels=3, ignore_mismatched=True, token="secret")
    load_export(adapter, token="secret")
    revisions = [(name, found["revision"]) for name, found in reads if found["token"] == "secret"]
    assert [revision for name, revision in revisions if name == base] == ["v1", "v0", "v0"]


def test_base_of_a_merge_is_read_at_the_adapters_revision(adapter, tiny_model, tmp_path, monkeypatch):
    asked, resolve = [], from_checkpoint.resolve_directory
    monkeypatch.setattr(
        from_checkpoint, "resolve_directory", lambda name, kwargs: asked.append(kwargs) or resolve(name, kwargs)
    )
    export_checkpoint(adapter, tmp_path / "recorded", merge_adapter=True)
    export_checkpoint(adapter, tmp_path / "other", merge_adapter=True, base_model=f"{tiny_model('llama')}/")
    assert asked == [{"revision": "v0"}, {"revision": None}]


def test_damaged_config_of_an_adapter_is_one_error(tmp_path):
    (tmp_path / "adapter_config.json").write_text('["lora"')
    with pytest.raises(LoadError, match=r"adapter_config\.json cannot be read"):
        load_model(tmp_path)


@pytest.mark.parametrize(("name", "content"), [("adapter_config.json", b'{"format": 1}'), ("model.safetensors", b"12")])
def test_damaged_model_without_a_marker_is_one_error(tiny_model, tmp_path, name, content):
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (model / name).write_bytes(content)
    with pytest.raises(LoadError, match="model cannot be loaded"):
        load_model(model)
