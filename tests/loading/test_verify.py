"""NaN and infinity are found in every dtype, with one synchronization for all tensors."""

import pytest
import torch

from hf_fsdp_recipes.checkpointing.divergence import check_weights
from hf_fsdp_recipes.errors import DivergenceError
from hf_fsdp_recipes.loading.verify import find_non_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_tensors_are_named(dtype, bad):
    tensors = {name: torch.ones(3, 5, dtype=dtype, requires_grad=True) for name in "abc"}
    tensors["b"].data[2, 4] = bad
    assert find_non_finite(tensors.items()) == ["b"]


def test_every_tensor_is_checked_when_names_repeat():
    assert find_non_finite([("shard", torch.tensor([float("nan")])), ("shard", torch.ones(1))]) == ["shard"]


def test_tensors_without_non_finite_values_pass():
    tensors = [
        torch.empty(0, 4), torch.arange(3), torch.tensor(True), torch.tensor(1.0), torch.ones(4).to(torch.float8_e4m3fn)
    ]  # fmt: skip
    assert find_non_finite((str(number), tensor) for number, tensor in enumerate(tensors)) == []
    assert find_non_finite([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_values_whose_sum_overflows_pass(dtype):
    assert find_non_finite([("large", torch.full((64,), torch.finfo(dtype).max, dtype=dtype))]) == []


def test_weights_are_checked_with_one_synchronization(tmp_path, monkeypatch):
    synchronizations = []
    for name in ("__bool__", "item", "tolist"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, of=original: synchronizations.append(1) or of(self), raising=True
        )
    check_weights([(str(number), torch.ones(4)) for number in range(9)], 3, tmp_path)
    assert len(synchronizations) == 1
    with pytest.raises(DivergenceError, match=r"step 3 \(first tensor: bad\)"):
        check_weights([("good", torch.ones(2)), ("bad", torch.tensor([1.0, float("nan")]))], 3, tmp_path)
