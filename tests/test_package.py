"""The package: contents of the wheel, what is never loaded, and imports between subpackages."""

import ast
import re
import subprocess
import sys
import zipfile

import pytest

from tests.recipes.launching import ROOT

PACKAGE = ROOT / "hf_fsdp_recipes"
FLOORS = ["errors", "ranks", "measure", "launch", "load", "save", "train", "plan", "cli"]


@pytest.mark.launch
def test_wheel_carries_the_templates(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert len([name for name in names if re.fullmatch(r"hf_fsdp_recipes/accelerate_configs/\w+\.yaml", name)]) == 11
    assert not [name for name in names if name.startswith("tests")]


def test_no_pickle_is_loaded():
    """DCP's .metadata goes through an unpickler that allows only DCP's classes, and torch.load gets weights_only=True."""
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert "pickle.load" not in text and "training_args.bin" not in text, file
        assert "import pickle" not in text or file.parts[-2:] == ("patches", "torch.py"), file
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, (file, call)


def test_packages_import_only_packages_below_them():
    for file in PACKAGE.rglob("*.py"):
        layer = file.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
            if module and module.startswith("hf_fsdp_recipes") and layer in FLOORS:
                below = [module.split(".")[1]] if "." in module else [alias.name for alias in node.names]
                for other in below:
                    assert other not in FLOORS or FLOORS.index(other) <= FLOORS.index(layer), (file, other)
