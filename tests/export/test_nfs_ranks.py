"""Exports of ranks on several nodes, recorded and replayed on simulated NFS clients, or written through two FUSE mounts."""

import errno
import filecmp
import os
import random

import pytest
import torch

from tests.export.fuse_nodes import fuse_nodes, is_refused, see_as
from tests.export.nfs_client import Operation, check_pages, phases, replay
from tests.ranks.harness import run_ranks

KINDS = ["llama", "tied", "moe", "lora"]
SIZES = {
    "vocab_size": 2003,
    "hidden_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(kind):
    """Build a sharded model whose large ranges are written directly, and whose small ones share pages."""
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    torch.manual_seed(0)
    if kind == "moe":
        config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=5, head_dim=40)
    else:
        config = LlamaConfig(**SIZES, intermediate_size=500, attention_bias=True, tie_word_embeddings=kind == "tied")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if kind == "lora":
        lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, lora)
    for layer in (model.get_base_model() if kind == "lora" else model).model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _record(output, kinds, ranks_per_node):
    import torch.distributed as dist

    from hf_fsdp_recipes import distributed, export_model
    from hf_fsdp_recipes.checkpointing import direct_io
    from tests.export.nfs_client import record

    dist.init_process_group("gloo")
    distributed.node_id = lambda: f"node {dist.get_rank() // ranks_per_node}"
    direct_io.MIN_DIRECT_BYTES = 16 * 1024  # below the size of eight ranks' ranges
    operations, recorded = record(), {}
    for kind in kinds:
        operations.clear()
        export_model(build(kind), output / kind, merge_adapter=kind == "lora", max_shard_size="3MB")
        recorded[kind] = list(operations)
    return recorded


def record_ranks(output, world_size, ranks_per_node, kinds=KINDS):
    output.mkdir()
    ranks = run_ranks(_record, world_size, output, kinds, ranks_per_node, timeout_seconds=240)
    return {kind: [recorded[kind] for recorded in ranks] for kind in kinds}


def weights(directory):
    return {file.name: file.read_bytes() for file in directory.glob("*.safetensors")}


def with_header_reads(operations, seed):
    """Read the headers while the ranks write, as earlier versions did."""
    chance, split = random.Random(seed), phases(operations[0])
    writing = max(range(len(split)), key=lambda number: sum(op.num_bytes for op in split[number] if op.kind != "read"))
    for file in {op.file for op in split[writing]}:
        at = chance.randrange(len(split[writing]) // 2)
        split[writing][at:at] = [Operation("open", file), Operation("read", file, 0, 8)]
    flat = [op for phase in split for op in (*phase, Operation("barrier"))][:-1]
    return [flat, *operations[1:]]


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node"), [(2, 1), pytest.param(8, 4, marks=pytest.mark.slow)], ids=["2x1", "2x4"]
)
def test_exports_of_two_nodes_are_right_on_nfs(tmp_path, world_size, ranks_per_node):
    nodes = [rank // ranks_per_node for rank in range(world_size)]
    recorded = record_ranks(tmp_path / "nodes", world_size, ranks_per_node)
    for kind, operations in recorded.items():
        check_pages(operations, nodes)
        assert {"direct", "write", "read"} <= {op.kind for own in operations for op in own}
        right = weights(tmp_path / "nodes" / kind)
        assert len(right) > 1
        for seed in range(5):
            assert replay(operations, nodes, seed) == right
            assert replay(with_header_reads(operations, seed), nodes, seed) == right


def test_exports_of_earlier_versions_were_wrong_on_nfs(tmp_path):
    """Ranks on one node write today as earlier versions wrote on any number of nodes."""
    recorded = record_ranks(tmp_path / "node", 2, 2)
    for kind, operations in recorded.items():
        with pytest.raises(AssertionError, match="is written on two nodes"):
            check_pages(operations, [0, 1])
        check_pages(operations, [0, 0])
        right = weights(tmp_path / "node" / kind)
        found = [replay(with_header_reads(operations, seed), [0, 1], seed) for seed in range(8)]
        assert any(files != right for files in found)
        assert replay(operations, [0, 0], 0) == right


def _fail(output, fault, method):
    import torch.distributed as dist

    from hf_fsdp_recipes import distributed, export_model
    from hf_fsdp_recipes.export import borders

    dist.init_process_group("gloo")
    rank, write_on_main = dist.get_rank(), borders.write_on_main
    distributed.node_id = lambda: str(rank)

    def write_wrongly(own, write):
        def wrong(file, offset, content):
            if fault == "full disk":
                raise OSError(errno.ENOSPC, "No space left on device")
            write(file, offset, bytes(len(content)))

        return write_on_main(own, wrong)

    if fault == "other directory":
        os.chdir(output / f"{rank}")
    else:
        borders.write_on_main = write_wrongly
    export_model(build("llama"), "export" if fault == "other directory" else output / "export", method=method)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("full disk", "could not be written: No space left on device"),
        ("wrong bytes", "differs at byte"),
        ("other directory", "some ranks do not see rank 0's"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(tmp_path, fault, words):
    for rank in range(2):
        (tmp_path / f"{rank}").mkdir()
    errors = run_ranks(_fail, 2, tmp_path, fault, "direct", expect_failure=True)
    assert errors[0] == errors[1]
    assert errors[0][0] == "ExportError"
    assert words in errors[0][1]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0", "1"]


def test_ranks_that_see_other_directories_send_to_rank_0(tmp_path):
    for rank in range(2):
        (tmp_path / f"{rank}").mkdir()
    run_ranks(_fail, 2, tmp_path, "other directory", "auto")
    assert list((tmp_path / "1").iterdir()) == []
    assert weights(tmp_path / "0" / "export")


def _export_through_own_mount(mounts, common, kinds):
    import torch.distributed as dist

    from hf_fsdp_recipes import export_model

    dist.init_process_group("gloo")
    see_as(mounts[dist.get_rank()], common)
    for kind in kinds:
        export_model(build(kind), common / kind, merge_adapter=kind == "lora", method="direct", max_shard_size="3MB")


@pytest.mark.skipif(is_refused(), reason="this machine does not let the tests mount a FUSE file system")
def test_exports_through_two_fuse_mounts_are_right(tmp_path):
    (tmp_path / "common").mkdir()
    with fuse_nodes(tmp_path, 2) as (server, mounts):
        run_ranks(_export_through_own_mount, 2, mounts, tmp_path / "common", KINDS, timeout_seconds=200)
        record_ranks(tmp_path / "local", 2, 2)
        for kind in KINDS:
            names = [file.name for file in (tmp_path / "local" / kind).iterdir()]
            assert sorted(names) == sorted(file.name for file in (server / kind).iterdir())
            assert filecmp.cmpfiles(tmp_path / "local" / kind, server / kind, names, shallow=False)[0] == names


@pytest.mark.skipif(is_refused(), reason="this machine does not let the tests mount a FUSE file system")
@pytest.mark.parametrize("keeps_borders", [False, True])
def test_page_written_through_two_fuse_mounts(tmp_path, keeps_borders):
    from hf_fsdp_recipes.export.tensor_files import FileWriter, create_files, plan_files

    values = torch.arange(1, 2001, dtype=torch.float32)
    plan = plan_files([("x", (2000,), torch.float32)], 10**9, "model{suffix}.safetensors")
    with fuse_nodes(tmp_path, 2) as (server, mounts):
        create_files(plan, mounts[0])
        writers = [FileWriter(plan, mount, keeps_borders) for mount in mounts]
        for writer, start in zip(writers, (0, 1000), strict=True):
            writer.write("x", start, values[start : start + 1000])
        for border in writers[0].borders + writers[1].borders:
            writers[0].write_bytes(*border)
        for writer in writers:
            for file in writer._files.values():
                file._write_small()
        for writer in writers:
            writer.close()
        content = (server / "model.safetensors").read_bytes()
    start = plan.tensors["x"].start
    is_right = content[start:] == values.numpy().tobytes()
    assert is_right is keeps_borders
