"""Generates docs/reference.md and docs/patches.md from the code. Run it with `make docs-tables`; a test checks both files."""

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import typer

import hf_fsdp_recipes
from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.patches.registry import all_patches
from hf_fsdp_recipes.training.arguments import RecipeArguments

DOCS = Path(__file__).resolve().parent
INTRODUCTION = """# Reference

Generated from the code by `make docs-tables`.

- [Recipe fields](#recipe-fields)
- [Command line](#command-line)
- [Python](#python)
- [Trainers](#trainers)

## Recipe fields

A recipe is a YAML file of TRL's and Trainer's own arguments (`ScriptArguments`, `SFTConfig`, `ModelConfig`,
`DatasetMixtureConfig`), which keep their names and meaning, and of the fields below. Any field can be overridden on the
command line as `--field value`.
"""


TRAINERS = """
## Trainers

Each cell is a test on two CPU ranks: a resumed run has the losses and the export of an uninterrupted one.

| trainer | `load_model`, saving | resume, export | LoRA | QLoRA | FSDP1 | tests |
|---|---|---|---|---|---|---|
| `SFTTrainer` | yes | yes | yes | yes | yes | `tests/recipes/test_sft.py` |
| `DPOTrainer` | yes | yes | yes | yes | yes | `tests/recipes/test_trainers_ranks.py` |
| `KTOTrainer` | yes | yes | yes | yes | yes | the same |
| `RewardTrainer` | yes | yes | yes, with its head | yes, with its head | yes | the same |
| `GRPOTrainer` | yes | yes | yes | yes | refused without vLLM | the same |
| `Trainer` | yes | yes | yes | yes | with LoRA | `tests/test_examples_launch.py`, `tests/checkpointing/test_own_script_ranks.py` |
| none: `save_checkpoint` | yes | yes | yes | yes | yes | `tests/checkpointing/test_accelerator_state_ranks.py` |

[trainers.md](trainers.md) has columns, reference models and kinds of LoRA.
"""


def write_all() -> None:
    """Write both files."""
    for name, text in render_all().items():
        (DOCS / name).write_text(text, encoding="utf-8")


def render_all() -> dict[str, str]:
    """Return the text of each generated page, by file name."""
    reference = "\n".join(
        [INTRODUCTION, *_recipe_fields(), "", "## Command line", *_commands(), "", "## Python", *_api(), TRAINERS]
    )
    return {"reference.md": reference.rstrip() + "\n", "patches.md": _patches()}


def _recipe_fields() -> list[str]:
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(RecipeArguments):
        choices = field.metadata.get("choices")
        meaning = str(field.metadata["help"]) + (f" One of {', '.join(map(str, choices))}." if choices else "")
        lines.append(f"| `{field.name}` | `{field.default}` | {meaning} |")
    return lines


def _commands() -> list[str]:
    return [line for name, command in _walk(typer.main.get_command(app), "hf-fsdp") for line in _command(name, command)]


def _walk(command: Any, name: str) -> list[tuple[str, Any]]:
    """List the visible leaf commands of a click group."""
    if not hasattr(command, "commands"):
        return [(name, command)]
    found = []
    for child_name, child in command.commands.items():
        if not child.hidden:
            found += _walk(child, f"{name} {child_name}")
    return found


def _command(name: str, command: Any) -> list[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and "--help" not in p.opts]
    usage = " ".join([name, *(p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments)])
    lines = ["", f"### `{name}`", "", inspect.cleandoc(command.help or ""), "", "```text", usage, "```", ""]
    rows = [(p.name.upper(), p) for p in arguments] + [(", ".join(p.opts + p.secondary_opts), p) for p in options]
    if rows:
        lines += ["| argument | default | meaning |", "|---|---|---|"]
    for label, parameter in rows:
        default = "" if parameter.default in (None, False) or callable(parameter.default) else f"`{parameter.default}`"
        lines.append(f"| `{label}` | {default} | {parameter.help or ''} |")
    return lines


def _api() -> list[str]:
    lines: list[str] = []
    for name in hf_fsdp_recipes.__all__:
        found = getattr(hf_fsdp_recipes, name)
        documented = found.__init__ if inspect.isclass(found) else found
        signature = _plain(inspect.signature(documented))
        lines += ["", f"### `{name}`", "", "```python", *_wrap(name, signature), "```", ""]
        lines += ["```text", inspect.cleandoc(found.__doc__ or ""), "```"]
    return lines


def _plain(signature: inspect.Signature) -> inspect.Signature:
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    return signature.replace(parameters=parameters)


def _wrap(name: str, signature: inspect.Signature) -> list[str]:
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", f"{name}{signature}")  # module paths of types
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations given as strings
    return textwrap.wrap(text, width=110, subsequent_indent="    ", break_long_words=False)


def _patches() -> str:
    """Return all patches as the Markdown of docs/patches.md."""
    lines = [
        "# Patches",
        "",
        "Every upstream function that this package replaces for a run. `tools/planner/step_trace.py` and",
        "`training/device_metrics.py` also replace a few, each during one call. Generated by `make docs-tables` from",
        "`hf_fsdp_recipes/patches/`. Imports patch nothing, and each patch affects only models and plugins that come",
        "through this package.",
        "",
    ]
    for feature in dict.fromkeys(patch.feature for patch in all_patches()):
        lines += [f"## For {feature}", ""]
        for patch in all_patches():
            if patch.feature == feature:
                lines += [
                    f"### `{patch.target}`",
                    "",
                    f"- Change: {patch.changes}",
                    f"- Reason: {patch.reason}",
                    f"- Upstream: {patch.upstream}",
                    f"- Tested with: {patch.tested_with}",
                    "",
                ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    write_all()
