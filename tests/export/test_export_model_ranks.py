"""Exports: every rank writes its part in place, and the result equals what the stock stack would save."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build

HYBRID = {"dp_replicate_size": 2, "dp_shard_size": 2}


def whole_state(trainer):
    """Gather the trained model with torch's own functions, without this package."""
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = trainer.model
    if isinstance(model, FSDP):
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(False, False)):
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}
    full = {}
    for name, tensor in model.state_dict().items():
        full[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def _export(model, data, output, build_keywords, exports):
    """Train; save the gathered state; export once per entry of `exports` (directory name: keyword arguments)."""
    from hf_fsdp_recipes import export_model

    trainer = build(str(model), str(data), str(output), steps=2, **build_keywords)
    trainer.train()
    state = whole_state(trainer)
    for name, keywords in exports.items():
        export_model(trainer.model, output / name, tokenizer=trainer.processing_class, **keywords)
    if trainer.accelerator.is_main_process:
        torch.save(state, output / "state.pt")


def export(model, data, output, *, world_size=2, environment=None, build_keywords=None, exports=None):
    """Return the directory that holds the exports (by default one, named `export`), and the gathered state."""
    arguments = (model, data, output, build_keywords or {}, exports or {"export": {}})
    run_ranks(_export, world_size, *arguments, environment=environment or fsdp_environment(FSDP2))
    return output, torch.load(output / "state.pt", weights_only=True)


def assert_loads_as(directory, state):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert set(loaded) == set(state)
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "world_size", "fsdp", "parallel"),
    [
        ("llama", 1, FSDP2, None),
        ("llama_tied", 2, FSDP2, None),
        ("gpt2", 2, FSDP2, None),
        ("qwen3_moe", 3, FSDP2, None),
        pytest.param("mixtral", 2, FSDP2, None, marks=pytest.mark.slow),
        pytest.param("llama", 4, FSDP2, None, marks=pytest.mark.slow),
        ("llama", 4, FSDP2, HYBRID),
        pytest.param("llama", 2, FSDP1, None, marks=pytest.mark.slow),
        ("qwen3_moe", 3, FSDP1, None),
        pytest.param("llama_tied", 2, FSDP1 | {"fsdp_sharding_strategy": "NO_SHARD"}, None, marks=pytest.mark.slow),
    ],
)
def test_export_loads_as_the_gathered_model(tiny_model, text_file, tmp_path, kind, world_size, fsdp, parallel):
    environment = fsdp_environment(fsdp, parallel)
    output, state = export(tiny_model(kind), text_file, tmp_path, world_size=world_size, environment=environment)
    assert_loads_as(output / "export", state)


EXPORTS = {
    "plain": {},
    "direct": {"method": "direct", "max_shard_size": "20KB"},
    "gather": {"method": "gather", "max_shard_size": "20KB"},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.fixture(scope="module", params=[FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)], ids=["fsdp2", "fsdp1"])
def exported(request, tiny_model, text_file, tmp_path_factory):
    """A directory with EXPORTS of one trained model, and the gathered state."""
    output = tmp_path_factory.mktemp("exports")
    return export(tiny_model("llama"), text_file, output, environment=fsdp_environment(request.param), exports=EXPORTS)


def _export_after_evaluation(model, data, output):
    from hf_fsdp_recipes import export_model

    trainer = build(str(model), str(data), str(output), steps=1, bf16=True, eval_strategy="steps")
    trainer.train()
    trainer.evaluate()  # without a backward pass, FSDP2 leaves the root's parameters gathered in bfloat16
    export_model(trainer.model, output / "export")
    state = whole_state(trainer)
    if trainer.accelerator.is_main_process:
        torch.save(state, output / "state.pt")


def test_export_after_an_evaluation_has_the_weights_that_are_trained(tiny_model, text_file, tmp_path):
    environment = fsdp_environment(FSDP2, precision="bf16")
    run_ranks(_export_after_evaluation, 2, tiny_model("llama"), text_file, tmp_path, environment=environment)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == state.keys()
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32 and torch.equal(exported[name], tensor), name


def test_link_as_a_target_stays_and_its_directory_is_filled(tiny_model, text_file, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "target")
    _, state = export(tiny_model("llama"), text_file, tmp_path, exports={"link": {}})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "target" / "model.safetensors").is_file()
    assert_loads_as(tmp_path / "link", state)


def test_gathering_writes_the_same_bytes_as_writing_in_place(exported):
    directly, gathered = (exported[0] / name for name in ("direct", "gather"))
    files = sorted(file.name for file in directly.iterdir())
    assert files == sorted(file.name for file in gathered.iterdir())
    assert len([name for name in files if name.endswith(".safetensors")]) > 2
    for name in files:
        assert (directly / name).read_bytes() == (gathered / name).read_bytes(), name


def test_files_are_split_as_save_pretrained_splits_them(exported, tmp_path):
    from transformers import AutoModelForCausalLM

    directory = exported[0] / "direct"
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(tmp_path, max_shard_size="20KB")
    ours, stock = (
        {file.name: set(load_file(file)) for file in place.glob("*.safetensors")} for place in (directory, tmp_path)
    )
    assert ours == stock
    index, stock_index = (
        json.loads((place / "model.safetensors.index.json").read_text()) for place in (directory, tmp_path)
    )
    assert index == stock_index


def test_cast_while_writing(exported):
    output, state = exported
    for name, tensor in load_file(output / "bfloat16" / "model.safetensors").items():
        assert torch.equal(tensor, state[name].to(torch.bfloat16)), name
    assert json.loads((output / "bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_config_and_tokenizer_are_written_with_the_weights(exported):
    output, _ = exported
    assert {file.name for file in (output / "plain").iterdir()} == {
        "config.json", "export_manifest.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert sorted(path.name for path in output.glob(".*")) == []


@pytest.mark.parametrize("fsdp", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)])
def test_adapter_and_merged_model_are_pefts_own(tiny_model, text_file, tmp_path, fsdp):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    exports = {"adapter": {}, "merged": {"merge_adapter": True}}
    output, state = export(
        tiny_model("llama"), text_file, tmp_path,
        environment=fsdp_environment(fsdp), build_keywords={"lora": LORA}, exports=exports,
    )  # fmt: skip
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model("llama")), output / "adapter")
    reloaded = model.state_dict()
    trained = {name for name in state if "lora_" in name}
    assert len(trained) == 28
    for name in trained:
        assert torch.equal(reloaded[name], state[name]), name
        assert state[name].abs().sum(dim=1).min() > 0  # no rank's rows are missing
    expected = model.merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(output / "merged").state_dict()
    assert set(ours) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-7)


def adapted(directory, **lora):
    """Return a model with an adapter whose parameters are random."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(directory), LoraConfig(**LORA | lora)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return model


TOKENS = torch.arange(12)[None]


@pytest.mark.parametrize(
    ("lora", "name"),
    [
        ({"target_modules": ["lm_head"]}, "lm_head.weight"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight"),
        ({"modules_to_save": ["embed_tokens"]}, "model.embed_tokens.weight"),
    ],
)
def test_adapter_of_one_of_two_tied_weights_is_not_merged(tiny_model, tmp_path, lora, name):
    from hf_fsdp_recipes import export_checkpoint, export_model
    from hf_fsdp_recipes.errors import ExportError
    from hf_fsdp_recipes.export.from_model import check_export

    model = adapted(tiny_model("llama_tied"), **lora)
    with pytest.raises(ExportError, match=f"cannot merge {name}, which is tied to"):
        check_export(model, tmp_path / "merged", merge_adapter=True)
    adapter = export_model(model, tmp_path / "adapter")
    with pytest.raises(ExportError, match=f"cannot merge {name}, which is tied to"):
        export_checkpoint(adapter, tmp_path / "merged", merge_adapter=True)


def test_trained_copy_of_tied_weights_that_stay_tied_is_exported_and_merged(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes import export_checkpoint, export_model
    from hf_fsdp_recipes.export.load_export import load_export

    model = adapted(tiny_model("llama_tied"), modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    adapter = export_model(model, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "stock")
    assert set(load_file(adapter / "adapter_model.safetensors")) == set(
        load_file(tmp_path / "stock" / "adapter_model.safetensors")
    )
    merged = export_model(model, tmp_path / "merged", merge_adapter=True)
    later = export_checkpoint(adapter, tmp_path / "later", merge_adapter=True)
    expected = model(TOKENS).logits
    for found in (load_export(adapter), *map(AutoModelForCausalLM.from_pretrained, (merged, later))):
        torch.testing.assert_close(found(TOKENS).logits, expected, rtol=0, atol=1e-5)


def test_merge_takes_the_trained_copies_of_the_active_adapter_only(tiny_model, tmp_path):
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes import export_model

    model = adapted(tiny_model("llama"), modules_to_save=["lm_head"])
    model.add_adapter("ref", LoraConfig(**LORA, modules_to_save=["lm_head", "embed_tokens"]))
    for name in ("default", "ref"):
        model.set_adapter(name)
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save[name].weight += 0.1
        merged = AutoModelForCausalLM.from_pretrained(export_model(model, tmp_path / name, merge_adapter=True))
        torch.testing.assert_close(merged(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=1e-5)


def test_two_active_adapters_are_not_exported_as_one(tiny_model, tmp_path):
    from peft import LoraConfig

    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.errors import ExportError

    model = adapted(tiny_model("llama"))
    model.add_adapter("ref", LoraConfig(**LORA))
    model.base_model.set_adapter(["default", "ref"])
    for merge in (False, True):
        with pytest.raises(ExportError, match=r"\['default', 'ref'\] are active"):
            export_model(model, tmp_path / "both", merge_adapter=merge)


def _export_twice(model, data, output):
    from hf_fsdp_recipes import export_model

    trainer = build(str(model), str(data), str(output), steps=1)
    trainer.train()
    export_model(trainer.model, output / "export", max_shard_size="20KB")
    export_model(trainer.model, output / "export")


@pytest.mark.slow
def test_earlier_export_is_replaced_completely(tiny_model, text_file, tmp_path):
    run_ranks(_export_twice, 2, tiny_model("llama"), text_file, tmp_path, environment=fsdp_environment(FSDP2))
    assert [file.name for file in (tmp_path / "export").glob("*.safetensors*")] == ["model.safetensors"]


def _export_into(model, data, output, target):
    from hf_fsdp_recipes import export_model

    trainer = build(str(model), str(data), str(output), steps=1)
    trainer.train()
    export_model(trainer.model, target)


@pytest.mark.slow
def test_directory_that_is_not_an_export_is_not_touched(tiny_model, text_file, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    errors = run_ranks(
        _export_into, 2, tiny_model("llama"), text_file, tmp_path, tmp_path / "mine",
        environment=fsdp_environment(FSDP2), expect_failure=True,
    )  # fmt: skip
    assert errors[0] == errors[1]
    assert errors[0][0] == "ExportError"
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_full_disk_leaves_nothing_under_the_final_name(tiny_model, text_file, tmp_path):
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        errors = run_ranks(
            _export_into, 2, tiny_model("llama"), text_file, tmp_path, disk / "export",
            environment=fsdp_environment(FSDP2), expect_failure=True,
        )  # fmt: skip
        assert errors[0] == errors[1]
        assert errors[0][0] == "ExportError"
        assert "free" in errors[0][1]
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _die_while_exporting(model, data, output):
    import signal

    from hf_fsdp_recipes import ShardedCheckpointCallback, export_model
    from hf_fsdp_recipes.export import write_export

    callback = ShardedCheckpointCallback()
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = build(str(model), str(data), str(output), steps=2, callbacks=[callback], **saving)
    trainer.train()
    write, written = write_export.FileWriter.write, []

    def write_some_then_die(self, *arguments):
        write(self, *arguments)
        written.append(arguments[0])
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    write_export.FileWriter.write = write_some_then_die
    export_model(trainer.model, output / "export")


def test_kill_during_export_leaves_the_checkpoint_and_no_export(tiny_model, text_file, tmp_path):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.checkpointing import layout

    with pytest.raises(pytest.fail.Exception, match=r"killed at the timeout|exit code -9"):
        run_ranks(
            _die_while_exporting,
            2,
            tiny_model("llama"),
            text_file,
            tmp_path,
            environment=fsdp_environment(FSDP2),
            timeout_seconds=60,
        )
    assert (tmp_path / ".export.export").is_dir()  # the rank died in the middle of the export
    assert not (tmp_path / "export").exists()
    [checkpoint] = layout.list_checkpoints(tmp_path, verify=True)
    assert checkpoint.is_complete
    exported = export_checkpoint(checkpoint.path, tmp_path / "export", base_model=tiny_model("llama"))
    assert (
        load_file(exported / "model.safetensors").keys() == load_file(tiny_model("llama") / "model.safetensors").keys()
    )
    assert not (tmp_path / ".export.export").exists()  # the next export removes the incomplete one
