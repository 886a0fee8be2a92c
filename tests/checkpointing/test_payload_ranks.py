"""No file of a checkpoint or an export runs code, whether it is resumed from, exported or loaded."""

import json
import pickle
import shutil

import pytest
import torch

from hf_fsdp_recipes import export_checkpoint
from hf_fsdp_recipes.errors import ExportError
from tests.checkpointing.payload import Payload, put_into_values
from tests.checkpointing.test_save_ranks import train
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build

VALUES = "values of the optimizer"  # a payload in a .distcp file that .metadata points to
HARMLESS = {
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "training_args.bin",
}  # a resume does not read these files


def names_in(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def attacked(source, target, name, mark):
    """Copy a directory and put a payload into one file; remove the manifest, which an attacker could rewrite."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    (target / "manifest.json").unlink(missing_ok=True)
    if name == VALUES:
        directory = target / "optimizer_0"
        with (directory / ".metadata").open("rb") as stream:
            names = pickle.load(stream).state_dict_metadata
        put_into_values(directory, next(n for n in names if n.endswith(".lr")), Payload(mark))
    elif name.endswith((".pt", ".pth", ".bin")):
        torch.save(Payload(mark), target / name)
    elif name.endswith(".yaml"):
        (target / name).write_text(f'!!python/object/apply:builtins.open ["{mark}", "w"]\n')
    elif name.endswith(".jinja"):
        (target / name).write_text("{{ cycler.__init__.__globals__.__builtins__.open('" + str(mark) + "', 'w') }}")
    else:
        (target / name).write_bytes(pickle.dumps(Payload(mark)))
    return target


def _resume_each(model, data, source, scratch, names, keywords=None):
    """Resume one copy of the checkpoint per attacked file; return {file: (error class, text)}."""
    import os

    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.checkpointing.resume import keep_global_batch
    from hf_fsdp_recipes.distributed import barrier, sync_errors

    outcomes = {}
    for number, name in enumerate(names):
        output = scratch / str(number)
        checkpoint = output / "checkpoint-2"
        trainer = build(
            str(model), str(data), str(output), steps=3, save_strategy="steps", save_steps=9,
            callbacks=[ShardedCheckpointCallback()], **(keywords or {}),
        )  # fmt: skip
        if os.environ["RANK"] == "0":
            attacked(source, checkpoint, name, scratch / f"ran {name.replace('/', ' ')}")
        barrier()
        try:
            with sync_errors():
                keep_global_batch(trainer.args, checkpoint)
            trainer.train(resume_from_checkpoint=str(checkpoint))
            outcomes[name] = ("", "")
        except Exception as error:
            outcomes[name] = (type(error).__name__, str(error))
        barrier()
    return outcomes


def _check_outcomes(results, names, scratch):
    assert list(scratch.glob("ran*")) == []
    for outcomes in results:
        refused = {name for name, (kind, _) in outcomes.items() if kind == "CheckpointError"}
        assert {name: outcome for name, outcome in outcomes.items() if name not in refused and outcome[0]} == {}
        assert set(names) - refused <= HARMLESS


@pytest.mark.parametrize("fsdp", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)], ids=["FSDP2", "FSDP1"])
def test_resuming_never_runs_code(run, tiny_model, text_file, tmp_path, fsdp):
    if fsdp is FSDP1:
        run = tmp_path / "source"
        train(tiny_model("llama"), text_file, run, environment=fsdp_environment(FSDP1), steps=2, save_steps=2)
    names = [name for name in names_in(run / "checkpoint-2") if name != "manifest.json"] + [VALUES, "scaler.pt"]
    results = run_ranks(
        _resume_each, 2, tiny_model("llama"), text_file, run / "checkpoint-2", tmp_path, names,
        environment=fsdp_environment(fsdp), timeout_seconds=280,
    )  # fmt: skip
    _check_outcomes(results, names, tmp_path)


UNSHARDED = {"loader": "stock"}


def _train_without_fsdp(model, data, output):
    from hf_fsdp_recipes import ShardedCheckpointCallback

    keywords = UNSHARDED | {"steps": 2, "save_strategy": "steps", "save_steps": 2}
    build(str(model), str(data), str(output), callbacks=[ShardedCheckpointCallback()], **keywords).train()


def test_resuming_without_fsdp_never_runs_code(tiny_model, text_file, tmp_path):
    environment = {"ACCELERATE_USE_CPU": "true"}
    arguments = (tiny_model("llama"), text_file)
    source = tmp_path / "source" / "checkpoint-2"
    run_ranks(_train_without_fsdp, 1, *arguments, source.parent, environment=environment)
    names = [name for name in names_in(source) if name != "manifest.json"] + ["scaler.pt"]
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"} <= set(names)
    results = run_ranks(
        _resume_each, 1, *arguments, source, tmp_path, names, UNSHARDED, environment=environment, timeout_seconds=200
    )
    _check_outcomes(results, names, tmp_path)


def test_exporting_a_checkpoint_never_runs_code(run, tiny_model, tmp_path):
    expected = export_checkpoint(run / "checkpoint-2", tmp_path / "expected", base_model=tiny_model("llama"))
    refused = set()
    for name in [name for name in names_in(run / "checkpoint-2") if name != "manifest.json"] + [VALUES]:
        checkpoint = attacked(run / "checkpoint-2", tmp_path / "attacked", name, tmp_path / "ran")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        try:
            export_checkpoint(checkpoint, tmp_path / "out")
        except ExportError as error:
            refused.add(name)
            assert "Traceback" not in str(error)
        else:
            same = [(place / "model.safetensors").read_bytes() for place in (expected, tmp_path / "out")]
            assert same[0] == same[1], name
        assert not (tmp_path / "ran").exists(), name
    assert {"pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "config.json"} <= refused


def test_loading_an_export_never_runs_code(run, tmp_path):
    from hf_fsdp_recipes.export.generate import generate

    (tmp_path / "prompt.txt").write_text("The big fox")
    for name in names_in(run / "export"):
        export = attacked(run / "export", tmp_path / "attacked", name, tmp_path / "ran")
        for chat in (False, True):
            try:
                generate(export, tmp_path / "prompt.txt", chat=chat, max_new_tokens=1)
            except ExportError as error:
                assert str(export) in str(error)
        assert not (tmp_path / "ran").exists(), name


CODE = "open({mark!r}, 'w')\nfrom transformers import LlamaConfig, LlamaForCausalLM\nclass C(LlamaConfig): pass\n"


def with_own_code(directory, mark):
    """Make the model, tokenizer and generation configs refer to code in the directory."""
    for name in ("own.py", "custom_generate/generate.py"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(CODE.format(mark=str(mark)))
    references = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.C", "AutoTokenizer": ["own.C", "own.C"]}
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((directory / name).read_text()) | {"auto_map": references, "model_type": "own"}
        (directory / name).write_text(json.dumps(content | {"tokenizer_class": "C"}))


def test_own_code_of_a_model_neither_runs_nor_waits_for_an_answer(run, tiny_model, tmp_path, monkeypatch):
    from hf_fsdp_recipes.export.generate import generate
    from hf_fsdp_recipes.export.load_export import load_export

    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail(f"waited for an answer: {prompt}"))
    (tmp_path / "prompt.txt").write_text("The big fox")
    export = shutil.copytree(run / "export", tmp_path / "export")
    checkpoint = shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")
    for directory in (export, checkpoint):
        with_own_code(directory, tmp_path / "ran")
    for marker in (export / "export_manifest.json", checkpoint / "manifest.json"):
        marker.unlink()  # otherwise the changed config would be refused first
    for work in (
        lambda: load_export(export),
        lambda: generate(export, tmp_path / "prompt.txt"),
        lambda: export_checkpoint(checkpoint, tmp_path / "out"),
    ):
        with pytest.raises(ExportError, match="custom code"):
            work()
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def lora_run(tiny_model, text_file, tmp_path_factory):
    output = tmp_path_factory.mktemp("lora")
    keywords = {"steps": 2, "save_steps": 2, "lora": LORA, "callback": {"export_dir": output / "export"}}
    train(tiny_model("llama"), text_file, output, **keywords)
    return output


def test_loading_an_adapter_never_runs_code(lora_run, tiny_model, tmp_path):
    from hf_fsdp_recipes.export.load_export import load_export

    for name in [*names_in(lora_run / "export"), "adapter_model.bin"]:
        export = attacked(lora_run / "export", tmp_path / "attacked", name, tmp_path / "ran")
        if name == "adapter_model.bin":
            (export / "adapter_model.safetensors").unlink()
        for work in (
            lambda export=export: load_export(export),
            lambda export=export: export_checkpoint(export, tmp_path / "out", merge_adapter=True),
        ):
            try:
                work()
            except ExportError as error:
                assert "Traceback" not in str(error)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert not (tmp_path / "ran").exists(), name
