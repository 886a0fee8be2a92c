"""Which class a model gets: the requested class, or the class that its config declares."""

import pytest
import torch
import transformers

from hf_fsdp_recipes.errors import ExportError, LoadError
from hf_fsdp_recipes.model_class import build, choose_class, task_type_of
from tests.conftest import make_tokenizer, tiny_config


def config_declaring(name, kind="llama"):
    config = tiny_config(kind)
    config.architectures = [name] if name else None
    return config


@pytest.mark.parametrize(
    ("declared", "auto_class", "chosen"),
    [
        (None, None, "LlamaForCausalLM"),
        ("MyLlama", None, "LlamaForCausalLM"),
        ("LlamaForCausalLM", None, "LlamaForCausalLM"),
        ("FSDPLlamaForCausalLM", None, "LlamaForCausalLM"),
        ("MistralForCausalLM", None, "LlamaForCausalLM"),  # a class of another model_type
        ("LlamaForSequenceClassification", None, "LlamaForSequenceClassification"),
        ("LlamaForSequenceClassification", "AutoModelForCausalLM", "LlamaForCausalLM"),
        ("LlamaForCausalLM", transformers.AutoModelForTokenClassification, "LlamaForTokenClassification"),
        ("LlamaForCausalLM", "LlamaForTokenClassification", "LlamaForTokenClassification"),
    ],
)
def test_class_is_the_one_asked_for_or_declared(declared, auto_class, chosen):
    found, _ = choose_class(config_declaring(declared), auto_class)
    assert found.__name__ == chosen


@pytest.mark.parametrize(
    ("declared", "auto_class", "message"),
    [
        ("LlamaModel", None, "LlamaModel (architectures in config.json) has no head"),
        ("LlamaForCausalLM", "LlamaForQuestionAnswering", "LlamaForQuestionAnswering (auto_class) has no head"),
        ("LlamaForCausalLM", "AutoModel", "auto_class is AutoModel, which is not supported"),
        ("LlamaForCausalLM", "AutoModelForEverything", "'AutoModelForEverything', which transformers does not have"),
        ("LlamaForCausalLM", "AutoModelForImageTextToText", "has no class for model_type 'llama'"),
    ],
)
def test_class_that_cannot_be_trained_is_refused(declared, auto_class, message):
    with pytest.raises(LoadError) as error:
        choose_class(config_declaring(declared), auto_class)
    assert message in str(error.value)


def test_built_model_records_its_class():
    model = build(config_declaring("LlamaForCausalLM"), "LlamaForTokenClassification", dtype=torch.bfloat16)
    assert model.config.architectures == ["LlamaForTokenClassification"]
    assert model.dtype == torch.bfloat16


def test_task_types_are_pefts():
    assert task_type_of(transformers.Gemma3ForConditionalGeneration) == "CAUSAL_LM"
    assert task_type_of(transformers.LlamaForSequenceClassification) == "SEQ_CLS"
    assert task_type_of(transformers.BertForTokenClassification) == "TOKEN_CLS"
    assert task_type_of(transformers.LlamaModel) is None


def test_classifier_generates_no_text(tmp_path):
    from hf_fsdp_recipes.export.generate import generate

    build(config_declaring("LlamaForSequenceClassification")).save_pretrained(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    (tmp_path / "prompt.txt").write_text("The big fox")
    with pytest.raises(ExportError, match="LlamaForSequenceClassification, which classifies text"):
        generate(tmp_path / "model", tmp_path / "prompt.txt")


def test_head_of_a_classifier_is_reused_with_one_line(tmp_path, monkeypatch, capsys):
    from hf_fsdp_recipes import load_model

    for name in ("ACCELERATE_USE_FSDP", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    config = config_declaring("LlamaForSequenceClassification")
    config.id2label = {0: "good", 1: "bad"}
    build(config).save_pretrained(tmp_path)
    line = f"load: {tmp_path} is a LlamaForSequenceClassification; its head is reused for the labels"
    load_model(tmp_path, num_labels=2)
    assert f"{line} good, bad\n" in capsys.readouterr().out
    load_model(tmp_path, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    assert f"{line} cat, dog\n" in capsys.readouterr().out
    load_model(tmp_path, num_labels=3, ignore_mismatched=True)
    assert "is reused" not in capsys.readouterr().out


def test_without_fsdp_the_class_and_its_new_head_are_the_same(tmp_path, monkeypatch, capsys):
    from hf_fsdp_recipes import load_model

    for name in ("ACCELERATE_USE_FSDP", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    build(config_declaring("LlamaForCausalLM", "llama_tied")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = load_model(tmp_path, auto_class="AutoModelForSequenceClassification", num_labels=1)
    assert "starts with a new head" in capsys.readouterr().out
    torch.manual_seed(0)
    stock = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    assert torch.equal(model.score.weight, stock.score.weight)
    assert model.config.architectures == ["LlamaForSequenceClassification"]
    assert type(load_model(tmp_path)).__name__ == "LlamaForCausalLM"
