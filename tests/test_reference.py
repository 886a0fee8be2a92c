"""docs/reference.md and docs/patches.md match the code."""

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_generated_pages_are_up_to_date():
    pages = runpy.run_path(str(DOCS / "make_reference.py"))["render_all"]()
    for name, text in pages.items():
        assert (DOCS / name).read_text() == text, f"docs/{name} is stale: run make docs-tables"
