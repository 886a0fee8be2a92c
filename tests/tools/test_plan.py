"""The plan: what changes the memory of a step, and by how much; and the command.

Sizes are worked out by hand, or were measured by others.
"""

import json
import re
import shlex

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.tools.files import shipped_files
from hf_fsdp_recipes.tools.plan.command import SYNC
from hf_fsdp_recipes.tools.plan.job import read_job
from hf_fsdp_recipes.tools.plan.step import allowance, measure_step
from hf_fsdp_recipes.tools.plan.table import Estimate
from tests.recipes.small import command_of

LAYERS, HIDDEN, INNER, VOCABULARY = 2, 256, 512, 4096
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
# Parameters of the layers' linear modules.
NUM_LINEAR = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
NUM_ENDS = 2 * VOCABULARY * HIDDEN  # of the embedding and the head
NUM_NORMS = (2 * LAYERS + 1) * HIDDEN
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "head_dim": 32}
LORA = "--use_peft true --lora_target_modules all-linear --lora_r 4 --dtype bfloat16"


def job_of(options="", template="full_shard"):
    common = "--model_name_or_path unread --per_device_train_batch_size 1 --max_length 128"
    return read_job(None, template, shlex.split(f"{common} {options}"))


def config_of(kind="llama", **changes):
    return AutoConfig.for_model(kind, **(SIZES | changes))


def measure(options="", template="full_shard", kind="llama", **changes):
    return measure_step(job_of(options, template), config_of(kind, **changes)).peak


def total(options="", *rest, **changes):
    return sum(measure(options, *rest, **changes).values())


def test_each_rank_holds_its_share_of_fp32_masters_and_adamw():
    for num_ranks in (2, 8):
        peak = measure(f"--num_processes {num_ranks}")
        share = 4 * (NUM_LINEAR + NUM_ENDS + NUM_NORMS) / num_ranks
        assert peak["parameters"] == pytest.approx(share, rel=0.01)
        assert peak["optimizer state"] == pytest.approx(2 * share, rel=0.01)


def test_hybrid_sharding_divides_by_the_ranks_of_a_node():
    hybrid, full = measure(template="hybrid_shard"), measure("--num_processes 8")
    assert hybrid["parameters"] == full["parameters"]


def test_shard_grad_op_keeps_the_layers_gathered():
    kept = total("--fsdp_reshard_after_forward false --num_processes 2")
    freed = total("--num_processes 2")
    assert kept - freed > 2 * NUM_LINEAR / 2  # at least one of the two layers more, in bf16


@pytest.mark.parametrize("options", ["", LORA])
def test_offload_leaves_neither_shards_nor_state_on_the_gpu(options):
    peak = measure(options, template="offload")
    assert peak["optimizer state"] == 0
    assert peak["parameters"] < 10_000
    assert sum(peak.values()) < total(options)


def test_accumulation_keeps_full_gradients_unless_each_batch_is_reduced():
    sync = """--accelerator_config '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'"""
    one = total()
    two = total("--gradient_accumulation_steps 2")
    synced = total(f"--gradient_accumulation_steps 2 {sync}")
    assert two - one > 0.8 * 4 * (NUM_LINEAR + NUM_ENDS)  # in float32, in which recipes reduce
    assert synced - one < 4 * (NUM_LINEAR + NUM_ENDS) / 4


def test_a_head_that_the_frozen_base_does_not_keep_is_counted_once():
    """TRL gathers the head of a LoRA model and keeps it in backward.

    An earlier planner counted it twice.
    """
    wide = {"vocab_size": 65536 + VOCABULARY}
    added = total(LORA, **wide) - total(LORA)
    head = 2 * 65536 * HIDDEN
    shards = 2 * head / 8  # of the embedding and the head
    assert shards + head <= added < shards + 2 * head  # the rest is tiles of logits


def test_4_bit_weights_take_half_a_byte_and_scales_on_every_rank():
    nested, flat = (
        measure(f"{LORA} --load_in_4bit true --use_bnb_nested_quant {on}")
        for on in ("true", "false")
    )
    adapters = measure(LORA)["parameters"] - 2 * (NUM_LINEAR + NUM_ENDS + NUM_NORMS) / 8
    # The adapters are in bf16 instead of float32.
    packed = NUM_LINEAR / 2 / 8 + 2 * (NUM_ENDS + NUM_NORMS) / 8 + adapters / 2
    assert flat["parameters"] == pytest.approx(packed + NUM_LINEAR / 16, rel=0.03)
    saved = NUM_LINEAR * (1 / 16 - 1 / 64)
    assert flat["parameters"] - nested["parameters"] == pytest.approx(saved, rel=0.03)


def test_frozen_experts_get_no_gradients():
    attention = f"{LORA} --lora_target_modules q_proj v_proj --gradient_checkpointing false"
    experts = 8 * 3 * HIDDEN * 512 * 2  # of a layer, in bf16

    def added(options):  # by eight more experts in each of two layers
        eight = total(options, kind="qwen3_moe", **EXPERTS)
        sixteen = total(options, kind="qwen3_moe", **EXPERTS | {"num_experts": 16})
        return sixteen - eight

    assert added(attention) < 3.5 * experts  # shards, and what is gathered in backward
    assert added("--gradient_checkpointing false") > 6 * experts


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ("--gradient_checkpointing true", "--gradient_checkpointing false"),
        ("--optim paged_adamw_32bit", "--optim adamw_torch_fused"),
        ("--optim sgd", "--optim adamw_torch_fused"),
        ("--max_length 8 --optim adamw_torch_fused", "--max_length 8 --optim adamw_torch"),
        (
            "--max_length 512 --attn_implementation sdpa",
            "--max_length 512 --attn_implementation eager",
        ),
        (
            "--max_length 512 --per_device_train_batch_size 2 "
            "--attn_implementation flash_attention_2",
            "--max_length 512 --per_device_train_batch_size 2",  # padded rows need a mask
        ),
        (LORA, ""),
    ],
)
def test_what_saves_memory_saves_it(less, more):
    assert total(f"{less} --num_processes 2") < total(f"{more} --num_processes 2")


def test_every_template_is_planned():
    for file in shipped_files("template"):
        assert measure(template=file.stem)["parameters"]


def test_each_rank_of_ddp_holds_everything_and_buckets_of_gradients():
    peak = measure(template="ddp")
    weights = 4 * (NUM_LINEAR + NUM_ENDS + NUM_NORMS)
    assert peak["parameters"] == pytest.approx(weights, rel=0.01)
    assert peak["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
    assert peak["gradient buckets of DDP"] == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize(
    ("options", "kind", "changes"),
    [
        ("--packing true", "llama", {}),
        (LORA, "llama", {}),  # rows are padded, but a single row is not
        ("--num_processes 1 --use_peft true", "gemma2", {"sliding_window": 512}),
        ("--attn_implementation eager", "qwen3_moe", EXPERTS),
    ],
)
def test_a_few_steps_tell_what_other_batches_and_ranks_need(options, kind, changes):
    """Almost exactly for several ranks; for one, with what it would have gathered."""
    base = f"--num_processes 8 {options} --max_length 4096"
    estimate = Estimate(job_of(base))

    def direct(rows, ranks):
        size = f"--per_device_train_batch_size {rows} --num_processes {ranks}"
        return measure_step(job_of(f"{base} {size}"), config_of(kind, **changes))

    estimate.fit({size: direct(*size) for size in estimate.to_measure})
    for rows, ranks in [(1, 16), (5, 4), (20, 2), (12, 1)]:
        step = direct(rows, ranks)
        assumed = allowance(step.total - step.resident, ranks)
        estimated = estimate.total(rows, ranks) - assumed
        assert estimated == pytest.approx(step.total, rel=0.05 if ranks == 1 else 0.02)


@pytest.mark.parametrize(
    ("recipe", "options", "num_rows", "valley", "peak"),
    [
        ("llama2_7b_size_wrap", "--fsdp_offload_params true", 10, 1.4, 68.7),
        pytest.param("llama2_7b_size_wrap", "", 10, 8, 74, marks=pytest.mark.slow),
        pytest.param(
            "llama2_70b_size_wrap",
            "--fsdp_offload_params true --gradient_checkpointing false",
            2,
            0.3,
            72.3,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_plan_is_within_12_percent_of_what_lambdas_guide_measured(
    recipe, options, num_rows, valley, peak
):
    """On 8 A100, "Distributed training guide", chapter 4.

    Its loop keeps the logits in float32, and at the peak three more copies of them: the
    log-softmax, its gradient and that of the logits. It also keeps the gradients between steps.
    """
    words = shlex.split(f"--mixed_precision no {options}")
    step = measure_step(read_job(recipe, "size_wrap", words))
    logits = 4 * num_rows * 1024 * 32000
    gradients = step.peak["optimizer state"] / 2
    assert (step.resident + gradients + logits) / 1e9 == pytest.approx(valley, rel=0.12, abs=0.05)
    assert (sum(step.peak.values()) + 4 * logits) / 1e9 == pytest.approx(peak, rel=0.12)


def test_host_memory_has_offloaded_state_and_the_copy_of_a_checkpoint():
    share = 4 * (NUM_LINEAR + NUM_ENDS + NUM_NORMS) / 8

    def host(options, template="full_shard"):
        return sum(measure_step(job_of(options, template), config_of()).host.values()) / share

    assert host("") == pytest.approx(3, rel=0.01)
    assert host("--save_strategy no") == 0
    assert host("--save_strategy no", "offload") == pytest.approx(4, rel=0.01)
    assert host("", "offload") == pytest.approx(7, rel=0.01)
    paged = "--save_strategy no --optim paged_adamw_32bit"
    assert host(paged) == pytest.approx(2, rel=0.01)
    # bitsandbytes keeps the state in float32.
    assert host(f"{paged} --mixed_precision no --dtype bfloat16") == pytest.approx(2, rel=0.01)
    assert host("--save_strategy no --model_name_or_path= --config_name x") == pytest.approx(8)


def test_fewer_checkpointed_layers_take_more_memory():
    every, every_other, none = (
        total(f"--max_length 1024 {options}", num_hidden_layers=4)
        for options in (
            "",
            """--gradient_checkpointing_kwargs '{"every_n_layers": 2}'""",
            "--gradient_checkpointing false",
        )
    )
    assert every < every_other < none


def test_context_parallel_ranks_share_a_row():
    sizes = "--parallelism_config_dp_replicate_size 1 --parallelism_config_dp_shard_size 2"
    options = f"{sizes} --parallelism_config_cp_size 4 --num_processes 8"
    job = job_of(options, "hybrid_shard")
    assert job.shape == (1, 32)
    assert job.not_counted == ["parallelism_config_cp_size"]
    assert measure(options, "hybrid_shard")["parameters"] == measure("")["parameters"]


@pytest.mark.parametrize(
    "options",
    [
        "--use_liger_kernel true",
        "--activation_offloading true",
        "--torch_compile true",
        "--auto_find_batch_size true",
        "--label_smoothing_factor 0.1",
        """--gradient_checkpointing_kwargs '{"offload": true}'""",
        "--fsdp_activation_checkpointing true --fsdp_activation_checkpointing_offload true "
        "--gradient_checkpointing false",
    ],
)
def test_options_that_the_plan_does_not_count_are_named(options):
    [name] = job_of(options).not_counted
    assert name.split(":")[0] in options
    assert total(options) > 0
    assert not job_of().not_counted


@pytest.fixture
def model(tmp_path):
    """A directory with a config, and no weights."""
    config = AutoConfig.for_model("llama", **SIZES).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def plan_of(model, *arguments):
    common = ("--accelerate_config", "full_shard", "--model_name_or_path", model)
    return run(*common, "--max_length", 64, *arguments)


def test_plan_says_what_takes_the_memory_and_where_it_fits(model):
    result = plan_of(model, "--use_liger_kernel", "true")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "fits in 80 GB"
    assert "not counted in this plan: use_liger_kernel" in result.output
    peak, host = result.output.split(" in total")
    *sizes, in_total = map(float, re.findall(r"([\d.]+) GB  ", f"{peak}  "))
    assert sum(sizes) == pytest.approx(in_total, abs=0.05)
    rows = re.findall(r"^ +(1|2|4|8|16|32)  (?: +(\d+)){5} +[\d.]+ +[\d.]+$", host, re.M)
    assert len(rows) == 6


def test_programs_get_the_same_as_json(model):
    answer = json.loads(plan_of(model, "--json", "--num_processes", 4).stdout)
    assert answer["fits"]
    assert not answer["advice"]
    [row] = [row for row in answer["table"] if row["ranks"] == 4]
    assert row["gigabytes"] == pytest.approx(answer["gigabytes"])
    assert sum(answer["peak_gigabytes"].values()) == pytest.approx(answer["gigabytes"])


def test_run_that_does_not_fit_is_told_what_saves_how_much(model):
    long = ("--max_length", 8192, "--per_device_train_batch_size", 2)
    result = plan_of(model, *long, "--gpu_memory", "1GB")
    assert result.exit_code == 1
    advice = dict(
        reversed(line.split(" GB  "))
        for line in result.output.partition("save memory:\n")[2].splitlines()
    )
    # Recomputation is TRL's default, and nothing is accumulated.
    assert not {"--gradient_checkpointing true", SYNC} & set(advice)
    fewer = total("--max_length 8192"), total("--max_length 8192 --per_device_train_batch_size 2")
    saved = float(advice["--per_device_train_batch_size 1"])
    assert saved == pytest.approx((fewer[1] - fewer[0]) * 1.03 / 1e9, abs=0.01)


def test_a_run_that_would_leave_nothing_may_not_fit(model):
    needed = json.loads(plan_of(model, "--json").stdout)["gigabytes"]
    result = plan_of(model, "--gpu_memory", f"{needed * 1.01}GB")
    assert result.exit_code == 1
    assert "may not fit" in result.output


def test_cpu_ranks_need_the_memory_of_this_machine(model):
    result = run("--accelerate_config", "cpu", "--model_name_or_path", model, "--max_length", 64)
    assert result.exit_code == 0, result.output
    assert "Python and its libraries" in result.output
    assert "GPU" not in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--accelerate_config", "full_shard", "--fsdp_version", "1"], "fsdp_version: 2"),
        (["--accelerate_config", "full_shard", "--gpu_memory", "80 apples"], "80 apples"),
        (["--accelerate_config", "full_shard", "--learning_rat", "1"], "learning_rat"),
        (["--accelerate_config", "full_shard", "--config_overrides", "x=1"], "config_name"),
        (["--accelerate_config", "hybrid_shard", "--num_processes", "8"], "8 ranks"),
        (["--accelerate_config", "hybrid_shard", "--num_processes", "7"], "multiple"),
        (["--accelerate_config", "full_shard", "--gpu_memory", "-5GB"], "-5GB"),
        (["--accelerate_config", "full_shard", "--num_processes", "0"], "num_processes is 0"),
        (["--accelerate_config", "full_shard", "--lora_r", "16"], "lora_r"),
        (["--accelerate_config", "full_shard", "--optim", "adamw_8bit"], "adamw_8bit"),
        (["--accelerate_config", "full_shard", "--per_device_train_batch_size", "0"], "size is 0"),
        (["--accelerate_config", "full_shard", "--load_in_4bit", "true"], "use_peft"),
        (
            ["--accelerate_config", "full_shard", "--use_peft", "--lora_target_modules", "nothing"],
            "nothing",
        ),
    ],
)
def test_job_that_cannot_be_planned_is_refused(model, arguments, words):
    error = run(*arguments, "--model_name_or_path", model).exception
    assert isinstance(error, RecipeError)
    assert words in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", shipped_files("recipe"), ids=lambda file: file.stem)
def test_shipped_recipe_fits_as_its_comment_says(recipe):
    options = command_of(recipe)
    has_model = re.search(
        r"^(model_name_or_path: (?!path/to)|config_name)", recipe.read_text(), re.M
    )
    small = [] if has_model else ["--model_name_or_path", "HuggingFaceTB/SmolLM2-135M-Instruct"]
    [memory] = re.findall(r"\b(24|192) GB", recipe.read_text().partition("\n\n")[0])[:1] or ["80"]
    result = run(*options, *small, "--gpu_memory", f"{memory}GB")
    assert result.exit_code == 0, result.output
