"""The planner, compared with published figures and with real FSDP; and the output of the command."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from benchmarks.published_guide import GuidePlanner, guide_job
from hf_fsdp_recipes.checkpointing import disk_estimate
from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.configs.shipped_files import read_recipe
from hf_fsdp_recipes.configs.strategy import Strategy, find_strategy
from hf_fsdp_recipes.configs.templates import all_templates
from hf_fsdp_recipes.errors import PlanError, RecipeError
from hf_fsdp_recipes.precision import parse_dtype
from hf_fsdp_recipes.tools.planner.communication import estimate_traffic, step_flops
from hf_fsdp_recipes.tools.planner.fsdp_units import find_last_layer, find_units
from hf_fsdp_recipes.tools.planner.host_memory import estimate_host_memory
from hf_fsdp_recipes.tools.planner.job_options import to_options
from hf_fsdp_recipes.tools.planner.memory_planner import SCALES, MemoryPlanner
from hf_fsdp_recipes.tools.planner.meta_model import build_meta_model, list_parameters
from hf_fsdp_recipes.tools.planner.plan_table import format_plan
from hf_fsdp_recipes.tools.planner.step_trace import trace_step
from hf_fsdp_recipes.tools.planner.suggestions import (
    compare_strategies,
    find_changes,
    find_smallest_change,
    suggest,
)
from hf_fsdp_recipes.tools.planner.training_job import Cluster, TrainingJob
from hf_fsdp_recipes.units import format_bytes, parse_bandwidth, parse_bytes
from tests.conftest import tiny_config
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.sharded_units import units_of
from tests.recipes.launching import ROOT

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
LLAMA2_7B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
FOUR_LAYERS = LLAMA2_7B | {"num_hidden_layers": 4}
EIGHT_LAYERS = LLAMA2_7B | {"num_hidden_layers": 8}
LLAMA2_70B = LLAMA2_7B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
LLAMA31_405B = LLAMA | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
GB = 1e9
ONE_RANK = Cluster(1, 1)
run = CliRunner().invoke


def llama(values: dict):
    from transformers import LlamaConfig

    return LlamaConfig(**{key: value for key, value in values.items() if key not in ("model_type", "architectures")})


@pytest.fixture(scope="module")
def planners():
    made: dict[tuple, MemoryPlanner] = {}

    def get(name: str, values: dict, kind: type[MemoryPlanner] = MemoryPlanner) -> MemoryPlanner:
        if (name, kind) not in made:
            made[name, kind] = kind(llama(values))
        return made[name, kind]

    return get


@pytest.mark.parametrize(
    ("name", "values", "offload", "batch", "valley_gb", "peak_gb"),
    [
        ("7B", LLAMA2_7B, False, 10, 8.0, 74.0),
        ("7B", LLAMA2_7B, True, 10, 1.4, 68.7),
        ("70B", LLAMA2_70B, True, 2, 0.3, 72.3),
    ],
)
def test_published_guide_is_predicted_within_one_percent(planners, name, values, offload, batch, valley_gb, peak_gb):
    plan = planners(name, values, GuidePlanner).plan(guide_job(is_offloaded=offload, batch=batch))
    assert plan.peak_bytes / GB == pytest.approx(peak_gb, rel=0.01)
    assert plan.valley_bytes / GB == pytest.approx(valley_gb, abs=0.1)  # published with at most one decimal
    assert plan.fits


@pytest.mark.slow
def test_70b_does_not_fit_8_gpus_without_offload_even_at_batch_1(planners):
    assert not planners("70B", LLAMA2_70B, GuidePlanner).plan(guide_job(batch=1)).fits


@pytest.mark.slow
def test_70b_needs_a_paged_optimizer_on_one_node_but_not_on_two(planners):
    """Settings of the blog on fine-tuning Llama 2 70B: fp32 master weights, bf16 compute, 2048 tokens, checkpointing."""
    planner = planners("70B", LLAMA2_70B)
    job = TrainingJob(Strategy(version=1), cluster=Cluster(8, 8), length=2048, loss="model", attention="flash")
    job = job.replace(reduce_dtype=torch.bfloat16)  # as Accelerate does
    assert not planner.plan(job).fits
    assert planner.plan(job.replace(optimizer="paged_adamw_32bit")).fits
    assert planner.plan(job.replace(num_gpus=16)).fits


@pytest.mark.slow
def test_planning_405b_on_64_gpus_takes_less_than_20_seconds_of_one_core(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA31_405B))
    start = time.process_time()
    result = run(app, ["plan", "--model", str(file), "--gpus", "64", "--length", "4096", "--json"])
    assert time.process_time() - start < 20
    found = json.loads(result.output)
    assert found["num_parameters"] == 405_853_388_800
    assert found["fits"] is False
    assert found["changes"][-1]["fits"] is True
    assert result.exit_code == 1


TWO_CLASSES = {"fsdp_transformer_layer_cls_to_wrap": "LlamaAttention,LlamaMLP"}
BY_SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 3000}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fsdp", "strategy", "kind", "lora_rank"),
    [
        (FSDP2, Strategy(), "llama", 0),
        (FSDP2, Strategy(), "llama_tied", 0),
        (FSDP2, Strategy(), "llama", 4),
        (FSDP2 | BY_SIZE, Strategy(min_num_params=3000), "qwen3_moe", 0),
        (FSDP2 | BY_SIZE, Strategy(min_num_params=3000), "qwen3_moe", 4),
        (FSDP2 | TWO_CLASSES, Strategy(wrap_class="LlamaAttention,LlamaMLP"), "llama", 0),
        (FSDP1 | TWO_CLASSES, Strategy(version=1, wrap_class="LlamaAttention,LlamaMLP"), "llama", 0),
        (FSDP1, Strategy(version=1), "llama", 0),
        (FSDP1, Strategy(version=1), "llama", 4),
        (FSDP1 | BY_SIZE, Strategy(version=1, min_num_params=3000), "llama_tied", 0),
    ],
    ids=[
        "fsdp2",
        "fsdp2 tied",
        "fsdp2 lora",
        "fsdp2 by size",
        "fsdp2 by size lora",
        "fsdp2 classes",
        "fsdp1 classes",
        "fsdp1",
        "fsdp1 lora",
        "fsdp1 by size",
    ],
)
def test_units_match_what_accelerate_shards(fsdp, strategy, kind, lora_rank):
    found = run_ranks(units_of, 2, kind, lora_rank, environment=fsdp_environment(fsdp))
    job = TrainingJob(
        strategy,
        cluster=Cluster(2, 2),
        mixed_precision=None,
        loss="model",
        gradient_checkpointing=False,
        lora_rank=lora_rank,
    )
    found_units = find_units(build_meta_model(tiny_config(kind), job), job)
    sizes = sorted(sum(p.num_elements for p in unit.parameters) for unit in found_units)
    assert [size for size in sizes if size] == found[0][0]
    if strategy.wrap_class:  # attention and MLP of each layer, and the rest
        assert len(sizes) > 2 * tiny_config(kind).num_hidden_layers
    shard = sum(unit.shard_bytes for unit in found_units) / 4
    most = max(elements for _, elements in found)
    assert most <= shard <= most * 1.02  # planned shards have padding rows, which the largest real shard may lack


def test_checkpointed_layers_keep_only_their_input():
    job = TrainingJob(Strategy(), cluster=ONE_RANK, batch=2, length=64)
    kept = []
    for layers in (2, 4):
        config = tiny_config("llama")
        config.num_hidden_layers = layers
        model = build_meta_model(config, job)
        events = trace_step(model, job, [f"model.layers.{n}" for n in range(layers)], find_last_layer(model))
        kept.append(next(sum(event.live_bytes.values()) for event in events if event.kind == "forward_done"))
    assert (kept[1] - kept[0]) / 2 == pytest.approx(
        2 * 64 * 32 * 2, rel=0.05
    )  # (batch, length, hidden) in bf16 per layer


def test_trace_on_meta_matches_real_allocations():
    """Compares one step, traced on meta, with the same step on real CPU tensors."""
    job = TrainingJob(
        Strategy(on_cpu=True), cluster=ONE_RANK, batch=2, length=48, mixed_precision=None, attention="eager"
    )
    peaks = []
    for device in ("meta", "cpu"):
        model = build_meta_model(tiny_config("llama"), job)
        if device == "cpu":
            model = model.to_empty(device="cpu")
        events = trace_step(model, job, [], find_last_layer(model), device=device)
        peaks.append([(m.kind, m.name, sum(m.live_bytes.values()), sum(m.peak_bytes.values())) for m in events])
    assert peaks[0] == peaks[1]


def test_eager_attention_keeps_the_scores():
    job = TrainingJob(Strategy(), cluster=ONE_RANK, batch=2, length=256, gradient_checkpointing=False, loss="model")
    planner = MemoryPlanner(tiny_config("llama"))
    more = planner.plan(job.replace(attention="eager")).peak_bytes - planner.plan(job).peak_bytes
    assert more > 2 * 4 * 256 * 256 * (4 + 2) * 2  # layers x heads x L x L x (fp32 and bf16 softmax) x batch


def test_fused_loss_keeps_no_logits():
    job = TrainingJob(Strategy(), cluster=ONE_RANK, batch=4, length=2048, gradient_checkpointing=True)
    config = tiny_config("llama")
    config.vocab_size = 50_000
    planner = MemoryPlanner(config)
    logits = 4 * 2048 * 50_000 * 4
    assert planner.plan(job.replace(loss="model")).peak["logits and loss"] > 2 * logits
    assert planner.plan(job).peak_bytes < logits


def test_only_adapters_have_optimizer_state():
    job = TrainingJob(Strategy(), cluster=Cluster(2, 2), dtype=torch.bfloat16, lora_rank=4)
    plan = MemoryPlanner(tiny_config("llama")).plan(job)
    assert plan.num_trained == 3808
    assert plan.valley["optimizer"] == pytest.approx(3808 * 8 / 2, rel=0.02)


def test_head_in_a_separate_unit_is_gathered_for_the_fused_loss():
    """With adapters Accelerate finds no final norm, so TRL gathers the head itself and keeps it through backward."""
    config = tiny_config("llama")
    config.vocab_size = 40_000
    job = TrainingJob(Strategy(), cluster=Cluster(8, 8), dtype=torch.bfloat16, length=16, lora_rank=4)
    plan = MemoryPlanner(config).plan(job)
    assert [unit.name for unit in plan.units if "lm_head" in unit.name] == ["base_model.model.lm_head"]
    assert plan.peak["gathered units"] >= 40_000 * 32 * 2


def test_4bit_weights_are_sharded_but_their_scales_are_not(planners):
    job = TrainingJob(Strategy(), cluster=Cluster(8, 8), dtype=torch.bfloat16, lora_rank=16, is_4bit=True)
    plan = planners("4 layers", FOUR_LAYERS).plan(job)
    linear = 4 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert plan.peak["4-bit scales"] == linear * 4 // 64
    rest = 2 * 32000 * 4096 * 2 / 8
    assert plan.valley["parameters"] == pytest.approx(linear / 2 / 8 + rest, rel=0.1)  # plus 5M adapter values in fp32


def test_tied_embeddings_are_counted_once():
    job = TrainingJob(Strategy(), cluster=ONE_RANK)
    tied, untied = (MemoryPlanner(tiny_config(kind)).plan(job) for kind in ("llama_tied", "llama"))
    assert untied.num_parameters - tied.num_parameters >= 307 * 32


def test_rows_that_do_not_divide_are_padded():
    job = TrainingJob(Strategy(), cluster=Cluster(8, 8))
    embedding = list_parameters(build_meta_model(tiny_config("llama"), job), job)[0]
    assert (embedding.num_elements, embedding.num_padded_elements) == (307 * 32, 312 * 32)
    assert embedding.num_shard_elements == 39 * 32


def test_accumulation_keeps_unsharded_gradients_unless_each_batch_is_reduced():
    planner = MemoryPlanner(tiny_config("llama"))
    job = TrainingJob(Strategy(), cluster=Cluster(8, 8), accumulation=4, length=16)
    whole = planner.plan(job).num_parameters * 2
    assert planner.plan(job).peak["whole gradients"] >= whole
    assert planner.plan(job.replace(sync_each_batch=True)).peak.get("whole gradients", 0) < whole


def test_no_shard_replicates_everything_and_shard_grad_op_keeps_parameters_gathered(planners):
    planner = planners("4 layers", FOUR_LAYERS)
    job = TrainingJob(Strategy(), cluster=Cluster(8, 8, None))
    whole = planner.plan(job).num_parameters
    assert planner.plan(job.replace(version=1, sharding="no_shard")).valley_bytes == 12 * whole
    kept = planner.plan(job.replace(sharding="shard_grad_op"))
    assert kept.peak["gathered units"] > 1.9 * whole
    assert kept.valley_bytes == planner.plan(job).valley_bytes


def test_hybrid_sends_only_gradients_between_nodes(planners):
    planner = planners("7B", LLAMA2_7B)
    job = TrainingJob(Strategy(), cluster=Cluster(16, 8))
    plan = planner.plan(job)
    hybrid = planner.plan(job.replace(sharding="hybrid_shard"))
    assert estimate_traffic(hybrid).node_bytes == pytest.approx(2 * plan.num_parameters * 4 / 2, rel=0.01)
    assert estimate_traffic(plan).node_bytes == pytest.approx((2 * 2 + 4) * plan.num_parameters / 2, rel=0.05)


def test_flops_count_only_active_experts():
    job = TrainingJob(Strategy(), cluster=ONE_RANK, length=1, gradient_checkpointing=False)
    few, all_of_them = tiny_config("mixtral"), tiny_config("mixtral")
    all_of_them.num_experts_per_tok = 4
    flops = [step_flops(MemoryPlanner(config).plan(job)) for config in (few, all_of_them)]
    assert flops[1] - flops[0] == 6 * 2 * 2 * 3 * 32 * 52  # FLOPs per weight x layers x extra experts x weights of each


def test_dense_model_takes_six_flops_per_weight_and_token(planners):
    planner = planners("4 layers", FOUR_LAYERS)
    plan = planner.plan(TrainingJob(Strategy(), gradient_checkpointing=False, length=64))
    matrices = plan.num_parameters - 32000 * 4096
    norms = (2 * 4 + 1) * 4096
    attention = 3 * 2 * 64 * 64 * 4096 * 4
    assert step_flops(plan) == 6 * (matrices - norms) * 64 + attention


def test_host_memory_to_load_does_not_grow_with_the_model(planners):
    job = TrainingJob(Strategy(), cluster=Cluster(8, 8))
    small, large = (planners(*which).plan(job) for which in (("4 layers", FOUR_LAYERS), ("8 layers", EIGHT_LAYERS)))
    loads = [next(need for need in estimate_host_memory(plan) if need.stage == "load") for plan in (small, large)]
    assert loads[0].ours_bytes == loads[1].ours_bytes
    assert loads[1].stock_bytes > 8 * 4 * large.num_parameters


def test_each_communicator_needs_memory(planners):
    planner = planners("7B", LLAMA2_7B)
    job = TrainingJob(Strategy(), cluster=Cluster(16, 8))
    fields = ({"num_gpus": 1, "gpus_per_node": 1}, {}, {"sharding": "hybrid_shard"})
    plans = [planner.plan(job.replace(**changed)) for changed in fields]
    temporary = [plan.peak_bytes - plan.valley_bytes for plan in plans]
    context = [plan.allowance_bytes - 0.03 * part for plan, part in zip(plans, temporary, strict=True)]
    assert context == pytest.approx([0.9e9, 1.5e9, 2.7e9], rel=1e-6)


def test_save_pins_memory_that_torch_rounds_up(planners):
    gib = 2**30
    job = TrainingJob(Strategy(), cluster=Cluster(8, 8))
    plan = planners("7B", LLAMA2_7B).plan(job)
    save, train = (
        next(need.ours_bytes for need in estimate_host_memory(plan) if need.stage == stage)
        for stage in ("save", "train")
    )
    shard = 4 * plan.num_parameters / 8 / gib  # 3.1 GiB of weights; AdamW's moments take 6.3 GiB
    assert (int(shard), int(2 * shard)) == (3, 6)
    assert save - train == 8 * (3 + 0.25 + 6 + 0.5) * gib
    offloaded = planners("7B", LLAMA2_7B).plan(job.replace(is_offloaded=True))
    needs = {need.stage: need.ours_bytes for need in estimate_host_memory(offloaded)}
    assert needs["save"] - needs["train"] == pytest.approx(8 * 3 * shard * gib, rel=0.001)  # memory that is not pinned


def test_loading_4bit_weights_unpacks_one_weight_per_rank(planners):
    job = TrainingJob(Strategy(), cluster=Cluster(8, 8), lora_rank=16, is_4bit=True, dtype=torch.bfloat16)
    plan = planners("4 layers", FOUR_LAYERS).plan(job)
    load = next(need for need in estimate_host_memory(plan) if need.stage == "load")
    assert 8 * 930_000_000 < load.ours_bytes < 8 * 2_000_000_000
    assert load.stock_bytes > 8 * 900_000_000


def test_nested_quantization_shrinks_scales_to_a_quarter(planners):
    job = TrainingJob(Strategy(), cluster=Cluster(8, 8), lora_rank=16, is_4bit=True, dtype=torch.bfloat16)
    planner = planners("4 layers", FOUR_LAYERS)
    flat, nested = (planner.plan(job.replace(has_nested_scales=nested)).peak[SCALES] for nested in (False, True))
    assert flat == pytest.approx(0.0506e9, rel=0.02)
    assert nested == pytest.approx(flat / 4 + flat / 256, rel=0.01)


def test_recipe_from_scratch_is_planned_from_its_config():
    options = to_options(read_recipe(ROOT / "recipes" / "c4_150m_pretrain.yaml"))
    keys = yaml.safe_load((ROOT / "recipes" / "c4_150m_pretrain.yaml").read_text())
    config = str(ROOT / "recipes" / keys["config_name"])
    assert (options["model"], options["config_overrides"]) == (config, keys.get("config_overrides"))
    nested = to_options(read_recipe(ROOT / "recipes" / "llama3_70b_qlora.yaml"))
    assert nested["nested_scales"] is True


def test_host_memory_of_cpu_ranks_includes_the_ranks():
    plan = MemoryPlanner(tiny_config("llama")).plan(TrainingJob(Strategy(on_cpu=True), cluster=Cluster(2, 2, None)))
    needs = {need.stage: need.ours_bytes for need in estimate_host_memory(plan)}
    assert needs["train"] - 2 * 930_000_000 == 2 * plan.peak_bytes


def test_offloaded_parameters_are_staged_on_the_gpu(planners):
    job = TrainingJob(Strategy(version=1, sharding="no_shard", is_offloaded=True), mixed_precision=None)
    plan = planners("4 layers", FOUR_LAYERS).plan(job)
    assert plan.peak["gathered units"] > 4 * 32000 * 4096 * 2  # embedding and head stay gathered in the root unit


def test_smallest_change_comes_first_and_fits(planners):
    planner = planners("8 layers", EIGHT_LAYERS)
    plan = planner.plan(
        TrainingJob(Strategy(), cluster=Cluster(8, 8, 24 * 10**9), batch=8, length=4096, gradient_checkpointing=False)
    )
    assert not plan.fits
    tried = find_smallest_change(planner, plan.job)
    assert tried[-1].plan.fits and not any(change.plan.fits for change in tried[:-1])
    assert tried[-1].label == "gradient checkpointing"


@pytest.mark.slow
def test_settings_without_recomputation_are_proposed_if_they_fit(planners):
    planner = planners("7B", LLAMA2_7B)
    job = TrainingJob(
        Strategy(),
        Cluster(1, 1),
        length=2048,
        accumulation=4,
        lora_rank=16,
        dtype=torch.bfloat16,
        optimizer="adamw_torch",
    )
    plan = planner.plan(job)
    kept, larger = find_changes(planner, plan)
    assert not kept.plan.job.gradient_checkpointing and kept.plan.needed_bytes > plan.needed_bytes
    assert kept.traffic.compute_seconds < 0.85 * estimate_traffic(plan).compute_seconds
    assert larger.label == "gradient_checkpointing: false, batch 2, accumulation 2"
    assert (larger.plan.job.batch, larger.plan.job.accumulation) == (2, 2)
    text = format_plan(plan, [], [kept, larger])
    assert "faster changes that also fit" in text and "gradient_checkpointing: false" in text
    exact = planner.plan(job.replace(gpu_bytes=kept.plan.needed_bytes))
    assert [one.label for one in find_changes(planner, exact)] == [kept.label]
    assert find_changes(planner, planner.plan(job.replace(gpu_bytes=None))) == []


@pytest.mark.slow
def test_hybrid_is_fastest_if_the_interconnect_is_slow(planners):
    planner = planners("7B", LLAMA2_7B)
    job = TrainingJob(Strategy(), cluster=Cluster(16, 8), length=512)
    slow = job.replace(node_bytes_per_second=100e9 / 8, reduce_dtype=torch.bfloat16)
    seconds = {one.label: one.traffic.seconds for one in compare_strategies(planner, slow)}
    assert seconds["hybrid_shard"] < 0.75 * seconds["full_shard"]
    fast = {
        one.label: one.traffic.seconds for one in compare_strategies(planner, job.replace(node_bytes_per_second=400e9))
    }
    assert fast["hybrid_shard"] > fast["full_shard"]


def test_suggestion_fits_and_no_strategy_is_faster():
    planner = MemoryPlanner(llama(LLAMA2_7B | {"num_hidden_layers": 4}))
    job = TrainingJob(Strategy(), cluster=Cluster(4, 4, 24 * 10**9), length=2048)
    found = suggest(planner, job)
    assert found.plan.fits
    others = compare_strategies(planner, found.plan.job)
    assert all(one.traffic.step_seconds >= found.traffic.step_seconds * 0.98 for one in others if one.plan.fits)
    assert suggest(planner, job.replace(gpu_bytes=2 * 10**9)) is None


@pytest.fixture(scope="module")
def tiny_planner():
    return MemoryPlanner(tiny_config("llama"))


@pytest.mark.parametrize("template", all_templates(), ids=lambda template: template.name)
def test_every_template_can_be_planned(template, tiny_planner):
    strategy = find_strategy(template.name)
    assert strategy == Strategy(
        name=template.name,
        version=template.version,
        sharding=template.strategy,
        is_offloaded=template.is_offloaded,
        min_num_params=template.min_num_params,
        wrap_class=template.wrap_class,
        precision="no" if template.on_cpu else "bf16",
        on_cpu=template.on_cpu,
        num_processes=template.num_processes,
        num_machines=template.num_machines,
    )
    gpus_per_node = strategy.num_processes // strategy.num_machines
    job = TrainingJob(strategy, cluster=Cluster(strategy.num_processes, gpus_per_node, None), batch=1, length=16)
    plan = tiny_planner.plan(job)
    assert plan.peak_bytes > plan.valley_bytes
    assert ("parameters" in plan.valley) != job.is_offloaded


def test_weights_are_never_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    (tmp_path / "model.safetensors").write_bytes(b"not weights at all")
    result = run(app, ["plan", "--model", str(tmp_path), "--gpu-memory", "80GB"])
    assert result.exit_code == 0 and "fits" in result.output


def test_adapters_of_experts_are_planned_and_take_disk_space(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("gpt_oss").to_dict()))
    recipe = {"model_name_or_path": str(tmp_path), "use_peft": True, "lora_r": 4}
    recipe |= {"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "max_length": 32}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    result = run(app, ["plan", "--config", str(tmp_path / "recipe.yaml"), "--template", "fsdp2_cpu", "--json"])
    num_adapter_parameters = 2 * 4 * 3 * ((32 + 96) + (48 + 32))  # layers, LoRA rank, experts, in + out of both weights
    assert json.loads(result.output)["num_trained"] == num_adapter_parameters
    assert disk_estimate.estimate(recipe).export_bytes == 4 * num_adapter_parameters
    refused = run(app, ["plan", "--config", str(tmp_path / "recipe.yaml"), "--template", "fsdp1_full_shard"])
    assert "adapters of fused experts (lora_target_parameters) need FSDP2" in refused.output + str(refused.exception)


def test_fused_experts_in_4_bits_are_refused_and_not_suggested(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("gpt_oss").to_dict()))
    job = ["plan", "--model", str(tmp_path), "--lora", "4"]
    refused = run(app, [*job, "--quantized", "4bit"])
    assert refused.exit_code != 0
    assert "bitsandbytes quantizes linear layers only: fused experts" in str(refused.exception)
    assert "4-bit" not in run(app, [*job, "--gpu-memory", "0.001GB"]).output


def test_recipe_sets_the_options_that_are_not_given(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {tmp_path}\nper_device_train_batch_size: 3\nmax_length: 32\nuse_peft: true\nlora_r: 4\n"
        "lora_target_modules: [q_proj, v_proj]\ngradient_accumulation_steps: 2\npacking: true\n"
    )
    result = run(app, ["plan", "--config", str(recipe), "--batch", "2", "--template", "fsdp2_cpu", "--json"])
    found = json.loads(result.output)
    assert (found["batch"], found["length"], found["accumulation"], found["lora_rank"]) == (2, 32, 2, 4)
    assert found["num_trained"] == 2 * 4 * (32 + 32 + 32 + 16)
    assert found["fits"] is None


def test_suggestion_is_printed_before_its_plan(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    result = run(app, ["plan", "--model", str(tmp_path), "--gpus", "16", "--interconnect", "100Gb/s", "--suggest"])
    assert result.exit_code == 0
    assert result.output.startswith("suggested: ") and "strategies, sorted by fit and then by speed" in result.output


def test_all_errors_are_reported_together(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    wrong = ["--optimizer", "adamm", "--batch", "0", "--quantized", "4bit"]
    error = run(app, ["plan", "--model", str(tmp_path), *wrong]).exception
    assert isinstance(error, PlanError)
    assert all(word in str(error) for word in ("adamm", "batch", "4-bit"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no/such/dir/config.json"], "no/such/dir"),
        ([], "no model"),
        (["--model", "MODEL", "--gpu-memory", "80 apples"], "gpu_memory: cannot read '80 apples'"),
        (["--model", "MODEL", "--mixed-precision", "fp9"], "mixed_precision: unknown dtype 'fp9'"),
        (["--model", "MODEL", "--template", "fsdp2_hybrid_shard", "--gpus", "8", "--gpus-per-node", "8"], "one node"),
        (["--model", "MODEL", "--lora", "8", "--lora-targets", "nothing_here"], "nothing_here"),
    ],
)
def test_job_that_cannot_be_planned_is_refused(tmp_path, arguments, words):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    error = run(app, ["plan", *[str(tmp_path) if word == "MODEL" else word for word in arguments]]).exception
    assert isinstance(error, RecipeError) and words in str(error)


def test_replace_reaches_the_cluster_and_the_strategy():
    job = TrainingJob(Strategy()).replace(num_gpus=32, sharding="shard_grad_op", batch=3)
    assert (job.cluster.num_gpus, job.strategy.sharding, job.batch) == (32, "shard_grad_op", 3)
    fields = [set(owner.__dataclass_fields__) for owner in (TrainingJob, Cluster, Strategy)]
    assert sum(map(len, fields)) == len(set.union(*fields))  # a shared name could be replaced in the wrong class


def test_sizes_and_bandwidths_are_parsed_and_formatted():
    assert parse_bytes("80GB") == 80 * 10**9
    assert parse_bytes("1.5TiB") == 1.5 * 2**40
    assert parse_bandwidth("200Gb/s") == parse_bandwidth("25GB/s") == 25e9
    for text in ("fast", "1.2.3GB/s", "10iB/s"):
        with pytest.raises(ValueError, match="cannot read"):
            parse_bandwidth(text)
    sizes = {7: "7 B", 1234: "1.2 kB", 5_600_000: "5.6 MB", 7.8e9: "7.8 GB", 9e15: "9,000.0 TB"}
    assert [format_bytes(size) for size in sizes] == list(sizes.values())


def test_dtypes_are_parsed_as_torch_and_accelerate_spell_them():
    assert parse_dtype("bf16") == parse_dtype("bfloat16") == torch.bfloat16
    assert parse_dtype("no") is None
    with pytest.raises(ValueError, match="unknown dtype"):
        parse_dtype("int8")


def test_model_whose_flops_cannot_be_counted_is_planned_without_compute(monkeypatch):
    def refuse(model):
        raise ValueError("unknown architecture")

    monkeypatch.setattr("hf_fsdp_recipes.tools.planner.memory_planner.count_flops", refuse)
    plan = MemoryPlanner(tiny_config("llama")).plan(TrainingJob(Strategy()))
    traffic = estimate_traffic(plan)
    assert traffic.compute_seconds is None and traffic.step_seconds == traffic.seconds
    assert "compute unknown" in format_plan(plan, [], [])


def test_predictions_in_the_docs_are_current(planners):
    """docs/planner.md prints these predictions."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text()
    for name, values, offload, batch in (
        ("7B", LLAMA2_7B, False, 10),
        ("7B", LLAMA2_7B, True, 10),
        ("70B", LLAMA2_70B, True, 2),
    ):
        plan = planners(name, values, GuidePlanner).plan(guide_job(is_offloaded=offload, batch=batch))
        assert f"{plan.valley_bytes / GB:.2f} / {plan.peak_bytes / GB:.1f}" in page


@pytest.mark.slow
def test_prediction_is_within_ten_percent_of_real_ranks():
    """Measure one row of docs/planner.md again: two gloo ranks that train."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "benchmarks/plan.py", "--only", "4"]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=True)
    row = [line for line in done.stdout.splitlines() if line.startswith("| fsdp2 full_shard")][-1]  # in the table
    assert abs(float(row.split("|")[5].strip().rstrip("%"))) < 10
