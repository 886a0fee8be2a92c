"""Upstream code that this package relies on: these tests fail when that code changes."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from hf_fsdp_recipes.errors import PatchError
from tests.ranks.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def parameters(function):
    return tuple(inspect.signature(function).parameters)


def test_cpu_ranks_become_fsdp_ranks_in_accelerate_state():
    from accelerate.state import AcceleratorState, PartialState

    assert "fsdp_plugin" in parameters(AcceleratorState.__init__)
    assert hasattr(PartialState, "_shared_state")


def test_fsdp1_device_and_groups_are_chosen_in_the_same_functions():
    from torch.distributed.fsdp import _flat_param, _init_utils

    assert parameters(_init_utils._get_compute_device)[:3] == ("module", "ignored_params", "device_from_device_id")
    assert parameters(_init_utils._init_intra_and_inter_node_groups) == ("global_process_group", "num_devices_per_node")
    assert {"in_shard", "offset_in_shard", "numel_in_shard", "intra_param_start_idx"} <= set(
        _flat_param._ShardParamInfo._fields
    )


def test_fsdp2_keeps_a_parameter_that_was_replaced_before_the_first_forward():
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    assert "new_param" in inspect.getsource(FSDPParam.reset_sharded_param)


def test_transformers_converts_weights_through_the_same_functions():
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    assert parameters(core_model_loading.revert_weight_conversion) == ("model", "state_dict")
    assert parameters(core_model_loading.rename_source_key)[:5] == (
        "source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict",
    )  # fmt: skip
    assert "model" in parameters(get_model_conversion_mapping)


def test_trainer_asks_for_saves_through_the_flag_that_the_callback_clears():
    from transformers import Trainer

    source = inspect.getsource(Trainer._maybe_log_save_evaluate)
    assert source.index("should_evaluate") < source.index("should_save:")
    assert "self._save_checkpoint" in source
    assert "on_epoch_end" in inspect.getsource(Trainer._run_epoch)
    finalize = inspect.getsource(Trainer._finalize_training)
    assert finalize.index("self.log(metrics)") < finalize.index("_load_best_model") < finalize.index("on_train_end")


@pytest.fixture
def fresh_registry(monkeypatch):
    """The registry, as if no patch had been applied."""
    from hf_fsdp_recipes.patches import registry

    monkeypatch.setattr(registry, "_applied", set())
    return registry


def test_every_patch_finds_its_target():
    from hf_fsdp_recipes.patches import registry

    patches = registry.all_patches()
    assert len({patch.target for patch in patches}) == len(patches)
    for patch in patches:
        patch.find()  # raises PatchError if the upstream code has changed


@pytest.mark.parametrize("feature", ["cpu ranks", "size wrap", "loading", "checkpointing"])
def test_target_that_has_moved_is_one_clear_error_and_nothing_is_patched(monkeypatch, fresh_registry, feature):
    first, *_, last = (patch for patch in fresh_registry.all_patches() if patch.feature == feature)
    first_owner, first_name, before = first.find()
    owner, name, _ = last.find()
    monkeypatch.setattr(owner, name, lambda self, other: None)
    with pytest.raises(PatchError, match=rf"{last.package} .* has no {last.target}.*Install "):
        fresh_registry.apply(feature)
    assert getattr(first_owner, first_name) is before


def test_checkpoint_files_go_through_the_writers_own_file_system():
    from torch.distributed.checkpoint import filesystem

    assert "self.fs.create_stream" in inspect.getsource(filesystem._FileSystemWriter)
    assert "stream.close()" in inspect.getsource(filesystem._write_files_from_queue)


def test_dtensor_keeps_its_shard_in_the_same_attribute():
    import torch
    from torch.distributed.tensor import DTensor

    from hf_fsdp_recipes.patches.torch import set_local_tensor

    assert "_local_tensor" in DTensor.__slots__
    with pytest.raises(PatchError, match=r"local tensor in _local_tensor. Install"):
        set_local_tensor(torch.ones(2), torch.ones(2))


def test_optimizers_of_bitsandbytes_take_one_parameter_at_a_time():
    from bitsandbytes.optim import optimizer

    for owner in (optimizer.Optimizer1State, optimizer.Optimizer2State):
        for step in (owner.init_state, owner.update_step):
            assert parameters(inspect.unwrap(step)) == ("self", "group", "p", "gindex", "pindex")
    source = inspect.getsource(optimizer.Optimizer8bit)
    assert "self.prefetch_state(p)" in source and "self.update_step(group, p, gindex, pindex)" in source


def test_optimizers_of_bitsandbytes_that_step_differently_are_one_clear_error(monkeypatch):
    from bitsandbytes.optim import optimizer
    from transformers import TrainingArguments

    from hf_fsdp_recipes.errors import RecipeError
    from hf_fsdp_recipes.training.sharded_optimizer import sharded_optimizer

    monkeypatch.setattr(optimizer.Optimizer2State, "update_step", lambda self, groups: None)
    with pytest.raises(RecipeError, match=r"update_step takes \['self', 'groups'\].*Install bitsandbytes"):
        sharded_optimizer(TrainingArguments("unused", optim="adamw_8bit", use_cpu=True))


def test_fsdp1_refreshes_its_parameter_views_in_the_same_function():
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    assert parameters(FlatParamHandle._use_sharded_views) == ("self",)
    assert "_use_orig_params" in inspect.getsource(FlatParamHandle.__init__)


def _find_patched():
    """Return the patched functions; runs in a fork of a process that imports the full package (tests/ranks/preload.py)."""
    from hf_fsdp_recipes.patches import registry

    wrapper = registry._wrap(print, print).__code__
    return [patch.target for patch in registry.all_patches() if getattr(patch.find()[2], "__code__", None) is wrapper]


@pytest.mark.ranks
def test_importing_the_package_patches_nothing():
    assert run_ranks(_find_patched, 1) == [[]]


def test_hub_parses_sizes_in_the_same_function():
    from huggingface_hub.serialization._base import parse_size_to_int

    assert parse_size_to_int("5GB") == 5 * 10**9


def test_dcp_keeps_plans_by_a_name_that_can_be_chosen():
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlanner

    assert DefaultSavePlanner(enable_plan_caching=True)._cached_plans_key == "DefaultSavePlanner"
    assert isinstance(SavePlanner._cached_save_plan, dict)


def test_timeout_of_a_process_group_can_be_changed():
    import torch.distributed as dist

    assert parameters(dist.distributed_c10d._set_pg_timeout) == ("timeout", "group")


IMPORT_LATER = """
import importlib.util, sys
from hf_fsdp_recipes.patches import registry
registry.apply("loading")
registry.apply("loading")
assert not {"peft", "trl"} & sys.modules.keys()
assert importlib.util.find_spec("trl") is not None  # asking for a package does not import it
import trl.trainer.utils
from peft.tuners.lora.model import LoraModel
from trl import DPOTrainer
module = sys.modules[DPOTrainer.__module__]
for patched in (trl.trainer.utils.create_model_from_path, module.prepare_fsdp, LoraModel._replace_module):
    assert hasattr(patched, "__wrapped__"), patched
assert not any(isinstance(finder, registry._PatchOnImport) for finder in sys.meta_path)
"""


def test_packages_are_patched_when_they_are_imported_and_not_imported_for_that():
    subprocess.run([sys.executable, "-c", IMPORT_LATER], check=True, timeout=120)
