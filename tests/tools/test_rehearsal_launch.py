"""Rehearsals: recipes that run from start to end in small, and errors that a job would hit late."""

import math

import pytest
import torch
import typer
from safetensors.torch import save_file
from transformers import Qwen2_5_VLConfig
from typer.testing import CliRunner

from hf_fsdp_recipes.errors import RecipeError, ToolError
from hf_fsdp_recipes.tools.files import find_file, shipped_files
from hf_fsdp_recipes.tools.launch import find_error
from hf_fsdp_recipes.tools.plan.job import find_config
from hf_fsdp_recipes.tools.rehearse import (
    COMPARED,
    ON_CPU,
    SMALL,
    TOLERANCE,
    compare,
    find_errors,
    rehearse,
    write_recipe,
)
from hf_fsdp_recipes.tools.tiny_model import shrink
from tests.conftest import make_tokenizer

ROWS = str(find_file("recipe", "quickstart").parent / "data" / "sharded_training_faq.jsonl")
PASSING = [
    ("smollm2_135m_lora", "cpu"),
    ("smollm2_135m_full", "hybrid_shard"),
    ("smollm2_135m_full", "offload"),
    ("smollm2_135m_full", "size_wrap"),
    ("smollm2_135m_full", "ddp"),
    ("qwen3_30b_a3b_lora", "full_shard"),
    ("llama3_70b_qlora", "full_shard"),
]


@pytest.fixture
def local(tmp_path):
    """Return fields that replace the tokenizer and the rows by local ones.

    The config's shipped copy is used.
    """
    make_tokenizer(tmp_path / "tokenizer")
    return ["--tokenizer_name", str(tmp_path / "tokenizer"), "--dataset_name", ROWS]


def run(*arguments):
    app = typer.Typer()
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        rehearse
    )
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.mark.rehearsal
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("recipe", "template"), PASSING)
def test_a_recipe_passes_its_rehearsal(recipe, template, local, tmp_path):
    kept = tmp_path / "kept"
    result = run(
        "--config", recipe, "--accelerate_config", template, "--directory", str(kept), *local
    )
    passed = f"{recipe} with {template}: loaded, killed, resumed, exported and generated"
    assert passed in result.output
    assert "weights as one process does" in result.output
    files = {file.name for file in (kept / "run").iterdir()}
    assert {"checkpoint-2", "checkpoint-6", "export", "report.md"} <= files


@pytest.mark.rehearsal
@pytest.mark.timeout(900)
def test_an_image_text_models_recipe_passes_its_rehearsal(local, tmp_path):
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"], text_config={"rope_scaling": rope}
    ).save_pretrained(tmp_path / "model")
    recipe = tmp_path / "images.yaml"
    recipe.write_text(
        "model_name_or_path: model\noutput_dir: run\nuse_peft: true\n"
        "lora_target_modules: [q_proj, k_proj, v_proj, o_proj]\n"
    )
    result = run("--config", str(recipe), "--accelerate_config", "full_shard", *local)
    assert "images with full_shard: loaded, killed, resumed" in result.output
    assert "2 ranks change all 16 weights as one process does" in result.output


@pytest.mark.rehearsal
@pytest.mark.timeout(300)
def test_a_combination_whose_ranks_train_differently_is_refused(local, tmp_path, monkeypatch):
    """The ranks here do not average over all tokens, so rows of other lengths weigh more."""
    recipe = write_recipe(find_file("recipe", "smollm2_135m_lora"), tmp_path, local)
    wrong = f"{COMPARED} --average_tokens_across_devices false"
    monkeypatch.setattr("hf_fsdp_recipes.tools.rehearse.COMPARED", wrong)
    template = find_file("template", "full_shard")
    with pytest.raises(ToolError, match=r"lora_.* is trained differently on ranks than in one"):
        compare(template, [*recipe, "--num_processes=2", *ON_CPU, *SMALL], tmp_path, 2)


def write_changes(directory, start, one, ranks):
    """Write the three files that are compared."""
    parts = {"one/checkpoint-1": start, "one/export": one, "ranks/export": ranks}
    for part, tensors in parts.items():
        (directory / part).mkdir(parents=True)
        save_file(tensors, directory / part / "model.safetensors")


@pytest.mark.parametrize(
    ("factor", "dtype", "is_right"),
    [
        (1.0001, torch.float32, True),
        (1.01, torch.float32, False),
        (0.0, torch.float32, False),
        (math.nan, torch.float32, False),
        (1.01, torch.bfloat16, True),
        (0.0, torch.bfloat16, False),
    ],
)
def test_the_error_of_a_weight_is_relative_to_its_change(tmp_path, factor, dtype, is_right):
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(8, 8, generator=generator) for name in ("same", "other")}
    change = 0.5 * torch.randn(8, 8, generator=generator)
    one = {name: tensor + change for name, tensor in start.items()}
    ranks = one | {"other": start["other"] + factor * change}
    write_changes(tmp_path, {name: tensor.to(dtype) for name, tensor in start.items()}, one, ranks)
    errors = find_errors(tmp_path)
    assert (errors["other"] <= TOLERANCE) == is_right
    if not math.isnan(factor):
        assert errors["same"] == 0


def test_rounding_is_no_error(tmp_path):
    """A weight whose gradient is zero but for rounding, and one that changes by a few bits."""
    start = {"large": torch.ones(64), "bias": torch.zeros(64), "norm": torch.ones(64)}
    one = {"large": torch.full((64,), 1.1), "bias": torch.full((64,), 1e-9), "norm": start["norm"]}
    ranks = one | {"bias": torch.full((64,), -1e-9), "norm": start["norm"] + 2**-23}
    write_changes(tmp_path, start, one, ranks)
    assert max(find_errors(tmp_path).values()) <= TOLERANCE


@pytest.mark.rehearsal
@pytest.mark.timeout(300)
def test_an_error_of_the_run_is_the_rehearsals(local, tmp_path):
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(ToolError, match="chat_template"):
        run("--config", "smollm2_135m_lora", *local)


@pytest.mark.parametrize("file", shipped_files("recipe"), ids=lambda file: file.stem)
def test_every_recipes_model_shrinks(file):
    from hf_fsdp_recipes.settings import read_settings

    fields = read_settings(file)
    name = fields.get("model_name_or_path", "HuggingFaceTB/SmolLM2-135M-Instruct")
    config = find_config(
        str(file.parent / fields["config_name"]) if "config_name" in fields else name
    )
    tiny = shrink(config, 300)
    assert type(tiny) is type(config) and tiny.num_hidden_layers == 2 and tiny.hidden_size == 64
    assert tiny.tie_word_embeddings == config.tie_word_embeddings and tiny.vocab_size == 300


def test_a_recipe_for_another_trainer_is_refused_by_the_parser(tmp_path, local):
    (tmp_path / "dpo.yaml").write_text(
        "model_name_or_path: org/model\noutput_dir: runs/dpo\nprecompute_ref_log_probs: true\n"
    )
    with pytest.raises(RecipeError, match="precompute_ref_log_probs is not an argument"):
        run("--config", str(tmp_path / "dpo.yaml"), *local)


def test_what_cannot_be_read_is_named(tmp_path, local):
    file = find_file("recipe", "smollm2_135m_lora")
    with pytest.raises(
        ToolError, match=r"the tokenizer of HuggingFaceTB/SmolLM2-135M-Instruct cannot be read"
    ):
        write_recipe(file, tmp_path, ["--dataset_name", ROWS])
    with pytest.raises(RecipeError, match=r"no_such\.jsonl cannot be read"):
        write_recipe(
            file, tmp_path, [*local[:2], "--dataset_name", str(tmp_path / "no_such.jsonl")]
        )
    with pytest.raises(ToolError, match="names no model"):
        write_recipe(find_file("recipe", "quickstart"), tmp_path)


def test_the_error_of_a_run_is_found_in_its_output():
    rank = "[rank1]: Traceback (most recent call last):\n"
    rank += "[rank1]: torch.utils.checkpoint.CheckpointError: other values\n"
    lost = "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:4508\n"
    launcher = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    error = find_error(rank + lost + launcher)
    assert error == "torch.utils.checkpoint.CheckpointError: other values"
    assert find_error("RecipeError: no such column\n" + launcher) == "RecipeError: no such column"
    assert find_error("step 3\n") == ""
