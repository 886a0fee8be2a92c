"""`hf-fsdp config`: Accelerate accepts the shipped templates, and faults are reported together."""

import pytest
import yaml
from typer.testing import CliRunner

from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.settings import read_settings
from hf_fsdp_recipes.tools.config import find_faults
from hf_fsdp_recipes.tools.files import find_file, shipped_files
from tests.ranks.harness import template_environment

TEMPLATES = shipped_files("template")
HYBRID = read_settings(find_file("template", "hybrid_shard"))
run = CliRunner().invoke


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda file: file.stem)
def test_accelerate_passes_each_template_on_to_the_ranks(template):
    environment = template_environment(template)
    is_fsdp = template.stem != "ddp"
    assert ("ACCELERATE_USE_FSDP" in environment) == is_fsdp
    assert environment["ACCELERATE_MIXED_PRECISION"] == ("no" if template.stem == "cpu" else "bf16")
    if is_fsdp:
        is_resharded = "zero2" not in template.stem and "grad" not in template.stem
        assert environment["FSDP_VERSION"] == "2"
        assert environment["FSDP_STATE_DICT_TYPE"] == "SHARDED_STATE_DICT"
        assert environment["FSDP_RESHARD_AFTER_FORWARD"] == str(is_resharded).lower()
    assert run(app, ["config", "check", template.stem]).output.endswith("no faults found\n")


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda file: file.stem)
def test_a_template_says_when_to_use_it_and_what_each_value_means(template):
    head, body = template.read_text().split("\n\n", 1)
    assert f"hf-fsdp sft --accelerate_config {template.stem} --config RECIPE" in head
    assert run(app, ["config", "show", template.stem]).output == template.read_text()
    listed = run(app, ["config", "list"]).output.splitlines()
    assert any(line.startswith(f"{template.stem} ") for line in listed)
    for line in body.splitlines():
        assert "#" in line or line.startswith("compute_environment") or line.endswith("_config:"), (
            line
        )
    assert max(map(len, template.read_text().splitlines())) <= 110


def changed(**changes):
    """Return a config with some values changed, in the section that has values of that kind."""
    config = HYBRID | {
        "fsdp_config": dict(HYBRID["fsdp_config"]),
        "parallelism_config": dict(HYBRID["parallelism_config"]),
    }
    for name, value in changes.items():
        prefix = name.partition("_")[0]
        is_section = name in ("fsdp_config", "parallelism_config")
        (config if is_section else config.get(f"{prefix}_config", config))[name] = value
    return config


FAULTS = {  # a change, and what its message says
    "fsdp_version=1": "accelerate to-fsdp2",
    "fsdp_version=two": "fsdp_version is two",
    "fsdp_version=null": "fsdp_version is None",
    "fsdp_config=[a]": "['a'] is ignored",
    "fsdp_config=null": "fsdp_version is None",
    "fsdp_sharding_strategy=FULL_SHARD": "ignored by FSDP2",
    "fsdp_state_dict_type=FULL_STATE_DICT": "Set SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading=true": "load_model needs none",
    "fsdp_auto_wrap_policy=NO_WRAP": "Set TRANSFORMER_BASED_WRAP",
    "fsdp_auto_wrap_polcy=X": "Did you mean fsdp_auto_wrap_policy?",
    "parallelism_config={dp_shard_size: 16}": "Did you mean parallelism_config_dp_shard_size?",
    "num_procs=8": "Did you mean num_processes?",
    "main_process_ip=null": "main_process_ip is missing",
    "distributed_type=MULTI_GPU": "fsdp_config is ignored",
}


@pytest.mark.parametrize("change", FAULTS)
def test_each_fault_is_reported_with_its_value_and_the_cure(change):
    name, _, value = change.partition("=")
    faults = list(find_faults(changed(**{name: yaml.safe_load(value)})))
    assert any(FAULTS[change] in fault for fault in faults), faults


def test_all_faults_are_reported_at_once(tmp_path):
    file = tmp_path / "bad.yaml"
    bad = changed(num_procs=8, fsdp_state_dict_type="FULL_STATE_DICT", distributed_type="MULTI_GPU")
    file.write_text(yaml.safe_dump(bad))
    result = run(app, ["config", "check", str(file)])
    assert result.exit_code == 1 and str(result.exception).startswith(f"{file} has faults:\n  - ")
    assert str(result.exception).count("\n  - ") == 3


@pytest.mark.parametrize("text", ["a: [", "- a", "", "a: \x00", "a: 2024-13-01"])
def test_a_file_that_is_no_config_is_one_error_with_its_name(tmp_path, text):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"bad\.yaml"):
        read_settings(tmp_path / "bad.yaml")
