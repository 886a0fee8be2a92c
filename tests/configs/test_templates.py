"""Templates: shipped files equal the rendered ones, every combination is valid, and one check reports all faults."""

import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.configs import templates, validate
from hf_fsdp_recipes.configs.shipped_files import shipped_directory
from hf_fsdp_recipes.errors import TemplateError

ALL = templates.all_templates()
SHIPPED = templates.shipped_templates()
run = CliRunner().invoke


def test_every_combination_has_a_name():
    expected = {
        f"fsdp{version}_{strategy}{offload}{size_wrap}"
        for version in (1, 2)
        for strategy in ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")
        for offload in ("", "_offload")
        for size_wrap in ("", "_size_wrap")
    }
    expected |= {f"no_shard{variant}" for variant in ("", "_offload", "_size_wrap", "_offload_size_wrap")}
    assert sorted(template.name for template in ALL) == sorted(expected | {"fsdp2_cpu", "fsdp1_full_shard_gaudi"})


def test_shipped_files_equal_the_rendered_templates():
    directory = shipped_directory("accelerate_configs")
    assert {file.stem for file in directory.glob("*.yaml")} == {template.name for template in SHIPPED}
    for template in SHIPPED:
        assert (directory / f"{template.name}.yaml").read_text() == templates.render(template), "run `make templates`"


@pytest.mark.parametrize("template", ALL, ids=lambda t: t.name)
def test_accelerate_reads_the_config_and_the_check_finds_nothing(template, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "config.yaml"
    file.write_text(templates.render(template))
    config = load_config_from_file(str(file))
    assert config.distributed_type == "FSDP"
    assert config.num_processes == template.num_processes
    assert validate.find_faults(validate.read_config(file)) == []
    assert validate.read_config(template.name) == validate.read_config(file)


@pytest.mark.parametrize("template", ALL, ids=lambda t: t.name)
def test_header_gives_command_and_choice_and_every_other_value_has_a_comment(template):
    text = templates.render(template)
    header, body = text.split("\n\n")
    assert f"hf-fsdp sft --accelerate_config {template.name} --config RECIPE" in header
    assert all(f"# {line}" in header for note in template.notes for line in note)
    defaults = {
        "compute_environment", "main_training_function", "fsdp_config", "parallelism_config", "num_machines",
        "fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_use_orig_params",
    }  # fmt: skip
    for line in body.splitlines():
        assert "#" in line or line.strip().split(":")[0] in defaults, line


def config_of(name, **changes):
    config = validate.read_config(name)
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
            ["no key fsdp_auto_wrap_polcy in fsdp_config", "Did you mean fsdp_auto_wrap_policy?"],
        ),
        ("fsdp2_full_shard", {"num_procs": 8}, ["no key num_procs", "num_processes?"]),
        ("fsdp2_full_shard", {"fsdp_sharding_strategy": "FULL_SHARD"}, ["an FSDP1 key", "fsdp_reshard_after_forward"]),
        ("fsdp2_full_shard", {"fsdp_use_orig_params": True}, ["an FSDP1 key"]),
        ("fsdp2_full_shard", {"fsdp_state_dict_type": "FULL_STATE_DICT"}, ["rank 0", "SHARDED_STATE_DICT"]),
        ("fsdp1_full_shard", {"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, ["could not resume", "SHARDED_STATE_DICT"]),
        ("fsdp2_full_shard", {"fsdp_cpu_ram_efficient_loading": True}, ["every rank loads the full model"]),
        ("fsdp2_full_shard", {"distributed_type": "MULTI_GPU"}, ["MULTI_GPU", "Set it to FSDP"]),
        ("fsdp2_full_shard", {"num_machines": 3}, ["same number of ranks"]),
        ("fsdp2_full_shard", {"fsdp_auto_wrap_policy": "NO_WRAP"}, ["a single FSDP unit"]),
        ("fsdp2_full_shard", {"fsdp_version": 3}, ["fsdp_version is 3. Set it to 1 or 2."]),
        ("fsdp2_full_shard", {"fsdp_reshard_after_forward": "FULL_SHARD"}, ["true or false"]),
        ("fsdp2_full_shard", {"mixed_precision": "bf17"}, ["bf17"]),
        ("fsdp2_hybrid_shard", {"parallelism_config_dp_shard_size": 4}, ["multiply to 8", "num_processes is 16"]),
        ("fsdp2_hybrid_shard", {"parallelism_config_dp_shrad_size": 4}, ["in parallelism_config", "dp_shard_size?"]),
        ("fsdp2_full_shard", {"mixed_precision": "fp8"}, ["fp8", "never been tested"]),
        (
            "fsdp2_hybrid_shard",
            {"parallelism_config_tp_size": 2},
            ["Tensor parallelism is not supported", "tp_size is 2"],
        ),
        ("fsdp2_hybrid_shard", {"parallelism_config_cp_size": 2}, ["Context parallelism", "cp_size is 2"]),
        ("fsdp2_hybrid_shard", {"parallelism_config_sp_size": 2}, ["Sequence parallelism", "sp_size is 2"]),
        ("fsdp2_full_shard", {"num_processes": 0}, ["num_processes is 0. Set it to at least 1."]),
        ("fsdp2_hybrid_shard", {"main_process_ip": None}, ["main_process_ip is not set", "wait forever"]),
        ("fsdp1_hybrid_shard", {"num_machines": 1}, ["one replica per node"]),
        ("fsdp1_full_shard", {"parallelism_config": {"dp_shard_size": 8}}, ["needs fsdp_version 2"]),
        ("fsdp1_full_shard", {"fsdp_sharding_strategy": "FULL"}, ["one of FULL_SHARD"]),
        ("fsdp2_full_shard_size_wrap", {"fsdp_min_num_params": 0}, ["turns wrapping off"]),
        (
            "fsdp2_full_shard",
            {"fsdp_transformer_layer_cls_to_wrap": ["LlamaAttention", "LlamaMLP"]},
            ["['LlamaAttention', 'LlamaMLP']", "one string"],
        ),
        ("fsdp2_full_shard", {"fsdp_transformer_layer_cls_to_wrap": "A, B"}, ["'A, B'", "without spaces"]),
    ],
)
def test_each_fault_is_reported_with_its_value_and_what_to_change(name, changes, words):
    faults = validate.find_faults(config_of(name, **changes))
    assert any(all(word in fault for word in words) for fault in faults), faults


def test_wrap_class_is_looked_up_in_the_model(tiny_model):
    classes = {type(module).__name__ for module in validate.build_on_meta(str(tiny_model("llama"))).modules()}
    wrong = config_of("fsdp2_full_shard", fsdp_transformer_layer_cls_to_wrap="GPT2Block")
    right = config_of("fsdp2_full_shard", fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer,LlamaMLP")
    (fault,) = validate.find_faults(wrong, classes)
    assert "GPT2Block" in fault and "LlamaDecoderLayer" in fault
    assert validate.find_faults(right, classes) == []


def test_check_command_reports_all_faults_at_once(tmp_path):
    file = tmp_path / "bad.yaml"
    faults = {"fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_use_orig_params": True, "nonsense": 1}
    file.write_text(yaml.safe_dump(config_of("fsdp2_full_shard", **faults)))
    result = run(app, ["config", "check", str(file)])
    assert isinstance(result.exception, TemplateError)
    assert "3 faults" in str(result.exception)


@pytest.mark.parametrize("text", ["a: [", "- a", ""])
def test_file_that_is_not_a_config_is_one_error(tmp_path, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(TemplateError, match=r"bad\.yaml"):
        validate.read_config(file)


@pytest.mark.parametrize("source", ["accelerate_configs/fsdp1_hybrid_shard_offload.yaml", "fsdp1_hybrid_shard_offload"])
def test_template_that_is_not_shipped_is_read_by_its_name(source):
    config = validate.read_config(source)
    assert config["fsdp_config"]["fsdp_sharding_strategy"] == "HYBRID_SHARD"
    assert config["fsdp_config"]["fsdp_offload_params"] is True


def test_file_of_that_name_comes_before_the_template(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed = templates.render(templates.find_template("fsdp2_full_shard")).replace(
        "num_processes: 8", "num_processes: 3"
    )
    (tmp_path / "fsdp2_full_shard.yaml").write_text(changed)
    assert validate.read_config("fsdp2_full_shard")["num_processes"] == 3
    assert run(app, ["config", "show", "fsdp2_full_shard"]).output == changed


def test_missing_file_in_another_directory_is_not_taken_for_a_template(tmp_path):
    with pytest.raises(TemplateError, match="No such file"):
        validate.read_config(tmp_path / "fsdp2_full_shard.yaml")


@pytest.mark.launch
def test_launch_on_several_nodes_without_an_address_fails_at_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    template = shipped_directory("accelerate_configs") / "fsdp2_hybrid_shard.yaml"
    result = subprocess.run(
        [*launch, template, "--main_process_port", "0", script], capture_output=True, text=True, timeout=120
    )
    assert result.returncode != 0
    assert "pass --main_process_ip" in result.stderr.strip().splitlines()[-1]


def test_list_show_and_path():
    listed = run(app, ["config", "list"]).output
    assert [line.split()[0] for line in listed.splitlines()] == [template.name for template in SHIPPED]
    shown = run(app, ["config", "show", "fsdp2_full_shard"]).output
    assert shown == templates.render(templates.find_template("fsdp2_full_shard"))
    assert run(app, ["config", "path"]).output == f"{shipped_directory('accelerate_configs')}\n"


def rendered(*arguments):
    result = run(app, ["config", "render", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("template", [t for t in ALL if not (t.on_cpu or t.on_gaudi)], ids=lambda t: t.name)
def test_every_combination_is_rendered_from_its_options(template):
    options = ["--strategy", template.strategy, "--fsdp-version", str(template.version)]
    options += ["--offload"] * template.is_offloaded + ["--wrap", "size"] * (template.min_num_params is not None)
    assert rendered(*options) == templates.render(template, "FILE")


def test_rendered_config_fits_the_machine_and_the_model(tmp_path):
    config = yaml.safe_load(rendered("fsdp2_hybrid_shard", "--num-machines", "4", "--num-processes", "32"))
    assert config["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 4,
        "parallelism_config_dp_shard_size": 8,
    }
    by_size = yaml.safe_load(rendered("--strategy", "no_shard", "--min-num-params", "5000"))["fsdp_config"]
    assert (by_size["fsdp_version"], by_size["fsdp_min_num_params"]) == (1, 5000)
    file = tmp_path / "mine.yaml"
    classes = "GPT2Attention, GPT2MLP"
    rendered("fsdp2_full_shard_size_wrap", "--wrap", "layer", "--wrap-class", classes, "-o", str(file))
    assert file.read_text().startswith(f"# hf-fsdp sft --accelerate_config {file} --config RECIPE\n")
    fsdp = yaml.safe_load(file.read_text())["fsdp_config"]
    assert fsdp["fsdp_transformer_layer_cls_to_wrap"] == "GPT2Attention,GPT2MLP" and "fsdp_min_num_params" not in fsdp


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nothing"], "no template 'nothing'"),
        (["render", "fsdp2_full_shard", "--num-machines", "3"], "same number of ranks"),
        (["render", "fsdp2_hybrid_shard", "--num-machines", "1"], "On a single node, use full_shard"),
        (["render", "fsdp1_hybrid_shard_zero2", "--num-machines", "1"], "On a single node, use shard_grad_op"),
        (["render", "--strategy", "no_shard", "--fsdp-version", "2"], "no_shard needs FSDP1"),
        (["render", "fsdp2_cpu", "-o", "/nowhere/x"], "Cannot write /nowhere/x: No such file"),
        (["render"], "either a template name or --strategy"),
        (["render", "fsdp2_cpu", "--strategy", "full_shard"], "either a template name or --strategy"),
        (["render", "fsdp2_full_shard", "--wrap", "layer", "--min-num-params", "5"], "needs --wrap size"),
        (["render", "fsdp2_full_shard", "--wrap", "size", "--wrap-class", "GPT2Block"], "ignores the wrap class"),
    ],
)
def test_impossible_combinations_are_rejected(arguments, message):
    with pytest.raises(TemplateError, match=message):
        run(app, ["config", *arguments], catch_exceptions=False)


def test_command_line_imports_neither_torch_nor_accelerate():
    code = (
        "import sys; import hf_fsdp_recipes.cli;"
        "print([m for m in ('torch', 'accelerate', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
    from hf_fsdp_recipes.tools.rehearsal.tiny_recipe import to_cpu_ranks

    config = to_cpu_ranks(config_of(name))
    assert config["fsdp_config"].get("fsdp_sharding_strategy") == strategy
    assert (config["use_cpu"], config["num_machines"], config["num_processes"]) == (True, 1, num_ranks)
    assert validate.find_faults(config) == []
