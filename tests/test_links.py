"""The documentation's links lead somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_links_lead_to_files_and_headings_that_exist():
    broken = []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "recipes" / "README.md"):
        for link in re.findall(r"\]\(([^):\s]+)\)", page.read_text()):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            text = target.read_text() if target.suffix == ".md" and target.is_file() else ""
            headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
            anchors = {
                re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
            }
            if not target.exists() or (anchor and anchor not in anchors):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []
