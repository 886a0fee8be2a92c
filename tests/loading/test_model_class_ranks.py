"""Models of every supported class load, train, resume and export as the class that their checkpoint declares."""

import functools
import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.conftest import make_tokenizer, tiny_config
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, printed_by, run_ranks

TEXT = {
    "vocab_size": 307,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


def class_and_config(kind):
    """Return a model class and the config of a tiny model of it."""
    import transformers

    if kind == "reward":
        return transformers.LlamaForSequenceClassification, with_fields(tiny_config("llama"), num_labels=1)
    if kind == "tokens":
        return transformers.LlamaForTokenClassification, with_fields(tiny_config("llama_tied"), num_labels=5)
    if kind == "causal":
        return transformers.LlamaForCausalLM, tiny_config("llama_tied")
    if kind == "qwen2_5_vl":
        vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        tokens = {
            "image_token_id": 300,
            "video_token_id": 301,
            "vision_start_token_id": 302,
            "vision_end_token_id": 303,
        }
        config = transformers.Qwen2_5_VLConfig(
            text_config=TEXT | {"rope_parameters": rope},
            vision_config=vision | {"fullatt_block_indexes": [1], "patch_size": 4},
            **tokens,
        )
        return transformers.Qwen2_5_VLForConditionalGeneration, config
    if kind == "qwen3_5":
        layers = ["linear_attention", "full_attention"]
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
        config = transformers.Qwen3_5Config(
            text_config=TEXT | linear | {"linear_value_head_dim": 8, "head_dim": 16, "layer_types": layers},
            vision_config=vision | {"patch_size": 4, "num_position_embeddings": 16},
            image_token_id=300,
            video_token_id=301,
        )
        return transformers.Qwen3_5ForConditionalGeneration, config
    assert kind == "gemma3"
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=TEXT | {"head_dim": 8},
        vision_config=vision | {"image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=300,
    )
    return transformers.Gemma3ForConditionalGeneration, config


def with_fields(config, **fields):
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Return a function that makes (once) the directory of a tiny model of a kind, with tokenizer and processor files."""
    made = {}

    def make(kind):
        if kind not in made:
            directory = tmp_path_factory.mktemp(kind)
            model_class, config = class_and_config(kind)
            torch.manual_seed(0)
            model_class(config).save_pretrained(directory)
            make_tokenizer(directory)
            if config.get_text_config() is not config:
                (directory / "preprocessor_config.json").write_text('{"size": 4}')
                (directory / "processor_config.json").write_text('{"processor_class": "Qwen2_5_VLProcessor"}')
            made[kind] = directory
        return made[kind]

    return make


def rows_for(model):
    """Return training rows with labels for the model's loss."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(8):
        ids = torch.randint(3, 290, (12,), generator=generator)
        labels = {"SequenceClassification": number / 8, "TokenClassification": (ids % 5).tolist()}
        label = next((value for name, value in labels.items() if name in type(model).__name__), ids.tolist())
        rows.append({"input_ids": ids.tolist(), "attention_mask": [1] * 12, "labels": label})
    return rows


def _train(directory, output, loader="rank0", resume=None, lora=None, exports=None, auto_class=None, fields=None):
    """Train 3 steps with a save after each, write the gathered state to state.pt, export, and return the losses."""
    from hf_fsdp_recipes.patches import cpu_ranks

    cpu_ranks.enable()
    import transformers
    from transformers import Trainer, TrainingArguments, set_seed

    from hf_fsdp_recipes import ShardedCheckpointCallback, export_model, load_model
    from hf_fsdp_recipes.export.verify_logits import check_logits
    from tests.export.test_export_model_ranks import whole_state

    set_seed(3 if loader == "stock" else 3 + 10 * int(os.environ["RANK"]))  # all ranks must get rank 0's new head
    if loader == "stock":
        declared = auto_class or json.loads((directory / "config.json").read_text())["architectures"][0]
        model = getattr(transformers, declared).from_pretrained(directory, **(fields or {}))
    else:
        model = load_model(directory, source=loader, auto_class=auto_class, **(fields or {}))
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**lora))
    args = TrainingArguments(
        output, max_steps=3, save_strategy="no" if loader == "stock" else "steps", save_steps=1, logging_steps=1,
        per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=1e-2,
        dataloader_pin_memory=False,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    callbacks = [] if loader == "stock" else [ShardedCheckpointCallback()]
    trainer = Trainer(model, args, train_dataset=rows_for(model), callbacks=callbacks, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    state = whole_state(trainer)
    for name, keywords in (exports or {}).items():
        export = export_model(trainer.model, output / name, tokenizer=tokenizer, **keywords)
        check_logits(trainer.model, export, tokenizer)
    if trainer.accelerator.is_main_process:
        torch.save(state, output / "state.pt")
    return losses


def train(*arguments, fsdp=FSDP2, **keywords):
    return run_ranks(_call, 2, arguments, keywords, environment=fsdp_environment(fsdp), timeout_seconds=200)


def _call(arguments, keywords):
    return _train(*arguments, **keywords)


def stored_keys(directory):
    return {key for file in directory.glob("*.safetensors") for key in safe_open(file, "pt").keys()}  # noqa: SIM118


def declared(directory):
    return json.loads((directory / "config.json").read_text())["architectures"]


@pytest.mark.parametrize(
    "kind",
    [
        "reward",
        pytest.param("tokens", marks=pytest.mark.slow),
        "qwen2_5_vl",
        "gemma3",
        pytest.param("qwen3_5", marks=pytest.mark.slow),
    ],
)
def test_class_loads_trains_resumes_and_exports_as_declared(model_of, tmp_path, kind):
    import transformers

    from hf_fsdp_recipes import export_checkpoint

    source = model_of(kind)
    # Gemma 3's vision tower lists layer classes that it does not have: Accelerate refuses them, load_model omits them.
    wrapped = FSDP2 | {"fsdp_transformer_layer_cls_to_wrap": "SiglipEncoderLayer,Gemma3DecoderLayer"}
    stock = train(source, tmp_path / "stock", loader="stock", fsdp=wrapped if kind == "gemma3" else FSDP2)
    losses = train(source, tmp_path / "ours", exports={"export": {}})
    assert losses == stock
    assert train(source, tmp_path / "resumed", resume=tmp_path / "ours" / "checkpoint-1") == losses
    state, again = (torch.load(tmp_path / name / "state.pt") for name in ("ours", "resumed"))
    offline = export_checkpoint(tmp_path / "ours" / "checkpoint-3", tmp_path / "offline")
    for export in (tmp_path / "ours" / "export", offline):
        assert declared(export) == declared(source)
        assert stored_keys(export) == stored_keys(source)
        for file in source.glob("*processor_config.json"):
            assert (export / file.name).read_bytes() == file.read_bytes()
        loaded = getattr(transformers, declared(source)[0]).from_pretrained(export).state_dict()
        for name, tensor in loaded.items():
            assert torch.equal(tensor, state[name]), name
            assert torch.equal(tensor, again[name]), name


HEAD = {"auto_class": "AutoModelForSequenceClassification", "fields": {"num_labels": 1}}


@pytest.mark.parametrize("loader", ["rank0", pytest.param("direct", marks=pytest.mark.slow)])
def test_reward_model_starts_from_a_causal_model_with_stock_loadings_head(model_of, tmp_path, loader):
    source = model_of("causal")
    stock = train(
        source, tmp_path / "stock", loader="stock", **(HEAD | {"auto_class": "LlamaForSequenceClassification"})
    )
    losses = train(source, tmp_path / "ours", loader=loader, exports={"export": {}}, **HEAD)
    assert losses == stock
    assert declared(tmp_path / "ours" / "export") == ["LlamaForSequenceClassification"]
    assert "score.weight" in stored_keys(tmp_path / "ours" / "export")


@pytest.mark.slow
def test_image_text_model_resumes_under_fsdp1(model_of, tmp_path):
    source = model_of("qwen2_5_vl")
    losses = train(source, tmp_path / "run", fsdp=FSDP1, exports={"export": {}})
    assert train(source, tmp_path / "resumed", fsdp=FSDP1, resume=tmp_path / "run" / "checkpoint-1") == losses
    assert stored_keys(tmp_path / "run" / "export") == stored_keys(source)


def _print_loading(directory, keywords):
    from hf_fsdp_recipes import load_model

    return printed_by(functools.partial(load_model, directory, **keywords))


def load(directory, expect_failure=False, **keywords):
    environment = fsdp_environment(FSDP2)
    return run_ranks(_print_loading, 2, directory, keywords, environment=environment, expect_failure=expect_failure)


def test_new_head_is_named_and_other_missing_weights_are_refused(model_of, tmp_path):
    from safetensors.torch import save_file

    keywords = {"auto_class": "AutoModelForSequenceClassification", "num_labels": 1}
    assert (
        "without score.weight, so LlamaForSequenceClassification starts with a new head"
        in load(model_of("causal"), **keywords)[0]
    )
    assert "its head is reused for the labels LABEL_0" in load(model_of("reward"))[0]
    source = copy_of(model_of("causal"), tmp_path / "damaged")
    weights = load_file(source / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    errors = load(source, expect_failure=True, **keywords)
    assert errors[0] == errors[1]
    assert "lacks 1 of the model's parameters and buffers: model.norm.weight" in errors[0][1]
    source = copy_of(model_of("reward"), tmp_path / "headless")
    weights = load_file(source / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    assert "score.weight" in load(source, expect_failure=True)[0][1]


def copy_of(source, target):
    shutil.copytree(source, target)
    return target


@pytest.mark.parametrize("fsdp", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)], ids=["fsdp2", "fsdp1"])
def test_lora_reward_model_exports_its_head(model_of, tmp_path, fsdp):
    from transformers import AutoModelForSequenceClassification

    from hf_fsdp_recipes import export_checkpoint

    source, output = model_of("causal"), tmp_path / "run"
    exports = {"adapter": {}, "merged": {"merge_adapter": True}}
    labels = {"id2label": {0: "quality"}, "label2id": {"quality": 0}}
    head = HEAD | {"fields": HEAD["fields"] | labels, "lora": LORA | {"task_type": "SEQ_CLS"}}
    losses = train(source, output, fsdp=fsdp, exports=exports, **head)
    assert train(source, tmp_path / "resumed", fsdp=fsdp, resume=output / "checkpoint-1", **head) == losses
    stored = load_file(output / "adapter" / "adapter_model.safetensors")
    assert stored["base_model.model.score.weight"].shape == (1, 32)
    merged = [output / "merged", tmp_path / "offline", tmp_path / "from_adapter"]
    export_checkpoint(output / "checkpoint-3", merged[1], merge_adapter=True)
    export_checkpoint(output / "adapter", merged[2], merge_adapter=True)
    for directory in merged:
        assert declared(directory) == ["LlamaForSequenceClassification"]
        model = AutoModelForSequenceClassification.from_pretrained(directory)
        assert torch.equal(model.score.weight, stored["base_model.model.score.weight"])
        assert {name: getattr(model.config, name) for name in labels} == labels


def test_text_part_of_a_model_is_loaded_only_if_asked_for(model_of, tmp_path):
    source = model_of("qwen3_5")
    train(source, tmp_path / "run", auto_class="AutoModelForCausalLM", exports={"export": {}})
    assert declared(tmp_path / "run" / "export") == ["Qwen3_5ForCausalLM"]
    assert not list((tmp_path / "run" / "export").glob("*processor*"))
    printed = load(source, auto_class="AutoModelForCausalLM")[0]
    assert "the other parts are not loaded, and the export will be a text-only model" in printed
    undeclared = copy_of(source, tmp_path / "undeclared")
    config = json.loads((undeclared / "config.json").read_text()) | {"architectures": ["MyQwen"]}
    (undeclared / "config.json").write_text(json.dumps(config))
    errors = load(undeclared, expect_failure=True)
    assert errors[0] == errors[1]
    assert (
        "Qwen3_5ForCausalLM is only the text part of a qwen3_5 model, whose config.json declares MyQwen" in errors[0][1]
    )


def test_image_text_model_trains_with_lora_and_generates(model_of, tmp_path):
    from hf_fsdp_recipes.export.generate import generate

    source = model_of("qwen2_5_vl")
    lora = LORA | {"task_type": "CAUSAL_LM", "target_modules": r".*language_model.*(q_proj|v_proj)"}
    train(source, tmp_path / "run", lora=lora, exports={"adapter": {}, "merged": {"merge_adapter": True}})
    assert stored_keys(tmp_path / "run" / "merged") == stored_keys(source)
    (tmp_path / "prompt.txt").write_text("The big fox")
    texts = {
        generate(tmp_path / "run" / name, tmp_path / "prompt.txt", max_new_tokens=4) for name in ("adapter", "merged")
    }
    assert len(texts) == 1
