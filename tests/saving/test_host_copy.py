"""A copy of a state in host memory is the state as it was, whatever is in it."""

import collections
import copy
import threading

import pytest
import torch

from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.metrics import memory
from hf_fsdp_recipes.saving import host_copy
from hf_fsdp_recipes.saving.host_copy import HostCopy

Pair = collections.namedtuple("Pair", "first second")


def make_state():
    weight = torch.arange(12.0).view(3, 4)
    square = torch.randn(3, 3)
    numbers = torch.randn(4, dtype=torch.complex64)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "rows": weight[1:],
            "square": square,
            "transposed": square.t(),
            "numbers": numbers,
            "conjugate": numbers.conj(),
            "expanded": torch.ones(1).expand(5),
            "scalar": torch.tensor(3),
            "empty": torch.empty(0, 4),
            "float8": torch.ones(4).to(torch.float8_e4m3fn),
        },
        "optimizer": {
            "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "seen": {1, 2}, "name": "all"}],
            "bytes": bytearray(b"12"),
            "pair": Pair(torch.ones(2), [1]),
            "queue": collections.deque([torch.ones(2)]),
        },
    }


def change(state):
    state["model"]["weight"].add_(1)
    state["model"]["numbers"].mul_(2)
    state["model"]["square"].zero_()
    group = state["optimizer"]["groups"][0]
    group["lr"] = 0.2
    group["seen"].add(3)
    state["optimizer"]["bytes"].extend(b"3")
    state["optimizer"]["pair"].second.append(2)
    state["optimizer"]["pair"].first.zero_()
    state["optimizer"]["queue"][0].zero_()


def assert_equal(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        torch.testing.assert_close(found.resolve_conj(), expected.resolve_conj(), rtol=0, atol=0)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple | collections.deque):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def test_a_copy_is_the_state_at_that_moment_and_the_next_one_uses_its_memory():
    state, copied = make_state(), HostCopy(1)
    copied.check(state)
    expected = copy.deepcopy(state)
    first = copied.take(state)
    change(state)
    assert_equal(first, expected)
    address = first["model"]["weight"].data_ptr()
    changed = copy.deepcopy(state)
    second = copied.take(state)
    assert_equal(second, changed)
    assert second["model"]["weight"].data_ptr() == address


def test_a_state_of_another_form_gets_other_memory():
    copied = HostCopy(1)
    copied.take({"model": {"weight": torch.ones(4)}})
    state = {"model": {"weight": torch.ones(4, dtype=torch.bfloat16), "new": torch.zeros(2)}}
    assert_equal(copied.take(state), state)


class Wrapped(torch.Tensor):
    """A tensor whose memory is in another tensor, like those of torchao."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        raise NotImplementedError(function)


def test_a_tensor_with_memory_of_its_own_kind_is_an_obstacle():
    state = {"model": {"weight": Wrapped(torch.ones(3))}}
    with pytest.raises(CheckpointError, match="the state has a Wrapped, which has no mem"):
        HostCopy(1).check(state)


def test_too_little_memory_for_all_ranks_of_a_node_is_an_obstacle(monkeypatch):
    monkeypatch.setattr(host_copy, "available_host_bytes", lambda: 12_000_000)
    state = {"weight": torch.ones(1_000_000)}
    HostCopy(1).check(state)
    with pytest.raises(CheckpointError, match=r"needs 0\.0 GB"):
        HostCopy(4).check(state)


@pytest.mark.parametrize(("limit_file", "usage_file", "prefix"), memory.LIMITS)
def test_available_memory_is_that_of_the_tightest_cgroup(tmp_path, limit_file, usage_file, prefix):
    job = tmp_path / "job"
    (job / "step").mkdir(parents=True)
    (job / limit_file).write_text("1000000\n")
    (job / usage_file).write_text("700000\n")
    (job / "memory.stat").write_text(f"{prefix}active_file 100\n{prefix}inactive_file 23\nanon 7\n")
    (job / "step" / limit_file).write_text("max\n")
    left = memory.read_cgroups(tmp_path, "/job/step")
    assert left == [1_000_000 - 700_000 + 123]


class FakeCuda:
    """Counts what is pinned, and refuses to pin more than `limit` tensors."""

    def __init__(self, limit):
        self.limit, self.pinned = limit, {}

    def cudaHostRegister(self, address, num_bytes, flags):
        if len(self.pinned) == self.limit:
            return 2
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0


def test_what_was_pinned_is_unpinned_also_if_nobody_closes_it(monkeypatch):
    cuda = FakeCuda(limit=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    device = torch.device("cpu")
    copied = HostCopy(1)
    tensors = [torch.ones(size) for size in (5, 300_000, 400_000, 500_000)]
    for tensor in tensors[:3]:
        copied._pin(tensor, device)
    assert sorted(cuda.pinned.values()) == [1_200_000, 1_600_000] and copied._can_pin
    copied._pin(tensors[3], device)  # refused
    assert len(cuda.pinned) == 2 and not copied._can_pin
    del copied
    assert cuda.pinned == {}


class Locked(dict):
    """A mapping that cannot be copied by `copy.deepcopy`."""

    def __init__(self, *items):
        super().__init__(*items)
        self.lock = threading.Lock()


def test_a_mapping_of_any_class_is_a_dict_in_the_copy():
    # DCP pickles a tuple whole, and a resume allows no class but a few in pickles.
    weight = torch.ones(2)
    counts = collections.defaultdict(int, steps=1)
    state = {"optimizer": {"groups": (counts, Locked({"weight": weight}))}}
    copied = HostCopy(1).take(state)["optimizer"]["groups"]
    assert [type(mapping) for mapping in copied] == [dict, dict]
    assert copied[0] == {"steps": 1}
    assert copied[1]["weight"] is not weight and torch.equal(copied[1]["weight"], weight)
