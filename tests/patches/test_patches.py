"""The four patches: what they leave alone, and what users see once upstream moves their targets."""

import pkgutil
import sys
from importlib.metadata import version
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch

from hf_fsdp_recipes import ShardedCheckpointCallback
from hf_fsdp_recipes.errors import CheckpointError, PatchError
from hf_fsdp_recipes.saving.run import Run
from hf_fsdp_recipes.upstream import patches
from hf_fsdp_recipes.upstream.versions import TESTED

# Each patch, and what a user calls that needs it.
USES = [
    (patches.FILL_SHARDS, patches.apply_for_loading),
    (patches.WRAP_BY_SIZE, patches.apply_for_loading),
    (patches.TRAINING_LOOP, ShardedCheckpointCallback),
    (patches.CPU_RANKS, patches.enable_cpu_ranks),
]


@pytest.fixture(autouse=True)
def upstream(monkeypatch):
    """Ask for FSDP on CPU ranks; start and end without replacements."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP")
    for variable in patches.HIDDEN_DEVICES:
        monkeypatch.setenv(variable, "")
    for patch, _ in USES:
        holder, name = _find(patch)
        original = getattr(holder, name)
        monkeypatch.setattr(holder, name, getattr(original, patches.MARK, original))


def _find(patch):
    """Return the module or class that holds a patch's target, and the target's name there."""
    owner, _, name = patch.name.rpartition(".")
    return pkgutil.resolve_name(f"{patch.module}:{owner}" if owner else patch.module), name


def _rename(monkeypatch, patch):
    holder, name = _find(patch)
    monkeypatch.setattr(holder, f"{name}_of_a_new_version", getattr(holder, name), raising=False)
    monkeypatch.delattr(holder, name)


def _change_parameters(monkeypatch, patch):
    monkeypatch.setattr(*_find(patch), lambda context, *arguments: None)


def _remove_module(monkeypatch, patch):
    monkeypatch.setitem(sys.modules, patch.module, None)


@pytest.mark.parametrize("change", [_rename, _change_parameters, _remove_module])
@pytest.mark.parametrize(("patch", "use"), USES, ids=lambda value: getattr(value, "name", ""))
def test_a_moved_target_is_one_error_that_says_what_still_works(monkeypatch, patch, use, change):
    change(monkeypatch, patch)
    package = patch.module.partition(".")[0]
    with pytest.raises(PatchError) as error:
        use()
    said = str(error.value)
    assert f"{patch.module}.{patch.name}" in said
    assert version(package) in said
    assert f"{TESTED[package]} is tested" in said
    assert patch.remains in said


def test_a_save_by_other_means_than_the_replaced_method_is_an_error():
    args = SimpleNamespace(save_on_each_node=False, push_to_hub=False)
    state = SimpleNamespace(global_step=4)
    run = Run(ShardedCheckpointCallback(), SimpleNamespace(args=args, state=state), None, "id")
    with pytest.raises(CheckpointError, match="without _save_checkpoint"):
        run.on_save()


MODEL = torch.nn.Linear(2, 2)
BY_LAYER = SimpleNamespace(auto_wrap_policy=None)
TRAINER = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=["another callback"]))
ON_GPUS = SimpleNamespace(_shared_state={}, distributed_type="MULTI_GPU", _mixed_precision="no")


@pytest.mark.parametrize(
    ("patch", "use", "arguments", "keywords"),
    [
        (*USES[0], ("accelerator", MODEL), {}),
        (*USES[1], (BY_LAYER, MODEL), {}),
        (*USES[2], (TRAINER, 1, None, None, None), {}),
        (*USES[3], (ON_GPUS, "no"), {"fsdp_plugin": None}),
        (*USES[3], (ON_GPUS, "no"), {"fsdp_plugin": "a plugin"}),
    ],
)
def test_what_is_not_of_this_package_passes_through(monkeypatch, patch, use, arguments, keywords):
    holder, name = _find(patch)
    original = create_autospec(getattr(holder, name))
    monkeypatch.setattr(holder, name, original)
    use()
    use()
    replaced, before = getattr(holder, name), dict(vars(ON_GPUS))
    assert getattr(replaced, patches.MARK) is original  # once, although it was asked for twice
    replaced(*arguments, **keywords)
    original.assert_called_once_with(*arguments, **keywords)
    assert vars(ON_GPUS) == before
