"""Offline export: any sharded checkpoint becomes a model directory."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpointing.test_save_ranks import train
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build

PARTS = ("model.safetensors", "adapter_model.safetensors")


def _export_live(model, data, output, keywords):
    """Train, save a checkpoint and export at the same step."""
    from hf_fsdp_recipes import ShardedCheckpointCallback, export_model

    callback = ShardedCheckpointCallback()
    trainer = build(
        str(model),
        str(data),
        str(output),
        steps=2,
        save_strategy="steps",
        save_steps=2,
        callbacks=[callback],
        **keywords,
    )
    trainer.train()
    export_model(trainer.model, output / "live", tokenizer=trainer.processing_class)
    if keywords.get("lora"):
        export_model(trainer.model, output / "live_merged", tokenizer=trainer.processing_class, merge_adapter=True)


def _export_offline(checkpoint, output, keywords):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.loading.load_model import _prepare_process

    _prepare_process()
    export_checkpoint(checkpoint, output, **keywords)


def same_tensors(one, other):
    (first,), (second,) = (
        [load_file(place / name) for name in PARTS if (place / name).is_file()] for place in (one, other)
    )
    assert set(first) == set(second)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("kind", "fsdp", "world_size", "processes"),
    [
        pytest.param("llama_tied", FSDP2, 2, 1, marks=pytest.mark.slow),
        ("qwen3_moe", FSDP2, 3, 2),
        pytest.param("gpt2", FSDP1, 2, 1, marks=pytest.mark.slow),
        ("llama", FSDP1, 3, 3),
    ],
)
def test_checkpoint_exports_what_the_running_model_exports(
    tiny_model, text_file, tmp_path, kind, fsdp, world_size, processes
):
    run_ranks(_export_live, world_size, tiny_model(kind), text_file, tmp_path, {}, environment=fsdp_environment(fsdp))
    run_ranks(
        _export_offline,
        processes,
        tmp_path / "checkpoint-2",
        tmp_path / "offline",
        {},
        environment={"ACCELERATE_USE_FSDP": "false"},
    )
    assert same_tensors(tmp_path / "live", tmp_path / "offline")
    assert (tmp_path / "offline" / "tokenizer.json").is_file()


@pytest.mark.parametrize("fsdp", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)])
def test_lora_checkpoint_exports_adapter_and_merged_model(tiny_model, text_file, tmp_path, fsdp):
    run_ranks(
        _export_live, 2, tiny_model("llama"), text_file, tmp_path, {"lora": LORA}, environment=fsdp_environment(fsdp)
    )
    for name, keywords in (("offline", {}), ("offline_merged", {"merge_adapter": True})):
        run_ranks(
            _export_offline,
            1,
            tmp_path / "checkpoint-2",
            tmp_path / name,
            keywords,
            environment={"ACCELERATE_USE_FSDP": "false"},
        )
    assert same_tensors(tmp_path / "live", tmp_path / "offline")
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("live", "offline")]
    assert {k: sorted(v) if isinstance(v, list) else v for k, v in configs[0].items()} == {
        k: sorted(v) if isinstance(v, list) else v for k, v in configs[1].items()
    }
    merged = [load_file(tmp_path / name / "model.safetensors") for name in ("live_merged", "offline_merged")]
    for name, tensor in merged[0].items():
        torch.testing.assert_close(merged[1][name], tensor, rtol=0, atol=1e-7)


def test_merged_dora_is_pefts_own(tiny_model, text_file, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes import export_checkpoint

    dora = {"lora": LORA | {"use_dora": True}}
    run_ranks(_export_live, 2, tiny_model("llama"), text_file, tmp_path, dora, environment=fsdp_environment(FSDP2))
    for source in ("checkpoint-2", "live"):
        export_checkpoint(tmp_path / source, tmp_path / f"{source}_merged", merge_adapter=True)
    base = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expected = PeftModel.from_pretrained(base, tmp_path / "live").merge_and_unload().state_dict()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in expected.items() if "_proj.weight" in name)
    for name in ("live_merged", "checkpoint-2_merged"):
        merged = load_file(tmp_path / name / "model.safetensors")
        assert set(merged) == set(expected)
        for key, tensor in expected.items():
            torch.testing.assert_close(merged[key], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("q_proj.lora_A.default.weight", "q_proj.lora_A.weight"),
        ("embed_tokens.lora_embedding_A.default", "embed_tokens.lora_embedding_A"),
        ("k_proj.ia3_l.default", "k_proj.ia3_l"),
        (
            "embed_tokens.token_adapter.trainable_tokens_delta.default",
            "embed_tokens.token_adapter.trainable_tokens_delta",
        ),
        ("score.modules_to_save.default.weight", "score.weight"),
    ],
)
def test_names_in_files_do_not_hold_the_adapters_name(name, stored):
    from hf_fsdp_recipes.parameter_names import adapter_of, without_adapter_name

    prefix = "base_model.model.model."
    assert without_adapter_name(prefix + name, "default") == prefix + stored
    assert adapter_of(prefix + name) == "default" and adapter_of(prefix + "q_proj.base_layer.weight") is None


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_that_changed_the_base_are_not_merged_into_its_files(start):
    from peft import LoraConfig

    from hf_fsdp_recipes.errors import ExportError
    from hf_fsdp_recipes.export.lora_merge import StoredAdapter

    config = LoraConfig(init_lora_weights=start)
    with pytest.raises(ExportError, match=f"initialized with {start}, which changes the base weights"):
        StoredAdapter(config, {}, None)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_exports_of_a_model_whose_base_was_changed_are_right(start, tiny_model, tmp_path):
    """The exported adapter's config makes PEFT change the base model again; the merged export has the trained weights."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes import export_model

    config = LoraConfig(**LORA, init_lora_weights=start)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model("llama")), config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.05 * torch.randn_like(parameter)
        tokens = torch.arange(12)[None]
        expected = model(tokens).logits
        export_model(model, tmp_path / "adapter")
        export_model(model, tmp_path / "merged", merge_adapter=True)
        loaded = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tiny_model("llama")), tmp_path / "adapter"
        )
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        for found in (loaded, merged):
            torch.testing.assert_close(found.eval()(tokens).logits, expected, rtol=0, atol=1e-5)


def test_changed_base_model_of_a_merge_is_one_error_on_every_process(tiny_model, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes.export.export_directory import write_marker

    base = shutil.copytree(tiny_model("llama"), tmp_path / "base")
    write_marker(base, [])  # makes the copy an export
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**LORA))
    model.save_pretrained(tmp_path / "adapter")
    merge = (_export_offline, 2, tmp_path / "adapter", tmp_path / "merged", {"merge_adapter": True})
    environment = {"ACCELERATE_USE_FSDP": "false"}
    run_ranks(*merge, environment=environment)
    assert same_tensors(base, tmp_path / "merged")  # a new adapter changes nothing
    shutil.rmtree(tmp_path / "merged")
    weights = bytearray((base / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (base / "model.safetensors").write_bytes(weights)
    errors = run_ranks(*merge, environment=environment, expect_failure=True)
    assert errors[0] == errors[1]
    assert errors[0][0] == "ExportError"
    assert "base/model.safetensors differs from its checksum" in errors[0][1]
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


def _stock_save(model, data, output):
    trainer = build(str(model), str(data), str(output), loader="stock", steps=2, save_strategy="steps", save_steps=2)
    trainer.train()


def test_checkpoint_of_a_stock_trainer_exports_with_its_base_model_named(tiny_model, text_file, tmp_path):
    from transformers import AutoModelForCausalLM

    run_ranks(_stock_save, 2, tiny_model("llama"), text_file, tmp_path, environment=fsdp_environment(FSDP2))
    arguments = (tmp_path / "checkpoint-2", tmp_path / "offline")
    no_fsdp = {"ACCELERATE_USE_FSDP": "false"}
    errors = run_ranks(_export_offline, 1, *arguments, {}, environment=no_fsdp, expect_failure=True)
    assert errors[0][0] == "ExportError" and "Pass base_model" in errors[0][1]
    run_ranks(_export_offline, 1, *arguments, {"base_model": str(tiny_model("llama"))}, environment=no_fsdp)
    AutoModelForCausalLM.from_pretrained(tmp_path / "offline")


@pytest.fixture(scope="module")
def trained(tiny_model, text_file, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained")
    train(tiny_model("llama"), text_file, output, steps=2, save_steps=2)
    return output


@pytest.fixture
def checkpoint(trained, tmp_path):
    """Return a copy of checkpoint-2 that a test may damage."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "checkpoint-2"


def _file(checkpoint):
    return checkpoint / "pytorch_model_fsdp_0" / "__1_0.distcp"


def _metadata(checkpoint):
    return checkpoint / "pytorch_model_fsdp_0" / ".metadata"


def _flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _without_manifest(checkpoint, damage):
    (checkpoint / "manifest.json").unlink()
    damage()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: _file(c).unlink(), r"__1_0\.distcp is missing"),
        (
            lambda c: _file(c).write_bytes(_file(c).read_bytes()[:-100]),
            r"__1_0\.distcp is missing or does not have the [\d,]+ bytes that manifest\.json lists",
        ),
        (lambda c: _flip(_file(c)), r"__1_0\.distcp has changed"),
        (lambda c: _flip(c / "config.json"), r"config\.json has changed"),
        (
            lambda c: (c / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"nonsense"),
            r"\.metadata is missing or does not have",
        ),
        (lambda c: _without_manifest(c, _file(c).unlink), r"__1_0\.distcp is missing"),
        (lambda c: _without_manifest(c, lambda: os.truncate(_file(c), 5000)), r"__1_0\.distcp is truncated"),
        (lambda c: _without_manifest(c, lambda: _metadata(c).write_bytes(b"nonsense")), "cannot be read"),
        (lambda c: shutil.rmtree(c / "pytorch_model_fsdp_0"), "no sharded model"),
    ],
)
def test_damaged_checkpoint_is_one_error_and_no_export(checkpoint, tmp_path, damage, words):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    damage(checkpoint)
    with pytest.raises(ExportError, match=words):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("name", [".", "../../link"])
def test_models_directory_is_verified_under_another_name(checkpoint, tmp_path, monkeypatch, name):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    _flip(_file(checkpoint))
    (tmp_path / "link").symlink_to(checkpoint / "pytorch_model_fsdp_0")
    monkeypatch.chdir(checkpoint / "pytorch_model_fsdp_0")
    with pytest.raises(ExportError, match=r"__1_0\.distcp has changed"):
        export_checkpoint(name, tmp_path / "out")


def test_checkpoint_is_not_exported_onto_itself_or_another_model(checkpoint, tiny_model, tmp_path):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    shutil.copytree(tiny_model("llama"), tmp_path / "my_model")
    before = sorted(tmp_path.rglob("*"))
    for target in (checkpoint, tmp_path, tmp_path / "my_model"):
        with pytest.raises(ExportError):
            export_checkpoint(checkpoint, target)
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoint_of_another_model_is_refused(checkpoint, tiny_model, tmp_path):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    with pytest.raises(ExportError, match="does not match"):
        export_checkpoint(checkpoint, tmp_path / "out", base_model=tiny_model("gpt2"))


def test_plain_folder_of_distcp_files_with_train_params_is_exported(checkpoint, tiny_model, tmp_path):
    """The layout of the ROCm article: __0_0.distcp, .metadata and train_params.yaml in one folder."""
    from typer.testing import CliRunner

    from hf_fsdp_recipes.cli import app

    folder = tmp_path / "fine-tuned"
    shutil.copytree(checkpoint / "pytorch_model_fsdp_0", folder)
    (folder / "train_params.yaml").write_text("model_name: ./somewhere\n")
    arguments = [
        "export",
        str(folder),
        str(tmp_path / "out"),
        "--base-model",
        str(tiny_model("llama")),
        "--dtype",
        "bfloat16",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The big fox")
    for extra in ([], ["--chat", "--system", "Be brief."]):
        result = CliRunner().invoke(
            app, ["generate", str(tmp_path / "out"), "--prompt-file", str(prompt), "--max-new-tokens", "4", *extra]
        )
        assert result.exit_code == 0, result.exception


def test_head_of_its_own_is_not_lost_to_a_base_model_with_a_tied_head(checkpoint, tiny_model, tmp_path):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    base = shutil.copytree(tiny_model("llama"), tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ExportError, match=r"has a lm_head\.weight of its own"):
        export_checkpoint(checkpoint, tmp_path / "out", base_model=base)


def test_checkpoint_and_its_export_keep_several_chat_templates(checkpoint, tmp_path):
    from transformers import AutoTokenizer

    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.export import model_assets

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "chat_template.jinja").unlink()
    for name, content in model_assets.collect(torch.nn.Module(), tokenizer).items():
        (checkpoint / name).write_bytes(content)
    for place in (checkpoint, export_checkpoint(checkpoint, tmp_path / "out")):
        assert AutoTokenizer.from_pretrained(place).chat_template == tokenizer.chat_template
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").is_file()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_command_in_the_environment_of_a_launcher_exports_everything(checkpoint, tmp_path, monkeypatch, rank):
    """In a Kubernetes pod of a PyTorchJob, every command has the variables of the job's ranks."""
    from typer.testing import CliRunner

    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.cli import app

    export_checkpoint(checkpoint, tmp_path / "expected")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    result = CliRunner().invoke(app, ["export", str(checkpoint), str(tmp_path / "out")])
    assert result.exit_code == 0, result.exception
    assert same_tensors(tmp_path / "expected", tmp_path / "out")
    assert (os.environ["WORLD_SIZE"], os.environ["RANK"]) == ("2", rank)


def _grow_and_save(model, data, output):
    from hf_fsdp_recipes import ShardedCheckpointCallback, export_model

    saving = {"save_strategy": "steps", "save_steps": 2, "callbacks": [ShardedCheckpointCallback()]}
    trainer = build(str(model), str(data), str(output), steps=2, prepare=("resize", 330), **saving)
    trainer.processing_class.add_tokens(["<|prompter|>"], special_tokens=True)
    trainer.processing_class.chat_template = "{{ messages[0]['content'] }}"
    trainer.train()
    export_model(trainer.model, output / "export", tokenizer=trainer.processing_class)


def test_checkpoint_with_grown_embeddings_exports_without_a_base_model(tiny_model, text_file, tmp_path):
    from transformers import AutoTokenizer

    from hf_fsdp_recipes import export_checkpoint

    run_ranks(_grow_and_save, 2, tiny_model("llama"), text_file, tmp_path, environment=fsdp_environment(FSDP2))
    exported = export_checkpoint(tmp_path / "checkpoint-2", tmp_path / "offline")
    expected = load_file(tmp_path / "export" / "model.safetensors")
    actual = load_file(exported / "model.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert actual["model.embed_tokens.weight"].shape[0] == 330
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert "<|prompter|>" in tokenizer.get_vocab()
