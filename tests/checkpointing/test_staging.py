"""The staged copy does not change with the training state, and later copies reuse its memory."""

import torch

from hf_fsdp_recipes.checkpointing.staging import HostStaging


def state():
    return {
        "weight": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)),
        "inner": {"step": torch.tensor(3.0), "moments": [torch.ones(4, dtype=torch.bfloat16)], "count": 7},
        "empty": torch.empty(0, 5),
        "name": "adam",
    }


def test_copy_equals_the_state_and_stays_when_it_changes():
    original = state()
    copy = HostStaging().copy(original)
    original["weight"].data.zero_()
    original["inner"]["moments"][0].zero_()
    assert torch.equal(copy["weight"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(copy["inner"]["moments"][0], torch.ones(4, dtype=torch.bfloat16))
    assert (copy["inner"]["step"].item(), copy["inner"]["count"], copy["name"]) == (3.0, 7, "adam")
    assert copy["empty"].shape == (0, 5)
    assert not copy["weight"].requires_grad


def test_next_copy_takes_the_same_memory():
    staging, original = HostStaging(), state()
    first = staging.copy(original)["weight"].data_ptr()
    original["weight"].data.add_(1)
    again = staging.copy(original)["weight"]
    assert again.data_ptr() == first
    assert torch.equal(again, original["weight"])


def test_state_that_has_grown_is_copied_in_full():
    staging, original = HostStaging(), state()
    staging.copy(original)
    original["weight"] = torch.ones(5, 3)
    original["new"] = torch.ones(2)
    copy = staging.copy(original)
    assert copy["weight"].shape == (5, 3)
    assert torch.equal(copy["new"], torch.ones(2))
