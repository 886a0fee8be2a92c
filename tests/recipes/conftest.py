"""The environment of ranks that run a recipe in forked processes."""

from typing import Any

import pytest
import yaml

from tests.ranks.harness import template_environment
from tests.recipes.launching import ROOT, merge


@pytest.fixture(scope="session")
def ranks_environment(tmp_path_factory):
    """Return a function that returns a rank's environment variables for a changed CPU template."""
    template = yaml.safe_load((ROOT / "accelerate_configs" / "cpu.yaml").read_text())
    cache = tmp_path_factory.mktemp("datasets")

    def environment(changes: dict[str, Any]) -> dict[str, str]:
        file = tmp_path_factory.mktemp("template") / "template.yaml"
        file.write_text(yaml.safe_dump(merge(template, changes)))
        return template_environment(file) | {"HF_DATASETS_CACHE": str(cache)}

    return environment
