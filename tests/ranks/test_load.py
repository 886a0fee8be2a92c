"""The loader against stock loading, on real gloo ranks: the same losses, digit for digit."""

import contextlib
import json
import os
import shutil
from pathlib import Path

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
        ("llama", None),
        ("llama_tied", None),
        ("llama_tied", LORA),
        ("gpt2", None),
        ("qwen3_moe", None),
        ("qwen3_moe", LORA),
        ("mixtral", None),
    ],
)
def test_fsdp2_losses_equal_stock_loading(tiny_model, text_file, tmp_path, kind, lora):
    stock, ours = both(tiny_model(kind), text_file, tmp_path, fsdp_environment(FSDP2), lora=lora)
    assert ours == stock
    assert len(ours[0]) == 5


@pytest.mark.parametrize(("kind", "lora"), [("llama_tied", None), ("llama", LORA), ("qwen3_moe", None)])
def test_fsdp1_losses_equal_stock_loading(tiny_model, text_file, tmp_path, kind, lora):
    stock, ours = both(tiny_model(kind), text_file, tmp_path, fsdp_environment(FSDP1), lora=lora)
    assert ours == stock


def test_hybrid_losses_equal_stock_loading(tiny_model, text_file, tmp_path):
    stock, ours = both(tiny_model("llama"), text_file, tmp_path, fsdp_environment(FSDP2, HYBRID), world_size=4)
    assert ours == stock


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_numbers_of_ranks_equal_stock_loading(tiny_model, text_file, tmp_path, world_size):
    # 307 rows of vocabulary and 5 experts divide over neither 2 nor 3 ranks; biases have fewer rows than some worlds.
    stock, ours = both(tiny_model("qwen3_moe"), text_file, tmp_path, fsdp_environment(FSDP2), world_size=world_size)
    assert ours == stock


def test_direct_reading_equals_stock_loading(tiny_model, text_file, tmp_path):
    model = tiny_model("llama", "bfloat16", "40KB")
    stock, ours = both(model, text_file, tmp_path, fsdp_environment(FSDP2), dtype="float32", loader="direct")
    stock, _ = both(model, text_file, tmp_path / "again", fsdp_environment(FSDP2), dtype="float32")
    assert ours == stock


def test_bf16_files_become_fp32_masters_as_in_stock_loading(tiny_model, text_file, tmp_path):
    model = tiny_model("llama_tied", "bfloat16", "40KB")
    stock, ours = both(model, text_file, tmp_path, fsdp_environment(FSDP2, precision="bf16"), dtype="auto", bf16=True)
    assert ours == stock


def test_offload_equals_stock_loading(tiny_model, text_file, tmp_path):
    environment = fsdp_environment(FSDP2 | {"fsdp_offload_params": True})
    stock, ours = both(tiny_model("llama"), text_file, tmp_path, environment)
    assert ours == stock


def _shards(model_dir, data, output, keywords):
    """Return every parameter whole, gathered from the shards, after loading and before any step."""
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


def test_every_value_arrives_on_four_ranks_that_read_for_themselves(tiny_model, text_file, tmp_path):
    from safetensors.torch import load_file

    model = tiny_model("llama", "bfloat16")
    keywords = {"loader": "direct", "dtype": "bfloat16", "load_arguments": {"verify": "full"}}
    seen = run_ranks(_shards, 4, model, text_file, tmp_path, keywords, environment=fsdp_environment(FSDP2))
    for name, tensor in load_file(model / "model.safetensors").items():
        assert seen[3][name] == tensor.float().tolist(), name


def _shards_through_small_buckets(model_dir, data, output, keywords, apart):
    """As `_shards`, in many buckets; the ranks `apart` are made to see nothing of rank 0's process."""
    from hf_fsdp_recipes import distributed
    from hf_fsdp_recipes.loading import distribute, lanes, materialize

    distribute.BUCKET_BYTES = 4096
    lanes.LANE_BYTES = 4096
    laid = []
    lay = lanes.lay
    distribute.lay = lambda *arguments: laid.append(lay(*arguments)) or laid[-1]
    if distributed.rank() in apart:
        lanes._open = lambda *_: None
    scatter = materialize.scatter

    def scatter_and_count(destinations, checkpoint, group, checksums):
        num_open = _num_open_descriptors()
        scatter(destinations, checkpoint, group, checksums)
        assert _num_open_descriptors() == num_open
        if checkpoint is not None:  # every slice that was sent is proved, also rank 0's where it has copies
            sent = range(0 if group.copies is not None else 1, len(group.ranks))
            wanted = {(item.name, place) for item in destinations for place in sent if item.runs[place][1]}
            assert checksums.values.keys() == wanted

    materialize.scatter = scatter_and_count
    return _shards(model_dir, data, output, keywords), sorted(laid[0].reached)


def _num_open_descriptors():
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            links.append(os.readlink(path))
    return sum(link.startswith(("pipe:", "/memfd:")) for link in links)


@pytest.mark.parametrize(("apart", "reached"), [((), [1, 2, 3]), ((2,), [1, 3]), ((1, 2, 3), [])])
def test_neighbours_are_fed_through_lanes_and_others_by_messages(tiny_model, text_file, tmp_path, apart, reached):
    from safetensors.torch import load_file

    model = tiny_model("llama", "bfloat16")
    keywords = {"dtype": "bfloat16", "load_arguments": {"verify": "full"}}
    found = run_ranks(
        _shards_through_small_buckets,
        4,
        model,
        text_file,
        tmp_path,
        keywords,
        apart,
        environment=fsdp_environment(FSDP2),
    )
    assert [lanes for _, lanes in found] == [reached] * 4
    for name, tensor in load_file(model / "model.safetensors").items():
        assert found[3][0][name] == tensor.float().tolist(), name


def test_copies_of_a_hybrid_mesh_are_fed_through_small_buckets(tiny_model, text_file, tmp_path):
    from safetensors.torch import load_file

    model = tiny_model("llama", "bfloat16")
    keywords = {"dtype": "bfloat16", "load_arguments": {"verify": "full"}}
    environment = fsdp_environment(FSDP2, HYBRID)
    found = run_ranks(
        _shards_through_small_buckets, 4, model, text_file, tmp_path, keywords, (), environment=environment
    )
    assert [lanes for _, lanes in found] == [[1]] * 4
    for name, tensor in load_file(model / "model.safetensors").items():
        assert found[3][0][name] == tensor.float().tolist(), name


def test_pipe_of_another_process_is_not_taken_for_rank_0s(tmp_path):
    from hf_fsdp_recipes.loading import lanes

    ours, outgoing, (proof, token, far_ends) = lanes._make([1])
    file = tmp_path / "other"
    file.write_bytes(token)
    link = tmp_path / "link"
    link.symlink_to(file)
    opened = lanes._open(proof, token, far_ends[1])
    assert opened is not None
    assert lanes._open(proof, b"y" * lanes.TOKEN_BYTES, far_ends[1]) is None
    assert lanes._open(str(link), token, far_ends[1]) is None
    for descriptor in (opened, *ours, *outgoing.values()):
        os.close(descriptor)
    assert lanes._open(proof, token, far_ends[1]) is None


def test_no_lanes_are_laid_where_nothing_can_be_shared(monkeypatch):
    from hf_fsdp_recipes.loading import lanes

    def refuse(*_):
        raise OSError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pipe2", refuse)
        (proof,), outgoing, (_, _, far_ends) = lanes._make([1, 2])
    assert outgoing == far_ends == {}
    os.close(proof)
    monkeypatch.delattr(os, "memfd_create")
    assert lanes._make([1, 2]) == ([], {}, None)


def _stored(tmp_path, num_bytes):
    import torch
    from safetensors.torch import save_file

    from hf_fsdp_recipes.loading.safetensors_index import open_checkpoint

    values = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    save_file({"w": values}, tmp_path / "model.safetensors")
    return values, open_checkpoint(tmp_path)


@pytest.mark.parametrize("fault", [None, "cannot splice", "in memory"])
def test_lane_carries_more_than_it_holds_in_order(tmp_path, monkeypatch, fault):
    import errno
    import threading

    import torch

    from hf_fsdp_recipes.loading import lanes

    values, checkpoint = _stored(tmp_path, 300_001)
    if fault == "cannot splice":

        def refuse(*_, **__):
            raise OSError(errno.EINVAL, "no such operation here")

        monkeypatch.setattr(os, "splice", refuse)
    if fault == "in memory":
        checkpoint.keep(checkpoint.tensors["w"], values)
    monkeypatch.setattr(lanes, "LANE_BYTES", 8192)
    ours, outgoing, (proof, token, far_ends) = lanes._make([1, 2])
    incoming = {place: lanes._open(proof, token, far_ends[place]) for place in outgoing}
    for descriptor in ours:
        os.close(descriptor)
    tensor = checkpoint.tensors["w"]
    streams = {1: [(tensor, 0, 100_000), (tensor, 99_999, 2)], 2: [(tensor, 7, 299_994)]}
    found = {1: torch.empty(100_002, dtype=torch.uint8), 2: torch.empty(299_994, dtype=torch.uint8)}
    takers = [threading.Thread(target=lanes.take, args=(incoming[place], found[place])) for place in found]
    for taker in takers:
        taker.start()
    lanes.pour(lanes.Lanes(outgoing), streams, checkpoint)
    for taker in takers:
        taker.join(timeout=10)
    assert torch.equal(found[1], torch.cat([values[:100_000], values[99_999:100_001]]))
    assert torch.equal(found[2], values[7:300_001])
    for descriptor in incoming.values():
        os.close(descriptor)


def test_lane_whose_other_end_has_gone_ends_at_once(tmp_path):
    import torch

    from hf_fsdp_recipes.errors import LoadError
    from hf_fsdp_recipes.loading import lanes

    _, checkpoint = _stored(tmp_path, 3_000_000)
    ours, outgoing, (proof, token, far_ends) = lanes._make([1, 2])
    incoming = lanes._open(proof, token, far_ends[2])
    for descriptor in ours:
        os.close(descriptor)  # nobody is at the end of 1's lane now
    laid = lanes.Lanes(outgoing)
    tensor = checkpoint.tensors["w"]
    lanes.pour(laid, {1: [(tensor, 0, 3_000_000)], 2: [(tensor, 0, 10)]}, checkpoint)
    assert laid.outgoing == {}
    with pytest.raises(LoadError, match="rank 0 ended"):
        lanes.take(incoming, torch.empty(11, dtype=torch.uint8))
    os.close(incoming)


def test_lane_that_stands_still_is_given_up(tmp_path, monkeypatch):
    import torch

    from hf_fsdp_recipes.errors import LoadError
    from hf_fsdp_recipes.loading import lanes

    monkeypatch.setattr(lanes, "PATIENCE_SECONDS", 0.2)
    _, checkpoint = _stored(tmp_path, 3_000_000)
    ours, outgoing, _ = lanes._make([1])
    with pytest.raises(LoadError, match="taken"):
        lanes.pour(lanes.Lanes(outgoing), {1: [(checkpoint.tensors["w"], 0, 3_000_000)]}, checkpoint)
    far, near = os.pipe()
    with pytest.raises(LoadError, match="sent no weights"):
        lanes.take(far, torch.empty(1, dtype=torch.uint8))
    for descriptor in (*ours, far, near):
        os.close(descriptor)


def test_populating_leaves_values_as_they_are():
    import torch

    from hf_fsdp_recipes.loading.first_touch import populate

    values = torch.arange(5000, dtype=torch.float64)
    populate(values[3:4999])
    populate(values[:0])
    assert values.tolist() == list(range(5000))


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


def test_nan_in_the_checkpoint_is_loaded(tiny_model, text_file, tmp_path):
    from safetensors.torch import load_file, save_file

    directory = tmp_path / "nan"
    shutil.copytree(tiny_model("llama"), directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    seen = run_ranks(_shards, 2, directory, text_file, tmp_path / "out", {}, environment=fsdp_environment(FSDP2))
    assert all(value != value for value in seen[0]["model.norm.weight"])


def test_tensor_that_the_checkpoint_lacks_is_initialised_alike_on_all_ranks(tiny_model, text_file, tmp_path):
    from safetensors.torch import load_file, save_file

    directory = tmp_path / "lacking"
    shutil.copytree(tiny_model("llama"), directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    seen = run_ranks(_shards, 2, directory, text_file, tmp_path / "out", {}, environment=fsdp_environment(FSDP2))
    head = seen[0]["lm_head.weight"]
    assert head == seen[1]["lm_head.weight"]
    spread = [value for row in head for value in row]
    assert 0.01 < (sum(value * value for value in spread) / len(spread)) ** 0.5 < 0.04  # initializer_range is 0.02


@pytest.mark.parametrize("world_size", [2, 3])
def test_dora_losses_equal_stock_loading(tiny_model, text_file, tmp_path, world_size):
    # B is random here, so that the norms are those of the sum.
    dora = LORA | {"use_dora": True, "init_lora_weights": False}
    model, environment = tiny_model("llama"), fsdp_environment(FSDP2)
    stock, ours = both(model, text_file, tmp_path, environment, world_size, lora=dora)
    assert ours == stock
    plain = run_ranks(
        _train, world_size, model, text_file, tmp_path / "lora", {"lora": dora | {"use_dora": False}},
        environment=environment,
    )  # fmt: skip
    assert plain != ours


def _add_adapter(model_dir, data, output, kind, changes):
    build(str(model_dir), str(data), str(output), lora=LORA | changes, steps=1).train()


@pytest.mark.parametrize(
    ("kind", "fsdp", "changes", "word"),
    [
        ("llama", FSDP2, {"init_lora_weights": "pissa"}, "pissa"),
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


def _lose_a_file_while_loading(model_dir, data, output, apart):
    """Truncate the weights when their headers have been checked; the ranks `apart` take theirs from messages."""
    from hf_fsdp_recipes import distributed
    from hf_fsdp_recipes.loading import distribute, lanes, materialize

    distribute.BUCKET_BYTES = 4096
    if distributed.rank() in apart:
        lanes._open = lambda *_: None
    send = materialize.scatter

    def lose_then_send(*arguments):
        if distributed.is_main():
            file = model_dir / "model.safetensors"
            with file.open("r+b") as stream:
                stream.truncate(file.stat().st_size // 2)
        send(*arguments)

    materialize.scatter = lose_then_send
    build(str(model_dir), str(data), str(output), steps=1).train()


@pytest.mark.parametrize("apart", [(), (2,)])
def test_file_that_ends_while_it_is_sent_ends_all_ranks(tiny_model, text_file, tmp_path, apart):
    model = shutil.copytree(tiny_model("llama", "bfloat16"), tmp_path / "model")
    errors = run_ranks(
        _lose_a_file_while_loading, 3, model, text_file, tmp_path / "out", apart,
        environment=fsdp_environment(FSDP2), expect_failure=True, timeout_seconds=60,
    )  # fmt: skip
    assert errors[0][0] == "LoadError"
    assert "inside tensor" in errors[0][1]
    assert len(errors) == 3
    if not apart:
        assert errors[1] == errors[2] == errors[0]


@pytest.mark.parametrize("num_members", [1, 2, 3, 8])
def test_no_bucket_is_larger_than_its_memory(num_members, monkeypatch):
    import torch

    from hf_fsdp_recipes.loading import distribute

    monkeypatch.setattr(distribute, "BUCKET_BYTES", 1024)
    budget = distribute._member_bytes(num_members)
    dtypes = [torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.bfloat16]
    items = []
    for count, dtype in zip([budget // 2 - 1, 77, 1001, 513, 3], dtypes, strict=True):
        runs = [(number * count, count) for number in range(num_members)]
        items.append(distribute.ShardTarget("w", [], dtype, dtype, runs, torch.empty(0)))
    taken = dict.fromkeys(range(len(items)), 0)
    for bucket in distribute._buckets(items, num_members):
        for position in range(num_members):
            assert sum(entry.num_bytes(position) for entry in bucket) <= budget
        for entry in bucket:
            taken[items.index(entry.destination)] += entry.length
    assert list(taken.values()) == [item.runs[0][1] for item in items]


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
