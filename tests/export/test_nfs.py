"""The rule for exports on NFS: each page is written on one node, and nothing is read before all ranks have closed."""

import pytest
import torch

from hf_fsdp_recipes.checkpointing.direct_io import BLOCK_BYTES, split_at_blocks
from hf_fsdp_recipes.export import borders, write_export
from hf_fsdp_recipes.export.export_plan import MODEL_PATTERN, ShardExport, split_parameters
from hf_fsdp_recipes.export.tensor_files import FileWriter, create_files, plan_files
from hf_fsdp_recipes.loading.shard_layout import row_range
from hf_fsdp_recipes.loading.weight_mapping import set_conversions
from tests.export.nfs_client import Operation, check_pages, record, replay

PAGE = 4096
zeros = torch.zeros(10**7, dtype=torch.bfloat16)


def write(start, content):
    return Operation("write", "x", start, len(content), content)


@pytest.mark.parametrize("reads_while_writing", [True, False])
def test_simulated_clients_share_a_page_only_until_one_has_read_it(reads_while_writing):
    """On NFS, two nodes may write to parts of one page, unless one node's cache holds that page up to date."""
    opened, barrier = Operation("open", "x"), Operation("barrier")
    first = [opened, Operation("truncate", "x", num_bytes=PAGE), barrier, opened]
    first += [Operation("read", "x", 0, 100)] if reads_while_writing else []
    first += [barrier, write(0, b"a" * 100), Operation("close", "x")]
    second = [barrier, opened, barrier, write(100, b"b" * 100), Operation("close", "x")]
    found = {replay([first, second], [0, 1], seed)["x"][:200] for seed in range(20)}
    right = b"a" * 100 + b"b" * 100
    assert (found == {right}) is not reads_while_writing
    assert replay([first, second], [0, 0], 0)["x"][:200] == right  # one node has one cache


@pytest.mark.parametrize(
    ("offset", "num_bytes", "sizes"),
    [
        (0, 2 * BLOCK_BYTES, (0, 2 * BLOCK_BYTES, 0)),
        (5, 10, (10, 0, 0)),
        (5, BLOCK_BYTES - 5, (BLOCK_BYTES - 5, 0, 0)),
        (BLOCK_BYTES - 1, 3, (1, 0, 2)),
        (BLOCK_BYTES - 1, BLOCK_BYTES + 3, (1, BLOCK_BYTES, 2)),
        (0, 7, (0, 0, 7)),
        (0, 0, (0, 0, 0)),
    ],
)
def test_split_at_blocks(offset, num_bytes, sizes):
    content = bytes(n % 251 for n in range(num_bytes))
    parts = split_at_blocks(memoryview(content), offset)
    assert tuple(map(len, parts)) == sizes
    assert b"".join(parts) == content


def model_on_meta(kind):
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    sizes = {"vocab_size": 32003, "num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 16}
    if kind == "moe":
        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=96, num_experts=520, num_key_value_heads=4)
    else:
        config = LlamaConfig(**sizes, intermediate_size=2752, tie_word_embeddings=kind == "tied", attention_bias=True)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    set_conversions(model)
    return model


def shards_of(parameters, rank, num_ranks):
    """Return the shards that FSDP2 gives to a rank, filled with zeros."""
    shards = []
    for name, shape, parts in parameters:
        first, count = row_range(shape, num_ranks, rank)
        shards.append(ShardExport(name, shape, zeros.dtype, first, count, parts, zeros.dtype, lambda _, n: zeros[:n]))
    return shards


@pytest.mark.parametrize("max_shard_size", [10**10, 10**8])
@pytest.mark.parametrize(
    ("kind", "num_nodes", "ranks_per_node"),
    [
        ("llama", 2, 1),
        ("llama", 64, 8),
        ("tied", 2, 4),
        ("moe", 2, 4),
        pytest.param("tied", 64, 8, marks=pytest.mark.slow),
        pytest.param("moe", 64, 8, marks=pytest.mark.slow),
    ],
)
def test_each_page_is_written_on_one_node(kind, num_nodes, ranks_per_node, max_shard_size, tmp_path, monkeypatch):
    """Runs in one process: each rank's writer in turn; rank 0's writer also writes what the others would send."""
    model, num_ranks = model_on_meta(kind), num_nodes * ranks_per_node
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    parameters = [(name, shapes[name], parts) for name, parts in split_parameters(model, shapes).items()]
    stored = [(part.tensor, part.shape, torch.bfloat16) for *_, parts in parameters for part in parts]
    plan = plan_files(stored, max_shard_size, MODEL_PATTERN)
    recorded = record(monkeypatch.setattr, is_dry=True)
    create_files(plan, tmp_path)
    operations, writers = [[*recorded, Operation("barrier")]], []
    operations += [[Operation("barrier")] for _ in range(num_ranks - 1)]
    for rank in range(num_ranks):
        recorded.clear()
        writers.append(FileWriter(plan, tmp_path, keeps_borders=True))
        for chunk in write_export._all_chunks(shards_of(parameters, rank, num_ranks), {}):
            writers[rank].write(*chunk)
        if rank:
            writers[rank].close()
        operations[rank] += recorded
    recorded.clear()
    sent = [border for writer in writers for border in writer.borders]
    for border in sent:
        writers[0].write_bytes(*border)
    writers[0].close()
    operations[0] += recorded
    check_pages(operations, [rank // ranks_per_node for rank in range(num_ranks)])
    written = sum(op.num_bytes for own in operations for op in own if op.kind in ("write", "direct"))
    assert written == sum(plan.num_bytes.values())  # each byte once
    num_ranges = sum(len(found) for writer in writers for found in writer.checksums.values())
    assert sum(len(content) for *_, content in sent) < 2 * PAGE * num_ranges


def test_other_bytes_than_those_sent_are_an_error(tmp_path):
    from hf_fsdp_recipes.errors import ExportError

    (tmp_path / "a").write_bytes(b"0123456789")
    borders.check_borders(tmp_path, [("a", 2, b"234"), ("a", 9, b"9")])
    with pytest.raises(ExportError, match="differs at byte 5 from what rank 0 sent"):
        borders.check_borders(tmp_path, [("a", 2, b"234"), ("a", 5, b"x")])
