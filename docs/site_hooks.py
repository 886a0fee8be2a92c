"""Hooks of mkdocs.yml.

The README, the recipes' page and the Python interface become pages. A link that leaves docs/ leads
to a copy of the file in the site, so that no address of a repository is needed.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import hf_fsdp_recipes

ROOT = Path(__file__).resolve().parent.parent
# File in the repository: page of the site.
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "recipes/README.md": "recipes/README.md",
}
LINK = re.compile(r"(\]\(|src=\"|srcset=\"|href=\")(?![a-z]+:|#|/)([^)\"\s#]+)")


def source_of(page: str) -> str:
    """Return the file in the repository that a page is made from."""
    return next((source for source, target in PAGES.items() if target == page), f"docs/{page}")


def place_in_site(file: str) -> str:
    """Return where a file of the repository is in the site.

    Source files get the ending .txt, which browsers show.
    """
    if file in PAGES:
        return PAGES[file]
    if file.startswith("docs/") and not file.endswith(".py"):
        return file.removeprefix("docs/")
    return f"files/{file}" + ("" if file.endswith((".png", ".svg")) else ".txt")


def rewrite_links(markdown: str, page: str) -> tuple[str, set[str]]:
    """Return a page's text with links that hold in the site, and the files they need.

    The files are those outside docs/.
    """
    source = source_of(page)
    outside: set[str] = set()

    def rewrite(match: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if (ROOT / file).is_dir() and (ROOT / file / "README.md").is_file():
            file += "/README.md"
        if not (ROOT / file).is_file():
            return match[0]  # mkdocs reports it
        target = place_in_site(file)
        if target.startswith("files/"):
            outside.add(file)
        return match[1] + posixpath.relpath(target, posixpath.dirname(page) or ".")

    return LINK.sub(rewrite, markdown), outside


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and every file that a page links to."""
    for file in list(files):
        if file.src_uri.endswith((".py", ".pyc")) or f"docs/{file.src_uri}" in PAGES:
            files.remove(file)
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    names = "\n\n".join(
        f"::: hf_fsdp_recipes.{hf_fsdp_recipes._MODULES[name]}.{name}"
        for name in hf_fsdp_recipes.__all__
    )
    files.append(File.generated(config, "api.md", content=f"# Python interface\n\n{names}\n"))
    outside = set()
    for file in files.documentation_pages():
        outside |= rewrite_links(file.content_string, file.src_uri)[1]
    for source in sorted(outside):
        content = (ROOT / source).read_bytes()
        files.append(File.generated(config, place_in_site(source), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page."""
    return rewrite_links(markdown, page.file.src_uri)[0]
