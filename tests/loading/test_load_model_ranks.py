"""`load_model` and stock loading give the same losses to the last digit, on real gloo ranks."""

import json
import os
import shutil

import pytest

from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build, train_losses

HYBRID = {"dp_replicate_size": 2, "dp_shard_size": 2}


def both(model, data, tmp_path, environment, world_size=2, **keywords):
    stock = run_ranks(
        _train, world_size, model, data, tmp_path / "stock", {"loader": "stock", **keywords}, environment=environment
    )
    ours = run_ranks(_train, world_size, model, data, tmp_path / "ours", keywords, environment=environment)
    return stock, ours


def _train(model, data, output, keywords):
    return train_losses(str(model), str(data), str(output), **keywords)


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        pytest.param("llama", None, marks=pytest.mark.slow),
        ("llama_tied", None),
        pytest.param("llama_tied", LORA, marks=pytest.mark.slow),
        ("gpt2", None),
        pytest.param("qwen3_moe", None, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", LORA, marks=pytest.mark.slow),
        pytest.param("mixtral", None, marks=pytest.mark.slow),
    ],
)
def test_fsdp2_losses_equal_stock_loading(tiny_model, text_file, tmp_path, kind, lora):
    stock, ours = both(tiny_model(kind), text_file, tmp_path, fsdp_environment(FSDP2), lora=lora)
    assert ours == stock
    assert len(ours[0]) == 5


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("llama", LORA),
        pytest.param("llama_tied", None, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", None, marks=pytest.mark.slow),
    ],
)
def test_fsdp1_losses_equal_stock_loading(tiny_model, text_file, tmp_path, kind, lora):
    stock, ours = both(tiny_model(kind), text_file, tmp_path, fsdp_environment(FSDP1), lora=lora)
    assert ours == stock


@pytest.mark.slow
def test_hybrid_losses_equal_stock_loading(tiny_model, text_file, tmp_path):
    stock, ours = both(tiny_model("llama"), text_file, tmp_path, fsdp_environment(FSDP2, HYBRID), world_size=4)
    assert ours == stock


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_other_numbers_of_ranks_equal_stock_loading(tiny_model, text_file, tmp_path, world_size):
    # Neither 2 nor 3 divides the vocabulary's 307 rows or the 5 experts; some biases have fewer rows than there are ranks.
    stock, ours = both(tiny_model("qwen3_moe"), text_file, tmp_path, fsdp_environment(FSDP2), world_size=world_size)
    assert ours == stock


def test_direct_reading_equals_stock_loading(tiny_model, text_file, tmp_path):
    model = tiny_model("llama", "bfloat16", "40KB")
    stock, direct = (
        run_ranks(
            _train, 2, model, text_file, tmp_path / loader, {"loader": loader}, environment=fsdp_environment(FSDP2)
        )
        for loader in ("stock", "direct")
    )
    assert direct == stock


def test_bf16_files_become_fp32_masters_as_in_stock_loading(tiny_model, text_file, tmp_path):
    model = tiny_model("llama_tied", "bfloat16", "40KB")
    stock, ours = both(model, text_file, tmp_path, fsdp_environment(FSDP2, precision="bf16"), dtype="auto", bf16=True)
    assert ours == stock


@pytest.mark.slow
def test_offload_equals_stock_loading(tiny_model, text_file, tmp_path):
    environment = fsdp_environment(FSDP2 | {"fsdp_offload_params": True})
    stock, ours = both(tiny_model("llama"), text_file, tmp_path, environment)
    assert ours == stock


def _shards(model_dir, data, output, keywords):
    """Return every full parameter, gathered from the shards, after loading and before any step."""
    import torch

    trainer = build(str(model_dir), str(data), str(output), steps=1, **keywords)
    seen = {}

    from transformers import TrainerCallback

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            for name, parameter in model.named_parameters():
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                seen[name] = whole.detach().to(torch.float32).tolist()

    trainer.add_callback(Look())
    trainer.train()
    return seen


def test_every_value_arrives_on_four_ranks_that_read_directly(tiny_model, text_file, tmp_path):
    from safetensors.torch import load_file

    model = tiny_model("llama", "bfloat16")
    keywords = {"loader": "direct", "dtype": "bfloat16", "load_arguments": {"verify": "full"}}
    seen = run_ranks(_shards, 4, model, text_file, tmp_path, keywords, environment=fsdp_environment(FSDP2))
    for name, tensor in load_file(model / "model.safetensors").items():
        assert seen[3][name] == tensor.float().tolist(), name


def _shards_through_small_buckets(model_dir, data, output, keywords, nodes, blind_rank):
    """Like `_shards`, but with many small buckets; `nodes` has each rank's node, and `blind_rank` cannot share memory."""
    from hf_fsdp_recipes import distributed
    from hf_fsdp_recipes.loading import distribute, shared_memory

    distribute.BUCKET_BYTES = 4096
    distributed.node_id = lambda: f"node {nodes[distributed.rank()]}"
    if distributed.rank() == blind_rank:
        shared_memory._open = lambda *arguments: None
    return _shards(model_dir, data, output, keywords)


@pytest.mark.parametrize(
    ("parallel", "nodes", "blind_rank"),
    [
        (None, [0, 0, 0, 0], 2),
        pytest.param(None, [0, 1, 0, 2], None, marks=pytest.mark.slow),
        (HYBRID, [0, 0, 1, 1], None),
    ],
)
def test_every_value_arrives_through_small_buckets(tiny_model, text_file, tmp_path, parallel, nodes, blind_rank):
    from safetensors.torch import load_file

    model = tiny_model("llama", "bfloat16")
    keywords = {"dtype": "bfloat16", "load_arguments": {"verify": "full"}}
    environment = fsdp_environment(FSDP2, parallel)
    found = run_ranks(
        _shards_through_small_buckets,
        4,
        model,
        text_file,
        tmp_path,
        keywords,
        nodes,
        blind_rank,
        environment=environment,
    )
    for name, tensor in load_file(model / "model.safetensors").items():
        assert found[3][name] == tensor.float().tolist(), name


def test_fsdp1_units_are_verified_on_other_nodes(tiny_model, text_file, tmp_path):
    model = tiny_model("llama", "bfloat16")
    keywords = {"dtype": "bfloat16", "load_arguments": {"verify": "full"}}
    arguments = (model, text_file, tmp_path, keywords, [0, 0, 1], None)
    run_ranks(_shards_through_small_buckets, 3, *arguments, environment=fsdp_environment(FSDP1))


def _auto_choice(model_dir, data, output, blind_rank):
    """Return whether `source="auto"` makes every rank read; `blind_rank` cannot see the files."""
    from hf_fsdp_recipes import distributed, load_model
    from hf_fsdp_recipes.errors import LoadError
    from hf_fsdp_recipes.loading import load_model as module
    from hf_fsdp_recipes.patches.accelerate import find_meta_model_loader

    if distributed.rank() == blind_rank:
        import sys

        def see_nothing(file):
            raise LoadError(f"{file} does not exist")

        sys.modules["hf_fsdp_recipes.loading.load_model"].read_header = see_nothing
    del module
    model = load_model(str(model_dir), source="auto")
    return find_meta_model_loader(model).source.is_direct


@pytest.mark.parametrize(("blind_rank", "is_direct"), [(None, True), (1, False)])
def test_auto_reads_directly_only_if_every_rank_sees_the_files(tiny_model, text_file, tmp_path, blind_rank, is_direct):
    arguments = (tiny_model("llama"), text_file, tmp_path, blind_rank)
    assert run_ranks(_auto_choice, 2, *arguments, environment=fsdp_environment(FSDP2)) == [is_direct] * 2


@pytest.mark.slow
def test_auto_equals_stock_loading(tiny_model, text_file, tmp_path):
    model = tiny_model("llama", "bfloat16")
    keywords = {"dtype": "float32"}
    _, ours = both(model, text_file, tmp_path, fsdp_environment(FSDP2), loader="auto", **keywords)
    stock, _ = both(model, text_file, tmp_path / "again", fsdp_environment(FSDP2), **keywords)
    assert ours == stock


def _load_only(model_dir, keywords):
    from hf_fsdp_recipes import load_model

    load_model(str(model_dir), **keywords)


def test_missing_model_is_one_error_on_every_rank(tmp_path):
    errors = run_ranks(
        _load_only, 2, tmp_path / "nothing", {}, environment=fsdp_environment(FSDP2), expect_failure=True
    )
    assert errors[0] == errors[1]
    assert errors[0][0] == "LoadError"
    assert "nothing" in errors[0][1]


def _break(directory, how):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    name, file = next(iter(index["weight_map"].items()))
    if how == "truncated":
        with (directory / file).open("r+b") as stream:
            stream.truncate((directory / file).stat().st_size - 8)
    elif how == "lying header":
        data = bytearray((directory / file).read_bytes())
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        entry = header[next(key for key in header if key != "__metadata__")]
        entry["data_offsets"][1] += 4
        text = json.dumps(header, separators=(",", ":")).encode()
        (directory / file).write_bytes(len(text).to_bytes(8, "little") + text + bytes(data[8 + length :]))
    elif how == "missing file":
        index["weight_map"][name] = "model-00099-of-00099.safetensors"
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "path outside":
        index["weight_map"][name] = "../model.safetensors"
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "wrong shape":
        config = json.loads((directory / "config.json").read_text())
        config["hidden_size"] = 48
        (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("how", ["truncated", "lying header", "missing file", "path outside", "wrong shape"])
def test_broken_checkpoint_is_one_load_error_on_every_rank(tiny_model, tmp_path, how):
    directory = tmp_path / "broken"
    shutil.copytree(tiny_model("llama", "float32", "40KB"), directory)
    _break(directory, how)
    errors = run_ranks(
        _load_only, 2, directory, {}, environment=fsdp_environment(FSDP2), expect_failure=True, timeout_seconds=30
    )
    assert errors[0] == errors[1]
    assert errors[0][0] == "LoadError"


def _load_exports(parent_directories, arguments):
    """Load `export` in this rank's directory with each source; return the error or None, and the number of ranges verified."""
    from hf_fsdp_recipes import load_model
    from hf_fsdp_recipes.errors import LoadError
    from hf_fsdp_recipes.loading import export_marker

    os.chdir(parent_directories[int(os.environ["RANK"])])
    verified, is_intact = [], export_marker._is_intact
    export_marker._is_intact = lambda *written: verified.append(written) or is_intact(*written)
    found = []
    for keywords in arguments:
        verified.clear()
        try:
            load_model("export", **keywords)
            found.append((None, len(verified)))
        except LoadError as error:
            found.append((str(error), len(verified)))
    return found


SOURCES = [{"source": "rank0"}, {"source": "direct"}]


@pytest.fixture
def export(tiny_model, tmp_path):
    """Return an export of several files; its marker has one checksum range per file."""
    from hf_fsdp_recipes.export.export_directory import write_marker

    directory = shutil.copytree(tiny_model("llama", "float32", "40KB"), tmp_path / "one" / "export")
    write_marker(directory, [])
    return directory


def _flip_last_byte(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_ranks_share_the_verification_of_an_export_and_raise_the_same_error(export):
    num_files = sum(1 for file in export.iterdir()) - 1
    together = {"environment": fsdp_environment(FSDP2)}
    intact = run_ranks(_load_exports, 3, [export.parent] * 3, SOURCES, **together)
    for of_source in zip(*intact, strict=True):
        assert [error for error, _ in of_source] == [None] * 3
        counts = [count for _, count in of_source]
        assert sum(counts) == num_files and max(counts) - min(counts) <= 1
    changed_file = sorted(export.glob("*.safetensors"))[-1]
    _flip_last_byte(changed_file)
    for changed in (
        run_ranks(_load_exports, 3, [export.parent] * 3, SOURCES, **together),
        run_ranks(_load_exports, 2, [export.parent] * 2, [{}], environment={"ACCELERATE_USE_CPU": "true"}),  # DDP
    ):
        texts = {error for found in changed for error, _ in found}
        assert texts == {
            f"export/{changed_file.name} differs from its checksum: the export changed after it was written. Export again, or "
            f"delete export_manifest.json if you changed it on purpose."
        }


def test_each_copy_of_an_export_is_verified_if_it_is_read(export, tmp_path):
    copy = shutil.copytree(export, tmp_path / "two" / "export")  # stands for another node's disk
    _flip_last_byte(copy / "config.json")
    (tmp_path / "none").mkdir()
    places = [export.parent, copy.parent, tmp_path / "none"]
    environment = fsdp_environment(FSDP2)
    results = run_ranks(_load_exports, 2, places[:2], SOURCES, environment=environment)
    errors = [[error for error, _ in found] for found in results]
    assert errors[0] == errors[1]
    assert errors[0][0] is None  # every rank gets what rank 0 reads
    assert "config.json differs from its checksum" in errors[0][1]
    results = run_ranks(_load_exports, 2, places[::2], SOURCES[:1], environment=environment)
    assert [found[0][0] for found in results] == [None, None]


def _copy_changed(directory, tmp_path, change):
    """Return a copy of a model whose tensors `change` has edited in place."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(directory, tmp_path / "changed")
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "changed"


def test_copy_with_other_dtypes_than_rank_0s_is_refused_if_ranks_read_directly(tiny_model, tmp_path):
    for name, dtype in (("one", "bfloat16"), ("two", "float32")):  # two nodes' disks
        shutil.copytree(tiny_model("llama", dtype), tmp_path / name / "export")
    places = [tmp_path / "one", tmp_path / "two"]
    results = run_ranks(_load_exports, 2, places, [*SOURCES, {"source": "auto"}], environment=fsdp_environment(FSDP2))
    errors = [[error for error, _ in found] for found in results]
    assert errors[0] == errors[1]
    through_rank_0, direct, auto = errors[0]
    assert through_rank_0 is None and auto is None
    assert "that rank 1 reads differs from rank 0's copy" in direct
    assert "is torch.float32 of shape" in direct and "not torch.bfloat16 of shape" in direct


def test_export_in_the_working_directory_is_not_verified_when_another_model_is_loaded(export, tiny_model):
    _flip_last_byte(export / "config.json")
    shutil.copytree(tiny_model("llama"), export / "export")
    results = run_ranks(_load_exports, 2, [export] * 2, [{}], environment={"ACCELERATE_USE_CPU": "true"})
    assert results == [[(None, 0)]] * 2


def _type_in_subfolder(directory):
    from hf_fsdp_recipes import load_model

    return load_model(str(directory), subfolder="part").config.model_type


@pytest.mark.parametrize("is_fsdp", [True, False])
def test_model_in_a_subfolder_is_loaded(tiny_model, tmp_path, is_fsdp):
    shutil.copytree(tiny_model("gpt2"), tmp_path / "model")
    shutil.copytree(tiny_model("llama"), tmp_path / "model" / "part")
    environment = fsdp_environment(FSDP2) if is_fsdp else {}
    assert run_ranks(_type_in_subfolder, 2, tmp_path / "model", environment=environment) == ["llama"] * 2


def _transpose(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T.contiguous()


def _cast_an_expert(tensors):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name] = tensors[name].bfloat16()


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llama", _transpose, "up_proj.weight: [32, 52] in the checkpoint, [52, 32] in the config"),
        ("qwen3_moe", _cast_an_expert, "experts.3.up_proj.weight in torch.bfloat16"),
    ],
)
def test_tensor_of_another_shape_or_dtype_is_refused_by_name(tiny_model, tmp_path, kind, change, words):
    directory = _copy_changed(tiny_model(kind), tmp_path, change)
    errors = run_ranks(_load_only, 2, directory, {}, environment=fsdp_environment(FSDP2), expect_failure=True)
    assert errors[0] == errors[1]
    assert errors[0][0] == "LoadError"
    assert words in errors[0][1]


@pytest.mark.parametrize("loader", ["rank0", "direct"])
@pytest.mark.parametrize(
    ("fsdp", "value"), [(FSDP2, "nan"), (FSDP2, "-inf"), pytest.param(FSDP1, "nan", marks=pytest.mark.slow)]
)
def test_nan_or_infinity_in_the_checkpoint_is_refused_by_name(tiny_model, text_file, tmp_path, fsdp, value, loader):
    def poison(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = float(value)  # the last rank's last element

    directory = _copy_changed(tiny_model("llama"), tmp_path, poison)
    errors = run_ranks(
        _shards, 2, directory, text_file, tmp_path / "out", {"loader": loader}, environment=fsdp_environment(fsdp),
        expect_failure=True,
    )  # fmt: skip
    assert errors[0] == errors[1]
    assert errors[0][0] == "LoadError"
    assert "1 parameters of" in errors[0][1]
    assert "contain NaN or infinity: model.layers.1.mlp.up_proj.weight" in errors[0][1]


def _without_head(tensors):
    del tensors["lm_head.weight"]


def _without_second_layer(tensors):
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


@pytest.mark.parametrize("is_fsdp", [True, False])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_head, "lacks 1 of the model's parameters and buffers: lm_head.weight. Check that config.json"),
        (_without_second_layer, "lacks 13 of the model's parameters and buffers: model.layers.1."),
    ],
)
def test_checkpoint_that_lacks_parameters_is_refused_with_the_list(tiny_model, tmp_path, change, words, is_fsdp):
    directory = _copy_changed(tiny_model("llama"), tmp_path, change)
    environment = fsdp_environment(FSDP2) if is_fsdp else {}
    errors = run_ranks(_load_only, 2, directory, {}, environment=environment, expect_failure=True)
    assert errors[0] == errors[1]
    assert errors[0][0] == "LoadError"
    assert words in errors[0][1]
    assert "ignore_mismatched=True" in errors[0][1]


@pytest.mark.parametrize("is_fsdp", [True, False])
def test_checkpoint_of_another_architecture_is_refused_even_if_missing_parameters_are_allowed(
    tiny_model, tmp_path, is_fsdp
):
    directory = shutil.copytree(tiny_model("llama_tied"), tmp_path / "mixed")
    shutil.copy(tiny_model("gpt2") / "config.json", directory)
    environment = fsdp_environment(FSDP2) if is_fsdp else {}
    errors = run_ranks(
        _load_only, 2, directory, {"ignore_mismatched": True}, environment=environment, expect_failure=True
    )
    assert errors[0] == errors[1]
    assert "no tensor of" in errors[0][1] and "belongs to the model in its config" in errors[0][1]


def test_ignore_mismatched_initializes_tensors_of_another_shape(tiny_model, text_file, tmp_path):
    def shorten(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:300].clone()

    directory = _copy_changed(tiny_model("llama"), tmp_path, shorten)
    keywords = {"load_arguments": {"ignore_mismatched": True}}
    seen = run_ranks(_shards, 2, directory, text_file, tmp_path / "out", keywords, environment=fsdp_environment(FSDP2))
    assert len(seen[0]["lm_head.weight"]) == 307
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device_map": "auto"}, "device_map='auto' does not apply under FSDP. Remove it"),
        ({"max_memory": {0: "1GB"}}, "max_memory"),
        ({"low_cpu_mem_usage": True}, "low_cpu_mem_usage=True does not apply"),
        ({"load_in_8bit": True}, "load_in_8bit=True does not apply under FSDP. Pass quantization_config"),
        (
            {"distributed_config": {"fsdp_size": 2}},
            "does not apply under FSDP. Remove it; the template shards the model",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, so there is nothing to train"),
        ({"experts_implementation": "fast"}, "experts_implementation is 'fast'. Use eager, batched_mm, "),
    ],
)
def test_argument_without_a_meaning_under_fsdp_is_refused_by_name(tiny_model, arguments, words):
    errors = run_ranks(
        _load_only, 2, tiny_model("llama"), arguments, environment=fsdp_environment(FSDP2), expect_failure=True
    )
    assert errors[0] == errors[1]
    assert errors[0][0] == "LoadError"
    assert words in errors[0][1]


def _experts_of(model_dir, implementation):
    from hf_fsdp_recipes import load_model
    from hf_fsdp_recipes.loading.load_model import initialize_model

    keywords = {"experts_implementation": implementation}
    models = [load_model(str(model_dir), **keywords), initialize_model(str(model_dir), **keywords)]
    return {model.model.layers[0].mlp.experts.config._experts_implementation for model in models}


@pytest.mark.parametrize(
    "variables", [fsdp_environment(FSDP2), {"ACCELERATE_USE_FSDP": "false"}], ids=["FSDP2", "none"]
)
def test_experts_use_the_implementation_that_is_asked_for(tiny_model, variables):
    for name in ("batched_mm", "eager"):
        assert run_ranks(_experts_of, 1, tiny_model("qwen3_moe"), name, environment=variables) == [{name}]


def test_tensor_that_the_checkpoint_lacks_is_initialized_equally_on_all_ranks_if_allowed(
    tiny_model, text_file, tmp_path
):
    directory = _copy_changed(tiny_model("llama"), tmp_path, _without_head)
    keywords = {"load_arguments": {"ignore_mismatched": True}}
    seen = run_ranks(_shards, 2, directory, text_file, tmp_path / "out", keywords, environment=fsdp_environment(FSDP2))
    head = seen[0]["lm_head.weight"]
    assert head == seen[1]["lm_head.weight"]
    spread = [value for row in head for value in row]
    assert 0.01 < (sum(value * value for value in spread) / len(spread)) ** 0.5 < 0.04  # initializer_range is 0.02


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_dora_losses_equal_stock_loading(tiny_model, text_file, tmp_path, world_size):
    # LoRA's B is random here, so that DoRA's norms depend on the adapter too.
    dora = LORA | {"use_dora": True, "init_lora_weights": False}
    model, environment = tiny_model("llama"), fsdp_environment(FSDP2)
    stock, ours = both(model, text_file, tmp_path, environment, world_size, lora=dora)
    assert ours == stock
    plain = run_ranks(
        _train, world_size, model, text_file, tmp_path / "lora", {"lora": dora | {"use_dora": False}},
        environment=environment,
    )  # fmt: skip
    assert plain != ours


def _train_pissa(model, data, output, init, loader):
    """Train with an adapter that PEFT computes from the base weights, and export; return the losses."""
    from hf_fsdp_recipes import ShardedCheckpointCallback, export_model, latest_checkpoint

    lora = LORA | {"init_lora_weights": init}
    saving = {"save_strategy": "steps", "save_steps": 2} if loader != "stock" else {}
    callbacks = [ShardedCheckpointCallback()] if saving else None
    trainer = build(
        str(model), str(data), str(output), loader=loader, steps=4, lora=lora, callbacks=callbacks, **saving
    )
    trainer.train(resume_from_checkpoint=latest_checkpoint(output) if saving else None)
    if saving:
        export_model(trainer.model, output / "adapter")
        export_model(trainer.model, output / "merged", merge_adapter=True)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("loader", ["rank0", pytest.param("direct", marks=pytest.mark.slow)])
def test_nan_is_refused_before_an_adapter_is_computed_from_it(tiny_model, text_file, tmp_path, loader):
    def poison(tensors):
        tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] = float("nan")

    directory = _copy_changed(tiny_model("llama"), tmp_path, poison)
    arguments = (directory, text_file, tmp_path / "out", "pissa", loader)
    errors = run_ranks(_train_pissa, 2, *arguments, environment=fsdp_environment(FSDP2), expect_failure=True)
    assert errors[0] == errors[1]
    assert errors[0][0] == "LoadError"
    assert "contain NaN or infinity" in errors[0][1]
    assert "self_attn.q_proj" in errors[0][1]


@pytest.mark.parametrize("init", ["pissa", pytest.param("olora", marks=pytest.mark.slow)])
def test_adapter_computed_from_base_weights_is_pefts_own(tiny_model, text_file, tmp_path, init):
    import shutil

    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    def run(name, loader="rank0"):
        arguments = (tiny_model("llama"), text_file, tmp_path / name, init, loader)
        return run_ranks(_train_pissa, 2, *arguments, environment=fsdp_environment(FSDP2))[0]

    stock, ours = run("stock", "stock"), run("ours")
    assert ours == pytest.approx(stock, rel=1e-5)
    shutil.copytree(tmp_path / "ours" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    assert run("resumed")[-2:] == ours[-2:]
    merged, resumed = (load_file(tmp_path / name / "merged" / "model.safetensors") for name in ("ours", "resumed"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in merged.items())
    base = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    expected = PeftModel.from_pretrained(base, tmp_path / "ours" / "adapter").merge_and_unload().state_dict()
    for name, tensor in expected.items():  # to load the adapter, PEFT changes the base weights again
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-5)


def _add_adapter(model_dir, data, output, kind, changes):
    build(str(model_dir), str(data), str(output), lora=LORA | changes, steps=1).train()


@pytest.mark.parametrize(
    ("kind", "fsdp", "changes", "word"),
    [
        ("llama", FSDP2, {"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ("llama", FSDP1, {"init_lora_weights": "pissa"}, "under FSDP1"),
        ("gpt2", FSDP2, {"use_dora": True}, "Conv1D"),
        ("llama", FSDP1, {"use_dora": True}, "under FSDP1"),
    ],
)
def test_adapter_that_cannot_be_made_on_arrival_is_refused_by_name(
    tiny_model, text_file, tmp_path, kind, fsdp, changes, word
):
    errors = run_ranks(
        _add_adapter, 2, tiny_model(kind), text_file, tmp_path, kind, changes,
        environment=fsdp_environment(fsdp), expect_failure=True,
    )  # fmt: skip
    assert errors[0] == errors[1]
    assert errors[0][0] == "LoadError"
    assert word in errors[0][1]


def _lose_a_file_while_loading(model_dir, data, output):
    """Truncate the weights after their headers have been checked."""
    from hf_fsdp_recipes import distributed
    from hf_fsdp_recipes.loading import distribute

    distribute.BUCKET_BYTES = 4096
    fill = distribute.WeightStream.fill

    def lose_then_fill(*arguments, **keywords):
        if distributed.is_main():
            file = model_dir / "model.safetensors"
            with file.open("r+b") as stream:
                stream.truncate(file.stat().st_size // 2)
        fill(*arguments, **keywords)

    distribute.WeightStream.fill = lose_then_fill
    build(str(model_dir), str(data), str(output), steps=1).train()


def test_file_that_ends_while_it_is_sent_is_one_error_on_every_rank(tiny_model, text_file, tmp_path):
    model = shutil.copytree(tiny_model("llama", "bfloat16"), tmp_path / "model")
    errors = run_ranks(
        _lose_a_file_while_loading, 3, model, text_file, tmp_path / "out",
        environment=fsdp_environment(FSDP2), expect_failure=True, timeout_seconds=60,
    )  # fmt: skip
    assert errors[0][0] == "LoadError"
    assert "inside tensor" in errors[0][1]
    assert errors[0] == errors[1] == errors[2]


def _resized(model_dir, data, output, loader, num_tokens):
    import torch

    trainer = build(str(model_dir), str(data), str(output), loader=loader, steps=1, prepare=("resize", num_tokens))
    whole = {}

    from transformers import TrainerCallback

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            for name, parameter in model.named_parameters():
                if "embed_tokens" in name or "lm_head" in name:
                    tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                    whole[name] = tensor.detach().clone().to(torch.float32).tolist()

    trainer.add_callback(Look())
    trainer.train()
    return whole


@pytest.mark.parametrize(("kind", "num_tokens"), [("llama", 320), ("llama_tied", 311), ("llama", 300)])
def test_resized_embeddings_get_the_mean_of_the_rows(tiny_model, text_file, tmp_path, kind, num_tokens):
    from safetensors.torch import load_file

    arguments = (tiny_model(kind), text_file, tmp_path / "out", "rank0", num_tokens)
    seen = run_ranks(_resized, 2, *arguments, environment=fsdp_environment(FSDP2))[0]
    stored = load_file(tiny_model(kind) / "model.safetensors")
    assert seen
    for name, rows in seen.items():
        kept = min(num_tokens, 307)
        assert rows[:kept] == stored[name][:kept].tolist()
        assert len(rows) == num_tokens
        for row in rows[kept:]:
            assert row == pytest.approx(stored[name].double().mean(dim=0).tolist(), abs=1e-6)


def _random_rows(model_dir):
    import torch
    from accelerate import Accelerator

    from hf_fsdp_recipes import load_model
    from hf_fsdp_recipes.patches import cpu_ranks

    cpu_ranks.enable()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    model = load_model(model_dir, source="direct", initializer_range=0.5)
    model.resize_token_embeddings(4000, mean_resizing=False)
    optimizer = torch.optim.SGD(model.parameters())
    model, _ = accelerator.prepare(model, optimizer)
    weight = model.get_input_embeddings().weight
    return weight.to_local().tolist(), weight.full_tensor()[307:].std().item()


def test_random_rows_of_resized_embeddings_are_equal_on_all_replicas(tiny_model):
    environment = fsdp_environment(FSDP2, HYBRID)
    (one, std), (two, _), other_one, other_two = run_ranks(
        _random_rows, 4, tiny_model("llama"), environment=environment
    )
    assert (one, two) == (other_one[0], other_two[0])
    assert one != two
    assert std == pytest.approx(0.5, rel=0.02)


def test_memory_of_each_stage_is_printed_and_recorded(tiny_model, text_file, tmp_path):
    from hf_fsdp_recipes.metrics.stages import Stage, format_table

    shown = format_table([Stage("read into shards", 1, 1.5, 10**8, 2 * 10**8, 3 * 10**8, 0, 0, 0)])
    assert shown.splitlines()[1].split() == ["read", "into", "shards", "1", "1.50", "100", "200", "300"]
    run_ranks(_train_with_metrics, 2, tiny_model("llama"), text_file, tmp_path, environment=fsdp_environment(FSDP2))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    stages = {(line["stage"], line["rank"]) for line in lines if "stage" in line}
    assert stages == {(stage, rank) for stage in ("build on meta", "read into shards") for rank in (0, 1)}


def _train_with_metrics(model, data, output):
    from hf_fsdp_recipes.metrics.metrics_callback import MetricsCallback

    build(str(model), str(data), str(output), callbacks=[MetricsCallback()], steps=2).train()
