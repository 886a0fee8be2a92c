"""The template family: committed files equal what the source renders, and the check finds every fault at once."""

import argparse

import pytest
import yaml
from typer.testing import CliRunner

from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.configs import templates
from hf_fsdp_recipes.configs import validate as check
from hf_fsdp_recipes.errors import TemplateError

ALL = templates.all_templates()
run = CliRunner().invoke


def test_family_is_complete():
    expected = {
        f"fsdp{version}_{strategy}{variant}"
        for version in (1, 2)
        for strategy in ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")
        for variant in ("", "_offload", "_size_wrap")
    } | {"no_shard", "fsdp2_cpu", "fsdp1_full_shard_gaudi"}
    assert {template.name for template in ALL} == expected


@pytest.mark.parametrize("template", ALL, ids=lambda t: t.name)
def test_committed_file_is_what_the_source_renders(template):
    file = templates.template_directory() / f"{template.name}.yaml"
    assert file.read_text() == templates.render(template)


def test_no_other_files_are_committed():
    committed = {file.stem for file in templates.template_directory().glob("*.yaml")}
    assert committed == {template.name for template in ALL}


@pytest.mark.parametrize("template", ALL, ids=lambda t: t.name)
def test_accelerate_reads_the_file_and_the_check_finds_nothing(template):
    from accelerate.commands.config.config_args import load_config_from_file

    file = templates.template_directory() / f"{template.name}.yaml"
    config = load_config_from_file(str(file))
    assert config.distributed_type == "FSDP"
    assert config.num_processes == template.num_processes
    assert check.find_faults(check.read_config(file)) == []


@pytest.mark.parametrize("template", ALL, ids=lambda t: t.name)
def test_header_gives_command_and_choice_and_reasons(template):
    text = templates.render(template)
    header = text.split("\n\n")[0]
    assert f"--config_file accelerate_configs/{template.name}.yaml" in header
    assert "recipes/sft.py" in header
    assert "hoose it" in header
    defaults = {
        "compute_environment", "main_training_function", "fsdp_config", "parallelism_config", "fsdp_min_num_params",
        "num_machines", "fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_use_orig_params",
    }  # fmt: skip
    for line in text.split("\n\n", 1)[1].splitlines():
        assert "#" in line or line.strip().split(":")[0] in defaults, line


def test_keys_known_to_the_check_are_accelerates():
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    assert check.TOP_KEYS - {"dynamo_backend", "fp16"} == set(ClusterConfig.__dataclass_fields__)
    flags = {action.dest for action in launch_command_parser()._actions}
    assert {flag for flag in flags if flag.startswith("fsdp_")} | {"fsdp_ignored_modules"} == check.FSDP_KEYS
    assert {flag for flag in flags if flag.startswith("parallelism_config_")} == check.PARALLELISM_KEYS
    assert isinstance(launch_command_parser(), argparse.ArgumentParser)


def config_of(name, **changes):
    config = yaml.safe_load(templates.render(templates.find_template(name)))
    for key, value in changes.items():
        if key.startswith("fsdp_"):
            config["fsdp_config"][key] = value
        elif key.startswith("parallelism_config_"):
            config["parallelism_config"][key] = value
        else:
            config[key] = value
    return config


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "fsdp2_full_shard",
            {"fsdp_auto_wrap_polcy": "X"},
            ["fsdp_auto_wrap_polcy", "did you mean fsdp_auto_wrap_policy"],
        ),
        ("fsdp2_full_shard", {"num_procs": 8}, ["num_procs in the file"]),
        ("fsdp2_full_shard", {"fsdp_sharding_strategy": "FULL_SHARD"}, ["key of FSDP1", "fsdp_reshard_after_forward"]),
        ("fsdp2_full_shard", {"fsdp_use_orig_params": True}, ["key of FSDP1"]),
        ("fsdp2_full_shard", {"fsdp_state_dict_type": "FULL_STATE_DICT"}, ["SHARDED_STATE_DICT"]),
        ("fsdp2_full_shard", {"fsdp_cpu_ram_efficient_loading": True}, ["every rank loads the whole model"]),
        ("fsdp2_full_shard", {"distributed_type": "MULTI_GPU"}, ["Rule: FSDP"]),
        ("fsdp2_full_shard", {"num_machines": 3}, ["all nodes have as many ranks"]),
        ("fsdp2_full_shard", {"fsdp_auto_wrap_policy": "NO_WRAP"}, ["one unit"]),
        ("fsdp2_full_shard", {"fsdp_version": 3}, ["Rule: 1 or 2"]),
        ("fsdp2_full_shard", {"mixed_precision": "bf17"}, ["bf17"]),
        ("fsdp2_hybrid_shard", {"parallelism_config_dp_shard_size": 4}, ["multiply to 8", "num_processes is 16"]),
        ("fsdp1_hybrid_shard", {"num_machines": 1}, ["between nodes"]),
        ("fsdp1_full_shard", {"parallelism_config": {"dp_shard_size": 8}}, ["needs fsdp_version 2"]),
        ("fsdp1_full_shard", {"fsdp_sharding_strategy": "FULL"}, ["one of FULL_SHARD"]),
        ("fsdp2_full_shard_size_wrap", {"fsdp_min_num_params": 0}, ["turns wrapping off"]),
    ],
)
def test_each_fault_is_named_with_value_rule_and_remedy(name, changes, words):
    faults = check.find_faults(config_of(name, **changes))
    assert any(all(word in fault for word in words) for fault in faults), faults


def test_wrap_class_is_looked_up_in_the_model(tiny_model):
    classes = check.module_classes(str(tiny_model("llama")))
    wrong = config_of("fsdp2_full_shard", fsdp_transformer_layer_cls_to_wrap="GPT2Block")
    right = config_of("fsdp2_full_shard", fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer")
    assert any("GPT2Block" in fault and "LlamaDecoderLayer" in fault for fault in check.find_faults(wrong, classes))
    assert check.find_faults(right, classes) == []


def test_check_command_reports_all_faults_at_once(tmp_path, capsys):
    file = tmp_path / "bad.yaml"
    file.write_text(
        yaml.safe_dump(
            config_of("fsdp2_full_shard", fsdp_state_dict_type="FULL_STATE_DICT", fsdp_use_orig_params=True, nonsense=1)
        )
    )
    result = run(app, ["config", "check", str(file)])
    assert isinstance(result.exception, TemplateError)
    assert "3 faults" in str(result.exception)


@pytest.mark.parametrize("text", ["a: [", "- a", ""])
def test_file_that_is_no_config_is_one_error(tmp_path, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(TemplateError, match=r"bad\.yaml"):
        check.read_config(file)


def test_list_show_and_render():
    listed = run(app, ["config", "list"]).output
    assert len(listed.splitlines()) == len(ALL)
    shown = run(app, ["config", "show", "fsdp2_full_shard"]).output
    assert shown == templates.render(templates.find_template("fsdp2_full_shard"))
    rendered = run(
        app, ["config", "render", "fsdp2_hybrid_shard", "--num-machines", "4", "--num-processes", "32"]
    ).output
    config = yaml.safe_load(rendered)
    assert config["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 4,
        "parallelism_config_dp_shard_size": 8,
    }


def test_impossible_wishes_are_refused():
    assert isinstance(run(app, ["config", "show", "nothing"]).exception, TemplateError)
    result = run(app, ["config", "render", "fsdp2_full_shard", "--num-machines", "3"])
    assert isinstance(result.exception, TemplateError)
    result = run(app, ["config", "render", "fsdp2_hybrid_shard", "--num-machines", "1"])
    assert "full_shard" in str(result.exception)


def test_templates_module_needs_neither_torch_nor_accelerate():
    import subprocess
    import sys

    code = (
        "import sys; import hf_fsdp_recipes.cli, hf_fsdp_recipes.configs.templates;"
        "print([m for m in ('torch', 'accelerate') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


@pytest.mark.parametrize(
    ("name", "strategy", "num_ranks"),
    [
        ("fsdp1_hybrid_shard", "FULL_SHARD", 2),
        ("fsdp1_hybrid_shard_zero2", "SHARD_GRAD_OP", 2),
        ("fsdp1_shard_grad_op", "SHARD_GRAD_OP", 2),
        ("fsdp2_hybrid_shard", None, 4),
    ],
)
def test_template_for_cpu_ranks_shards_as_inside_a_node(name, strategy, num_ranks):
    from hf_fsdp_recipes.tools.rehearsal.cpu_variant import to_cpu_ranks

    config = to_cpu_ranks(config_of(name))
    assert config["fsdp_config"].get("fsdp_sharding_strategy") == strategy
    assert (config["use_cpu"], config["num_machines"], config["num_processes"]) == (True, 1, num_ranks)
    assert check.find_faults(config) == []
