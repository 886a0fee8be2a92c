"""A launch is refused if it would start fewer ranks than were asked for, or without devices."""

import pytest
import torch

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.tools.files import find_file
from hf_fsdp_recipes.tools.launch import find_missing_devices, read_launch


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU"])
def test_a_template_with_which_one_rank_would_train_is_refused(kind, tmp_path):
    template = tmp_path / "own.yaml"
    template.write_text(f"distributed_type: '{kind}'\nuse_cpu: true\nnum_processes: 2\n")
    with pytest.raises(ToolError, match="1 rank instead of 2"):
        read_launch(template, [])
    assert read_launch(template, ["--num_processes=1"]).nproc_per_node == 1


@pytest.mark.parametrize("options", ["--num_processes 3 --num_machines 2", "--num_processes 0"])
def test_ranks_that_cannot_be_shared_by_the_nodes_are_refused(options):
    with pytest.raises(ToolError, match="num_processes is"):
        read_launch(find_file("template", "cpu"), options.split())


@pytest.mark.parametrize("template", ["full_shard", "ddp"])
def test_ranks_without_accelerators_are_refused_unless_they_are_cpu_ranks(template, monkeypatch):
    launch = read_launch(find_file("template", template), ["--num_processes=2"])
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    [fault] = find_missing_devices(launch)
    assert "2 ranks need an accelerator each, and this node has 1." in fault
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert not list(find_missing_devices(launch))
