"""Every reader of recipes and configs refuses the same files, each with its own class of error."""

from pathlib import Path

import pytest

from hf_fsdp_recipes.configs.shipped_files import read_recipe
from hf_fsdp_recipes.configs.validate import read_config
from hf_fsdp_recipes.configs.yaml_file import parse_yaml
from hf_fsdp_recipes.errors import PlanError, RecipeError, TemplateError

READERS = ((read_config, TemplateError), (lambda file: read_recipe(file, PlanError), PlanError))
BAD = {
    "fsdp_config: {}\nseed: 1\nfsdp_config: {}\n": "sets fsdp_config in line 1 and again in line 3",
    "a: [\n": r"expected the node content.* in line 2",
    "a: 1\nb: x\0\n": r"contains the character '\\x00' in line 2",
    "a: 1\nrun_name: 2024-13-01\n": r"month must be in 1\.\.12\) in line 2",
    "datasets:\n- path: 2024-02-31\n": r"day is out of range for month\) in line 2",
    "a: 1\n--- \nb: 1\n": "but found another document in line 2",
    "- a\n": "not a mapping",
    "": "empty",
}


@pytest.mark.parametrize(("reader", "error_class"), READERS)
@pytest.mark.parametrize(("text", "says"), BAD.items())
def test_bad_file_is_one_error_of_the_caller(tmp_path, reader, error_class, text, says):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(error_class, match=rf"bad\.yaml .*{says}") as caught:
        reader(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("reader", "error_class"), READERS)
def test_file_that_cannot_be_read_is_one_error_of_the_caller(tmp_path, reader, error_class):
    (tmp_path / "latin.yaml").write_bytes(b"run_name: \xe9\n")
    for path, says in (
        (tmp_path / "latin.yaml", "not UTF-8"),
        (tmp_path, "directory|neither a file"),
        (Path("no/x.yaml"), "No such file|neither a file"),
    ):
        with pytest.raises(error_class, match=says):
            reader(path)


def test_bad_override_is_named():
    assert parse_yaml("1e-4", "--learning_rate", RecipeError) == "1e-4"
    with pytest.raises(RecipeError, match=r"^--run_name is not valid YAML: .*month must be"):
        parse_yaml("2024-13-01", "--run_name", RecipeError)
