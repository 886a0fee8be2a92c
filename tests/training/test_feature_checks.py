"""Speed and memory features that cannot work are refused before anything is loaded."""

from types import SimpleNamespace

import pytest

from hf_fsdp_recipes.configs.optimizers import is_bitsandbytes_optimizer
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training import feature_checks
from hf_fsdp_recipes.training.arguments import parse_arguments
from hf_fsdp_recipes.training.sharded_optimizer import sharded_optimizer
from tests.training.test_arguments import NEEDED, no_launch  # noqa: F401


@pytest.fixture
def fsdp(monkeypatch):
    def launched_under(version):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", str(version))

    return launched_under


REFUSED_ON_CPUS = {
    "use_liger_kernel": "use_liger_kernel: true needs a GPU, but the ranks run on CPUs",
    "activation_offloading": "activation_offloading: true needs an accelerator, but the ranks run on CPUs",
}


@pytest.mark.parametrize("field", REFUSED_ON_CPUS)
def test_accelerator_features_are_refused_on_cpus(field):
    with pytest.raises(RecipeError, match=REFUSED_ON_CPUS[field]):
        parse_arguments([*NEEDED, f"--{field}", "true"])


def test_flash_on_cpus_is_refused_before_rows_are_read():
    with pytest.raises(RecipeError, match="attention: flash needs a GPU, but the ranks run on CPUs"):
        parse_arguments([*NEEDED, "--attention", "flash"])


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"])
def test_bitsandbytes_optimizers_are_refused_under_fsdp1_only(optimizer, fsdp):
    fsdp(1)
    with pytest.raises(
        RecipeError,
        match=rf"optim: {optimizer} fails to train, save or resume under FSDP1. Use one of adamw_torch_fused",
    ):
        parse_arguments([*NEEDED, "--optim", optimizer])
    fsdp(2)
    training = parse_arguments([*NEEDED, "--optim", optimizer]).training
    optimizer_class, settings = sharded_optimizer(training)
    assert "bitsandbytes" in str(optimizer_class)  # Trainer looks for this name, to keep embeddings in 32 bits
    assert settings["is_paged"] == optimizer.startswith("paged_")


def test_optimizer_with_unshardable_states_is_refused(fsdp):
    fsdp(2)
    with pytest.raises(RecipeError, match=r"optim: ademamix fails to train, .* under FSDP2. Use adamw_8bit or paged_"):
        parse_arguments([*NEEDED, "--optim", "ademamix"])


def test_other_optimizers_stay_with_trainer(fsdp):
    fsdp(2)
    assert sharded_optimizer(parse_arguments([*NEEDED]).training) is None


def test_optimizers_that_are_not_installed_are_refused(monkeypatch):
    monkeypatch.setattr(feature_checks, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="needs bitsandbytes"):
        parse_arguments([*NEEDED, "--optim", "adamw_8bit"])
    with pytest.raises(RecipeError, match="needs torchao"):
        parse_arguments([*NEEDED, "--optim", "adamw_torch_8bit"])


def test_names_of_bitsandbytes_optimizers_are_those_of_transformers():
    from transformers import trainer_optimizer
    from transformers.training_args import OptimizerNames

    upstream = {name.value for name in trainer_optimizer._BITSANDBYTES_OPTIMIZERS}
    assert {name.value for name in OptimizerNames if is_bitsandbytes_optimizer(name.value)} == upstream


def test_blocks_are_compiled_under_fsdp2_only(fsdp, monkeypatch):
    fsdp(1)
    with pytest.raises(RecipeError, match="compile_blocks: true needs FSDP2"):
        parse_arguments([*NEEDED, "--compile_blocks", "true"])
    monkeypatch.setenv(feature_checks.REGIONAL_COMPILATION, "true")
    with pytest.raises(RecipeError, match="cannot wrap the blocks of an FSDP1 model"):
        parse_arguments([*NEEDED, "--torch_compile", "true"])
    fsdp(2)
    assert parse_arguments([*NEEDED, "--compile_blocks", "true"]).recipe.compile_blocks


def test_padding_free_rows_that_would_not_be_truncated_are_refused():
    with pytest.raises(RecipeError, match=r"padding_free: true ignores max_length: 1024.*Set max_length: null"):
        parse_arguments([*NEEDED, "--padding_free", "true"])
    assert parse_arguments([*NEEDED, "--padding_free", "true", "--packing", "true"]).training.padding_free


def test_recomputing_layers_twice_is_refused(fsdp, monkeypatch):
    fsdp(2)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    with pytest.raises(RecipeError, match="recompute layers twice"):
        parse_arguments([*NEEDED])
    assert parse_arguments([*NEEDED, "--gradient_checkpointing", "false"])


def test_all_errors_are_reported_at_once():
    with pytest.raises(RecipeError, match=r"activation_offloading.*use_liger_kernel"):
        parse_arguments([*NEEDED, "--use_liger_kernel", "--activation_offloading"])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FSDP_OFFLOAD_PARAMS": "true", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 4),
        ({"FSDP_OFFLOAD_PARAMS": "true", "OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"FSDP_OFFLOAD_PARAMS": "false", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, None),
    ],
    ids=["the launcher's thread", "a choice", "no offload"],
)
def test_offloaded_optimizer_uses_the_rank_s_share_of_the_cores(variables, expected, monkeypatch):
    chosen = []
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(feature_checks, "num_cores", lambda: 8)
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    feature_checks.use_cores_for_offload(SimpleNamespace(use_cpu=False))
    assert chosen == ([] if expected is None else [expected])
