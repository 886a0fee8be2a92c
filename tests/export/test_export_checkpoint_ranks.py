"""`export_checkpoint` in one process.

It exports checkpoints of this package, of stock code and of version two, and adapters.
"""

import json
import os
import pickle
import shutil
import socket

import pytest
import torch

from tests.export.cases import (
    adapt,
    assert_same_files,
    assert_same_tensors,
    change,
    image_text_model,
    load,
    merge,
    save_image_text_model,
    tensors,
)
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build

STEPS = {"steps": 2, "save_strategy": "steps", "save_steps": 2}


def _train(model, data, output, options):
    """Train, save a checkpoint, and export the same model from memory."""
    from hf_fsdp_recipes import ShardedCheckpointCallback, export_model

    trainer = build(
        str(model),
        str(data),
        str(output),
        callbacks=[ShardedCheckpointCallback()],
        **STEPS,
        **options,
    )
    trainer.train()
    export_model(trainer.model, output / "live", tokenizer=trainer.processing_class)
    if "lora" in options:
        export_model(trainer.model, output / "live_merged", merge_adapter=True)


@pytest.fixture(scope="module")
def trained(tiny_model, text_file, tmp_path_factory):
    """Return a function that trains a model once and returns its output directory.

    The directory has `checkpoint-2` and `live`.
    """
    made = {}

    def train(kind, num_ranks=2, **options):
        key = kind, num_ranks, str(options)
        if key not in made:
            output = made[key] = tmp_path_factory.mktemp("trained")
            arguments = (tiny_model(kind), text_file, output, options)
            run_ranks(_train, num_ranks, *arguments, environment=fsdp_environment(FSDP2))
        return made[key]

    return train


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        ("llama", 2),
        pytest.param("llama_tied", 2, marks=pytest.mark.slow),
        ("qwen3_moe", 3),
        pytest.param("gpt_oss", 2, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_gives_the_files_that_the_running_model_gives(
    kind, num_ranks, trained, tmp_path, monkeypatch
):
    from transformers import AutoTokenizer

    from hf_fsdp_recipes import export_checkpoint

    run = trained(kind, num_ranks)
    exported = export_checkpoint(run / "checkpoint-2", tmp_path / "export")
    assert_same_files(run / "live", exported)
    assert (
        AutoTokenizer.from_pretrained(exported).chat_template
        == AutoTokenizer.from_pretrained(run / "live").chat_template
    )
    # This process may still have the variables of a launcher.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    smaller = export_checkpoint(
        run / "checkpoint-2", tmp_path / "bf16", dtype="bfloat16", max_shard_size="40KB"
    )
    assert tensors(smaller).keys() == tensors(exported).keys()
    assert len(list(smaller.glob("*.safetensors"))) > 1
    assert {value.dtype for value in tensors(smaller).values()} == {torch.bfloat16}
    assert load(smaller, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "lora",
    [
        LORA | {"modules_to_save": ["lm_head"]},
        pytest.param(LORA | {"use_rslora": True}, marks=pytest.mark.slow),
    ],
)
def test_an_adapters_checkpoint_is_exported_alone_and_merged(lora, trained, tiny_model, tmp_path):
    from peft import PeftModel

    from hf_fsdp_recipes import export_checkpoint

    run = trained("llama", lora=lora)
    exported = export_checkpoint(run / "checkpoint-2", tmp_path / "export")
    assert_same_files(run / "live", exported)
    merge(PeftModel.from_pretrained(load(tiny_model()), exported)).save_pretrained(
        tmp_path / "stock"
    )
    for adapter in (run / "checkpoint-2", exported):
        merged = export_checkpoint(adapter, tmp_path / "merged", merge_adapter=True)
        assert_same_tensors(tmp_path / "stock", merged)
    assert_same_tensors(tmp_path / "stock", run / "live_merged")


@pytest.mark.parametrize(
    ("lora", "error"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, None),
        ({"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}, None),
        pytest.param(
            {"target_modules": ["q_proj"], "init_lora_weights": "pissa"},
            "changed the base",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_adapter_is_merged_into_files_that_hold_experts_one_by_one(
    lora, error, tiny_model, tmp_path
):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    model = adapt(load(tiny_model("qwen3_moe")), **lora)
    model.save_pretrained(tmp_path / "adapter")
    if error:
        with pytest.raises(ExportError, match=error):
            export_checkpoint(tmp_path / "adapter", tmp_path / "export", merge_adapter=True)
        assert not (tmp_path / "export").exists()
    else:
        merge(model).save_pretrained(tmp_path / "stock")
        exported = export_checkpoint(tmp_path / "adapter", tmp_path / "export", merge_adapter=True)
        assert_same_tensors(tmp_path / "stock", exported)


# Processors of image-text models.


@pytest.fixture(scope="module")
def image_text(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("image_text")
    save_image_text_model(directory, tiny_model())
    return directory


def _save_weights(model, checkpoint):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": model.state_dict()}, checkpoint_id=checkpoint, no_dist=True)


def _save_adapter(model, checkpoint):
    adapt(model, target_modules=["q_proj"], task_type=None).save_pretrained(checkpoint)


@pytest.fixture
def asked(monkeypatch):
    """Return a list of the hosts that are asked for. The Hub may be asked."""
    import huggingface_hub

    hosts = []

    def refuse(host, *arguments, **options):
        hosts.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return hosts


@pytest.mark.parametrize("save", [_save_weights, _save_adapter])
@pytest.mark.parametrize("own", ["nothing", "tokenizer", "processor"])
def test_an_image_text_model_gets_its_processor(save, own, image_text, asked, tmp_path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from hf_fsdp_recipes import export_checkpoint

    processor = AutoProcessor.from_pretrained(image_text)
    save(AutoModelForImageTextToText.from_pretrained(image_text), tmp_path / "checkpoint")
    if own != "nothing":  # training has changed the template
        processor.chat_template = "trained: {{ messages }}"
        processor.tokenizer.chat_template = processor.chat_template
        saved = processor if own == "processor" else processor.tokenizer
        saved.save_pretrained(tmp_path / "checkpoint")
    exported = export_checkpoint(
        tmp_path / "checkpoint",
        tmp_path / "export",
        base_model=image_text,
        merge_adapter=save is _save_adapter,
    )
    processor.save_pretrained(tmp_path / "stock")
    names = {file.name for file in (tmp_path / "stock").iterdir()}
    assert {"processor_config.json", "chat_template.jinja", "tokenizer.json"} < names
    for name in names:
        assert (exported / name).read_bytes() == (tmp_path / "stock" / name).read_bytes(), name
    assert not asked


@pytest.mark.parametrize("own", ["nothing", "tokenizer"])
def test_an_image_text_model_without_a_processor_gets_its_tokenizer_or_nothing(
    own, image_text, tiny_model, asked, tmp_path
):
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    from hf_fsdp_recipes import export_checkpoint

    model = AutoModelForImageTextToText.from_pretrained(image_text)
    _save_weights(model, tmp_path / "checkpoint")
    model.config.save_pretrained(tmp_path / "checkpoint")
    if own == "tokenizer":
        AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(tmp_path / "checkpoint")
        AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "stock")
    exported = export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    assert {file.name for file in exported.iterdir()} == {
        file.name for file in (tmp_path / "stock").iterdir()
    }
    assert not asked


def test_a_processor_that_cannot_be_loaded_is_one_error(image_text, monkeypatch, tmp_path):
    """Some processors need torchvision."""
    from transformers import LlavaProcessor

    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    def fail(*_, **__):
        raise ImportError("LlavaProcessor requires the Torchvision library")

    _save_weights(image_text_model(), tmp_path / "checkpoint")
    monkeypatch.setattr(LlavaProcessor, "from_pretrained", fail)
    with pytest.raises(ExportError, match=r"processor of .* cannot be loaded.*Torchvision"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "export", base_model=image_text)
    assert list(tmp_path.iterdir()) == [tmp_path / "checkpoint"]


# Classes of models.


def _copy_with(source, directory, **changes):
    """Copy a model's directory, with fields of its config changed or, if None, removed."""
    shutil.copytree(source, directory)
    fields = json.loads((directory / "config.json").read_text()) | changes
    kept = {name: value for name, value in fields.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))
    return directory


def test_a_config_that_names_no_class_is_that_of_a_causal_model(tiny_model, tmp_path):
    from hf_fsdp_recipes import export_checkpoint

    model = _copy_with(tiny_model(), tmp_path / "model", architectures=None)
    exported = export_checkpoint(model, tmp_path / "export")
    assert_same_files(tiny_model(), exported)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["OwnForCausalLM"]},
        {
            "model_type": "own",
            "architectures": ["OwnForCausalLM"],
            "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
        },
    ],
)
def test_a_class_that_transformers_lacks_is_one_error_and_runs_no_code(
    changes, tiny_model, monkeypatch, tmp_path
):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    model = _copy_with(tiny_model(), tmp_path / "model", **changes)
    (model / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda _: "y")  # transformers would ask
    with pytest.raises(ExportError, match="code of its own, export it in training"):
        export_checkpoint(model, tmp_path / "export")
    assert list(tmp_path.iterdir()) == [model]


# Checkpoints of other programs.


@pytest.fixture(scope="module")
def stored(tiny_model, tmp_path_factory):
    """Return the directory of a model whose values differ from those of tiny_model("llama")."""
    directory = tmp_path_factory.mktemp("stored")
    model = load(tiny_model())
    change(model)
    model.save_pretrained(directory)
    return directory


def _save_bare(source, directory, prefix, top):
    """Save a model's shards with torch DCP alone."""
    import torch.distributed.checkpoint as dcp

    from tests.export.cases import shard

    state = {prefix + name: value for name, value in shard(load(source)).state_dict().items()}
    # Another key may begin with the same word.
    whole = {top: state, f"{top}.step": torch.ones(1)} if top else state
    dcp.save(whole, checkpoint_id=directory)


@pytest.mark.parametrize(
    ("prefix", "top"),
    [("", "model"), pytest.param("_orig_mod.", None, marks=pytest.mark.slow)],
)
def test_a_bare_dcp_directory_is_exported_with_its_base_model(
    prefix, top, stored, tiny_model, tmp_path
):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    checkpoint = tmp_path / "fine-tuned"
    run_ranks(_save_bare, 2, stored, checkpoint, prefix, top)
    (checkpoint / "train_params.yaml").write_text("model_name: ./somewhere\n")
    with pytest.raises(ExportError, match="pass base_model"):
        export_checkpoint(checkpoint, tmp_path / "export")
    with pytest.raises(ExportError, match="do not fit the config of GPT2LMHeadModel"):
        export_checkpoint(checkpoint, tmp_path / "export", base_model=tiny_model("gpt2"))
    assert_same_tensors(
        stored, export_checkpoint(checkpoint, tmp_path / "export", base_model=tiny_model())
    )


def test_a_changed_weight_and_a_runs_directory_are_refused(trained, tmp_path):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    shutil.copytree(trained("llama") / "checkpoint-2", tmp_path / "run" / "checkpoint-2")
    with pytest.raises(ExportError, match="is no checkpoint"):
        export_checkpoint(tmp_path / "run", tmp_path / "export")
    with pytest.raises(ExportError, match="is no checkpoint"):
        export_checkpoint(tmp_path / "run" / "checkpoint-4", tmp_path / "export")
    shard = tmp_path / "run" / "checkpoint-2" / "pytorch_model_fsdp_0" / "__1_0.distcp"
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(ExportError, match=r"__1_0\.distcp is damaged"):
        export_checkpoint(tmp_path / "run" / "checkpoint-2", tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_an_adapters_checkpoint_without_its_config_names_the_file(trained, tmp_path):
    """Version two and stock Trainer write such checkpoints."""
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(
        trained("llama", lora=LORA | {"modules_to_save": ["lm_head"]}) / "checkpoint-2", checkpoint
    )
    for name in ("adapter_config.json", "manifest.json", "trainer_state.json"):
        (checkpoint / name).unlink()
    with pytest.raises(ExportError, match=r"no adapter_config\.json\. Copy it there"):
        export_checkpoint(checkpoint, tmp_path / "export")


class _Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mknod, (str(self.file),)


def _put_payload_into_metadata(directory, file):
    (directory / ".metadata").write_bytes(pickle.dumps(_Payload(file)))


def _put_payload_into_entry(directory, file):
    import torch.distributed.checkpoint as dcp

    dcp.save(
        {"model": {"a": torch.zeros(2), "b": _Payload(file)}}, checkpoint_id=directory, no_dist=True
    )


def _remove(directory, file):
    next(directory.glob("*.distcp")).unlink()


def _truncate(directory, file):
    os.truncate(next(directory.glob("*.distcp")), 100)


def _garble(directory, file):
    (directory / ".metadata").write_bytes(b"nonsense")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (_put_payload_into_metadata, "is unusable"),
        (_put_payload_into_entry, "is unusable"),
        (_garble, "is unusable"),
        (_remove, "is unreadable"),
        (_truncate, "is unreadable"),
    ],
)
def test_a_damaged_or_hostile_checkpoint_is_one_error_and_runs_no_code(
    damage, error, stored, tiny_model, tmp_path
):
    import torch.distributed.checkpoint as dcp

    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    checkpoint, file = tmp_path / "checkpoint", tmp_path / "ran"
    dcp.save({"model": load(stored).state_dict()}, checkpoint_id=checkpoint, no_dist=True)
    damage(checkpoint, file)
    with pytest.raises(ExportError, match=error):
        export_checkpoint(checkpoint, tmp_path / "export", base_model=tiny_model())
    assert list(tmp_path.iterdir()) == [checkpoint]


def _measure(checkpoint, folder, base):
    from hf_fsdp_recipes import export_checkpoint
    from tests.ranks.memory import PeakMemory

    export_checkpoint(checkpoint, folder / "export", base_model=base)  # imports what is needed
    with PeakMemory() as memory:
        export_checkpoint(checkpoint, folder / "export", base_model=base, max_shard_size="300MB")
    return memory.growth_bytes / 1e6


@pytest.mark.slow
def test_a_checkpoint_is_exported_in_the_memory_of_a_few_parameters(tmp_path):
    import torch.distributed.checkpoint as dcp
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_hidden_layers=3, **sizes))
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "base")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    (growth,) = run_ranks(_measure, 1, tmp_path / "checkpoint", tmp_path, tmp_path / "base")
    assert growth < 300
