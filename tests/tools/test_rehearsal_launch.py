"""Rehearsals: recipes that run from start to end in small, and errors that a job would hit late."""

import pytest
import typer
from typer.testing import CliRunner

from hf_fsdp_recipes.errors import RecipeError, ToolError
from hf_fsdp_recipes.tools.files import find_file, shipped_files
from hf_fsdp_recipes.tools.launch import find_error
from hf_fsdp_recipes.tools.plan.job import find_config
from hf_fsdp_recipes.tools.rehearse import rehearse, shrink, write_recipe
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
    files = {file.name for file in (kept / "run").iterdir()}
    assert {"checkpoint-2", "checkpoint-6", "export", "report.md"} <= files


@pytest.mark.rehearsal
@pytest.mark.timeout(300)
def test_an_error_of_the_run_is_the_rehearsals(local, tmp_path):
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(ToolError, match="chat_template"):
        run("--config", "smollm2_135m_lora", *local)


@pytest.mark.parametrize("file", shipped_files("recipe"), ids=lambda file: file.stem)
def test_every_recipes_model_shrinks(file):
    from hf_fsdp_recipes.training.arguments import read_recipe

    fields = read_recipe(file)
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
