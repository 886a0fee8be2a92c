"""The site that `make docs` builds has every page, and no link of it is broken."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.recipes.launching import ROOT

GENERATED = {"index.md", "pages.md", "recipes/README.md", "api.md"}  # written by docs/site_hooks.py


def test_navigation_lists_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n", 1)[1]
    listed = re.findall(r"([\w/]+\.md)$", navigation, flags=re.MULTILINE)
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(pages | GENERATED)


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings_handlers")),
    reason="needs 'hf-fsdp-recipes[docs]'",
)
def test_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "pages/index.html", "api/index.html", "recipes/index.html", "after_training/index.html"):
        assert (tmp_path / "site" / page).is_file()
    assert "load_model" in (tmp_path / "site" / "api" / "index.html").read_text()
