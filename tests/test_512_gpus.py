"""512 ranks load, save and export every element of Llama 3 70B and 405B once. Simulated in one process, with models on meta.

With torch's fake process group, a process is one rank of 512 and holds that rank's shards. `World.move_to` changes the rank.
`pytest -s` prints what planning costs on one rank.
"""

import math
import pickle
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing.dcp_writer import CachedPlanner, forget_plans
from hf_fsdp_recipes.checkpointing.direct_io import BLOCK_BYTES
from hf_fsdp_recipes.export import from_model, tensor_files, write_export
from hf_fsdp_recipes.export.slices import local_slices
from hf_fsdp_recipes.export.tensor_files import FileWriter, plan_files
from hf_fsdp_recipes.loading import distribute, materialize
from hf_fsdp_recipes.loading.build_on_meta import build_on_meta
from hf_fsdp_recipes.loading.checkpoint_source import CheckpointSource
from hf_fsdp_recipes.loading.read_ranges import byte_ranges
from hf_fsdp_recipes.loading.safetensors_index import SafetensorsIndex, StoredTensor
from hf_fsdp_recipes.loading.weight_mapping import WeightMapping

NUM_RANKS, NUM_NODES = 512, 64
MAX_PLANNING_SECONDS = 10  # processor time on one rank; much more than needed
# As in the config.json of Meta-Llama-3-70B and Llama-3.1-405B.
COMMON = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
SIZES = {
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
NUM_PARAMETERS = {"70B": 70_553_706_496, "405B": 405_853_388_800}
COMPLETE = [pytest.mark.slow, pytest.mark.timeout(1800)]
# (model, layers, replicas); all layers have the same shapes, so a few layers are as good a test as all.
WORLDS = [
    ("70B", 2, 1),
    ("70B", 2, NUM_NODES),
    ("405B", 2, 8),
    pytest.param("70B", 80, 1, marks=COMPLETE),
    pytest.param("405B", 126, 1, marks=COMPLETE),
]
zeros = torch.zeros(write_export.CHUNK_BYTES // 2, dtype=torch.bfloat16)


class World:
    """One rank's view of a bf16 model on meta that FSDP2 shards across 512 ranks, in one or several replicas."""

    def __init__(self, size, num_layers, num_replicas, rank=0):
        from torch.distributed.fsdp import fully_shard
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
        self.rank, self.num_shards = rank, NUM_RANKS // num_replicas
        shape = (num_replicas, self.num_shards) if num_replicas > 1 else (NUM_RANKS,)
        self.num_dimensions = len(shape)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        self.model = build_on_meta(llama_config(size, num_layers), torch.bfloat16)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.parameters = dict(self.model.named_parameters())
        self.num_elements = {name: parameter.numel() for name, parameter in self.parameters.items()}

    @property
    def coordinate(self):
        return divmod(self.rank, self.num_shards)[-self.num_dimensions :]

    def move_to(self, rank):
        """Become another rank, with shards of the shapes that torch computes for that rank."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        self.rank = rank
        shards = {}
        for parameter in self.parameters.values():
            if parameter.shape not in shards:
                shape, _ = compute_local_shape_and_global_offset(parameter.shape, self.mesh, parameter.placements)
                shards[parameter.shape] = torch.empty(shape, dtype=parameter.dtype, device="meta")
            parameter._local_tensor = shards[parameter.shape]

    def ranks(self):
        """Become each rank in turn."""
        for rank in range(NUM_RANKS):
            self.move_to(rank)
            yield rank

    def export_plan(self):
        return from_model._describe(self.model, "unused", None, None, None)

    def file_plan(self, export=None):
        export = export or self.export_plan()
        return plan_files(write_export._in_saved_order(export), 5 * 10**9, export.pattern)

    def source(self):
        """Return the planned files of an export as a checkpoint to load."""
        stored = {
            name: StoredTensor(
                name, Path(planned.file), planned.dtype, planned.shape, planned.start, num_bytes(planned)
            )
            for name, planned in self.file_plan().tensors.items()
        }
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        ranges, unexpected = WeightMapping(self.model).to_parameters({n: t.shape for n, t in stored.items()}, shapes)
        assert not unexpected
        return CheckpointSource("files", SafetensorsIndex(stored.values()), stored, ranges)

    def save_plan(self):
        planner = CachedPlanner("model")
        planner.set_up_planner({"model": self.parameters}, is_coordinator=self.rank == 0)
        return planner, planner.create_local_plan()


def llama_config(size, num_layers):
    from transformers import LlamaConfig

    return LlamaConfig(**COMMON | SIZES[size] | {"num_hidden_layers": num_layers})


def num_bytes(tensor):
    return math.prod(tensor.shape) * tensor.dtype.itemsize


@pytest.fixture
def make_world(monkeypatch):
    """Return a function that makes a World and uses its rank as the rank of this process."""

    def make(*arguments):
        world = World(*arguments)
        monkeypatch.setattr(distributed, "rank", lambda: world.rank)
        # Patch the class, not one mesh, because torch's caches hold meshes of earlier tests.
        monkeypatch.setattr(DeviceMesh, "get_coordinate", lambda self: world.coordinate)
        monkeypatch.setattr(DeviceMesh, "_sym_get_coordinate", lambda self, index: world.coordinate[index], False)
        monkeypatch.setattr(distributed, "patient_group", lambda: None)
        return world

    forget_plans()
    yield make
    forget_plans()
    dist.destroy_process_group()


class Coverage:
    """Collects ranges (first, count) by key."""

    def __init__(self):
        self.ranges = defaultdict(list)

    def add(self, key, first, count):
        if count:
            self.ranges[key].append((first, count))

    def check(self, sizes):
        """Check that the ranges of each key follow each other from 0 to the key's size."""
        assert self.ranges.keys() == sizes.keys()
        for key, ranges in self.ranges.items():
            end = 0
            for first, count in sorted(ranges):
                assert first == end, f"{key}: {'gap' if first > end else 'overlap'} at {min(first, end):,}"
                end = first + count
            assert end == sizes[key]

    @property
    def num_ranges(self):
        return sum(map(len, self.ranges.values()))


@pytest.mark.parametrize(
    "ranges", [[(0, 2), (3, 1)], [(0, 2), (1, 3)], [(0, 3)], [(1, 3)], [(0, 4), (0, 4)], [(0, 5)], []]
)
def test_gaps_and_overlaps_are_found(ranges):
    coverage = Coverage()
    for first, count in ranges:
        coverage.add("a", first, count)
    with pytest.raises(AssertionError):
        coverage.check({"a": 4})


def data_bytes(plan):
    """Return the bytes of each file after its header."""
    return {file: plan.num_bytes[file] - len(header) for file, header in plan.headers.items()}


@pytest.mark.parametrize(("size", "num_layers", "num_replicas"), WORLDS)
def test_every_element_is_loaded_once_per_replica(make_world, size, num_layers, num_replicas):
    world = make_world(size, num_layers, num_replicas)
    source, plan = world.source(), world.file_plan()
    elements, file_bytes = Coverage(), Coverage()
    for rank in world.ranks():
        replica = rank // world.num_shards
        for name, parameter in world.parameters.items():
            target = materialize._shard_target(name, parameter, source)
            count = target.local.numel()
            assert target.num_elements == parameter.numel()
            elements.add((replica, name), target.first, count)
            for tensor, start, length in byte_ranges(source.index, target.ranges, target.first, count):
                header = len(plan.headers[tensor.file.name])
                file_bytes.add((replica, tensor.file.name), tensor.start - header + start, length)
    elements.check({(r, name): n for r in range(num_replicas) for name, n in world.num_elements.items()})
    file_bytes.check({(r, file): n for r in range(num_replicas) for file, n in data_bytes(plan).items()})
    print(f"\nload: {elements.num_ranges:,} ranges")


@pytest.mark.parametrize(("size", "num_layers", "num_replicas"), WORLDS)
def test_rank_0_sends_every_element_once(make_world, size, num_layers, num_replicas):
    """One rank is enough, because the buckets do not depend on a rank's shards."""
    world = make_world(size, num_layers, num_replicas)
    source, elements, num_buckets = world.source(), Coverage(), 0
    targets = [materialize._shard_target(name, parameter, source) for name, parameter in world.parameters.items()]
    for bucket in distribute._buckets([(target, 0, target.num_elements) for target in targets]):
        num_buckets += 1
        for piece in bucket:
            elements.add(piece.target.name, piece.first, piece.count)
    elements.check(world.num_elements)
    print(f"\nload through rank 0: {num_buckets:,} buckets")


@pytest.mark.parametrize(("size", "num_layers", "num_replicas"), WORLDS)
def test_every_element_is_saved_once(make_world, size, num_layers, num_replicas):
    """Holds with replicas too. A loading rank finds each element of its shards once in the saved chunks."""
    from torch.distributed.checkpoint import DefaultLoadPlanner

    world = make_world(size, num_layers, num_replicas)
    planner, _ = world.save_plan()
    plans = [world.save_plan()[1] for _ in world.ranks()]
    started = time.process_time()
    final_plans, metadata = planner.create_global_plan(plans)
    seconds = time.process_time() - started
    elements = Coverage()
    for plan in final_plans:
        for item in plan.items:
            offsets, sizes = item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes
            assert not any(offsets[1:])
            assert sizes[1:] == item.tensor_data.size[1:]
            elements.add(item.index.fqn.removeprefix("model."), offsets[0] * math.prod(sizes[1:]), math.prod(sizes))
    elements.check(world.num_elements)
    print(f"\nsave: {elements.num_ranges:,} chunks; rank 0's first plan for all ranks {seconds:.1f} s")

    world.move_to(NUM_RANKS - 2)
    loading = DefaultLoadPlanner()
    loading.set_up_planner({"model": world.parameters}, metadata)
    found = defaultdict(int)
    for item in loading.create_local_plan().items:
        found[item.dest_index.fqn.removeprefix("model.")] += math.prod(item.lengths)
    assert found == {name: p._local_tensor.numel() for name, p in world.parameters.items() if p._local_tensor.numel()}


def shards_of(world, plan):
    """Return this rank's shards for the export, filled with zeros: another rank's plan with this rank's ranges."""
    slices = local_slices(world.model)
    return [
        replace(
            shard, first=slices[shard.name].first, count=slices[shard.name].values.numel(), read=lambda _, n: zeros[:n]
        )
        for shard in plan.shards
    ]


class RecordingFile:
    """A file that records only the offset and length of each write."""

    def __init__(self, path):
        self.name, self.writes = path.name, []

    def write(self, content, offset, buffer):
        self.writes.append((offset, len(content)))

    def close(self):
        """Do nothing."""


@pytest.mark.parametrize(("size", "num_layers", "num_replicas"), WORLDS)
def test_every_byte_is_exported_once_and_every_page_on_one_node(
    make_world, size, num_layers, num_replicas, monkeypatch
):
    world = make_world(size, num_layers, num_replicas)
    monkeypatch.setattr(tensor_files, "DirectFile", RecordingFile)
    monkeypatch.setattr(tensor_files.xxhash, "xxh3_64_hexdigest", lambda content: "")
    monkeypatch.setattr(write_export, "is_finite", lambda values: True)
    export, plan = world.export_plan(), world.file_plan()
    file_bytes, border_bytes = Coverage(), 0
    for _ in world.ranks():
        writer = FileWriter(plan, Path(), keeps_borders=True)
        for chunk in write_export._all_chunks(shards_of(world, export), {}):
            writer.write(*chunk)
        for file, start, content in writer.borders:  # rank 0 writes borders and headers
            file_bytes.add(file, start - len(plan.headers[file]), len(content))
            border_bytes += len(content)
        for name, file in writer._files.items():
            for offset, length in file.writes:
                # Each byte is written once, so a page that one rank writes in full is written on one node only.
                assert offset % BLOCK_BYTES == length % BLOCK_BYTES == 0
                file_bytes.add(name, offset - len(plan.headers[name]), length)
    file_bytes.check(data_bytes(plan))
    print(
        f"\nexport, direct: {file_bytes.num_ranges:,} writes, of which rank 0 writes {border_bytes / 1e9:.2f} GB for all"
    )


@pytest.mark.parametrize(("size", "num_layers", "num_replicas"), WORLDS)
def test_rank_0_receives_every_element_once(make_world, size, num_layers, num_replicas, monkeypatch):
    """In an export with `gather`, each rank sends the messages that rank 0 expects from it."""
    world = make_world(size, num_layers, num_replicas)
    sent, received, elements = [], [], Coverage()
    monkeypatch.setattr(write_export, "is_finite", lambda values: True)
    monkeypatch.setattr(dist, "isend", lambda values, **_: sent.append(values.numel()))
    monkeypatch.setattr(dist, "irecv", lambda values, **_: received.append(values.numel()))
    # Content is neither copied nor read.
    monkeypatch.setattr(
        write_export._Piece, "find", lambda piece, _: torch.empty(piece.count, dtype=piece.dtype, device="meta")
    )
    export, ranges = world.export_plan(), []
    for rank in world.ranks():
        shards = shards_of(world, export)
        ranges.append([(shard.first, shard.count) for shard in shards])
        if rank:
            assert write_export._send_chunks(shards, {}) is None

    class Writer:
        def write(self, name, first, values):
            elements.add(name, first, values.numel())

    world.move_to(0)
    assert write_export._write_received(shards_of(world, export), ranges, Writer(), {}) is None
    elements.check(world.num_elements)
    assert sent == received
    print(f"\nexport, gather: {len(received):,} messages")


@pytest.mark.parametrize(
    ("size", "num_replicas"),
    [("70B", NUM_NODES), *(pytest.param("405B", n, marks=pytest.mark.slow) for n in (1, NUM_NODES))],
)
def test_the_units_of_the_planner_are_the_model(make_world, size, num_replicas):
    from hf_fsdp_recipes.configs.strategy import Strategy
    from hf_fsdp_recipes.tools.planner.fsdp_units import find_units
    from hf_fsdp_recipes.tools.planner.meta_model import build_meta_model
    from hf_fsdp_recipes.tools.planner.training_job import Cluster, TrainingJob

    num_layers = SIZES[size]["num_hidden_layers"]
    world = make_world(size, num_layers, num_replicas)
    strategy = Strategy(sharding="hybrid_shard" if num_replicas > 1 else "full_shard")
    job = TrainingJob(strategy, Cluster(NUM_RANKS, NUM_RANKS // NUM_NODES))
    units = find_units(build_meta_model(llama_config(size, num_layers), job), job)
    planned = [parameter for unit in units for parameter in unit.parameters]
    assert sorted(p.name for p in planned) == sorted(world.parameters)
    assert sum(p.num_elements for p in planned) == NUM_PARAMETERS[size]
    # Rank 0 has the largest shards.
    assert all(p.num_shard_elements == world.parameters[p.name].to_local().numel() for p in planned)
    print(f"\nplanner: {len(units)} units")


@pytest.mark.parametrize(
    ("size", "num_replicas", "rank"),
    [
        ("70B", 1, 510),
        *(pytest.param("405B", *where, marks=pytest.mark.slow) for where in ((1, 0), (1, 511), (NUM_NODES, 13))),
    ],
)
def test_planning_on_one_rank_is_fast(make_world, size, num_replicas, rank):
    """The process group is created with this rank, which also shows that `move_to` gives the same shards."""
    world = make_world(size, SIZES[size]["num_hidden_layers"], num_replicas, rank)
    shapes = {name: parameter._local_tensor.shape for name, parameter in world.parameters.items()}
    seconds, lengths = {}, {}

    def measure(what, plan):
        started = time.process_time()
        made = plan()
        seconds[what] = time.process_time() - started
        return made

    source = world.source()
    sharded, _, _ = measure("load", lambda: materialize._allocate(world.model, source, torch.device("meta")))
    measure("buckets", lambda: list(distribute._buckets([(target, 0, target.num_elements) for target in sharded])))
    _, plan = measure("save", world.save_plan)
    export = measure("export", world.export_plan)
    files = measure("files", lambda: world.file_plan(export))
    lengths["save"] = len(pickle.dumps(plan))
    lengths["gather"] = len(pickle.dumps([(shard.first, shard.count) for shard in export.shards]))
    lengths["headers"] = sum(map(len, files.headers.values()))
    print(f"\n{size}, {num_replicas} replicas, rank {rank}: {len(sharded)} tensors, {len(files.headers)} files")
    print(*(f"{what} {value:.2f} s" for what, value in seconds.items()), sep=", ")
    print(*(f"{what} {value:,} bytes" for what, value in lengths.items()), sep=", ")
    assert max(seconds.values()) < MAX_PLANNING_SECONDS
    world.move_to(rank)
    assert shapes == {name: parameter._local_tensor.shape for name, parameter in world.parameters.items()}
