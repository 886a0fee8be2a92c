"""Defines the `hf-fsdp` command. torch is imported only when a subcommand that needs it runs."""

import logging
import sys
from pathlib import Path
from typing import Annotated, Optional

from typer import Argument, Option, Typer

from hf_fsdp_recipes.errors import RecipeError, ToolError
from hf_fsdp_recipes.tools.config import check
from hf_fsdp_recipes.tools.files import copy, make_app, quickstart
from hf_fsdp_recipes.tools.generate import generate
from hf_fsdp_recipes.tools.launch import sft
from hf_fsdp_recipes.tools.plan.command import plan
from hf_fsdp_recipes.tools.preflight import preflight
from hf_fsdp_recipes.tools.rehearse import rehearse
from hf_fsdp_recipes.tools.sweep import sweep

# bitsandbytes warns that 4-bit kernels for the CPU are missing.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# Settings of a command that passes fields of a recipe on.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = Typer(
    help="FSDP recipes for Accelerate, Trainer and TRL.",
    no_args_is_help=True,
    add_completion=False,
    # For a failed launch, torch already prints a table of the ranks' errors.
    pretty_exceptions_enable=False,
    # So --base_model works, too.
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)
app.add_typer(make_app("recipe", copy), name="recipes")
app.add_typer(make_app("template", check), name="config")
for command_with_fields in (sft, plan, preflight, rehearse, sweep):
    app.command(context_settings=PASS_ON)(command_with_fields)


@app.command()
def checkpoints(
    output_dir: Annotated[Path, Argument(help="Output directory of a run.")],
    verify: Annotated[bool, Option("--verify", help="Read every file and check its hash.")] = False,
    accept: Annotated[
        Optional[str], Option(help="Checkpoint whose files were changed on purpose, or its step.")
    ] = None,
) -> None:
    """List a run's checkpoints.

    The exit status is 1 if the run cannot be resumed from any of them.
    """
    from hf_fsdp_recipes.saving import resume
    from hf_fsdp_recipes.saving.directory import list_checkpoints, read_manifest, step_of

    if accept is not None:
        changed = resume.accept(output_dir / f"checkpoint-{accept.removeprefix('checkpoint-')}")
        print("accepted:", ", ".join(changed) or "nothing has changed")
    damages = []
    print("    step           MB  ranks  state")
    for checkpoint in reversed(list_checkpoints(output_dir)):
        sizes = {
            str(path.relative_to(checkpoint)): path.stat().st_size
            for path in checkpoint.rglob("*")
            if path.is_file()
        }
        manifest = read_manifest(checkpoint) or {}
        if verify or not manifest:
            damage = resume.find_damage(checkpoint)
        else:
            damage = None
            for name, facts in manifest["files"].items():
                if sizes.get(name) != facts["bytes"]:
                    damage = f"{name} is missing or cut off"
                    break
        damages.append(damage)
        print(
            f"{step_of(checkpoint):>8}  {sum(sizes.values()) / 1e6:>11,.1f}  "
            f"{manifest.get('world_size', '?'):>5}  {damage or 'complete'}"
        )
    if all(damages):
        raise ToolError(f"{output_dir} holds no checkpoint that a run can be resumed from.")


@app.command()
def export(
    checkpoint: Annotated[
        Path, Argument(help="checkpoint-<step>, or an adapter if --merge-adapter is set.")
    ],
    output: Annotated[
        Path, Argument(help="Directory to write. If it exists, the next free name is used.")
    ],
    base_model: Annotated[
        Optional[str], Option(help="Base model, if the checkpoint does not name it.")
    ] = None,
    dtype: Annotated[
        Optional[str], Option(help="Dtype of the exported weights, such as bfloat16.")
    ] = None,
    max_shard_size: Annotated[str, Option(help="Largest size of a file.")] = "5GB",
    merge_adapter: Annotated[
        bool, Option("--merge-adapter", help="Merge LoRA into the base model.")
    ] = False,
) -> None:
    """Convert a checkpoint to a directory for `from_pretrained` and vLLM. This needs no GPU.

    It is converted one tensor at a time.
    """
    from hf_fsdp_recipes.export.export import export_checkpoint

    written = export_checkpoint(
        checkpoint,
        output,
        base_model=base_model,
        dtype=dtype,
        max_shard_size=max_shard_size,
        merge_adapter=merge_adapter,
    )
    print("exported:", written)


app.command()(generate)


@app.command()
def report(
    output_dir: Annotated[
        Path, Argument(help="Output directory of a run, even of one that still trains.")
    ],
) -> None:
    """Write a run's report.md and plots from its metrics.jsonl."""
    from hf_fsdp_recipes.metrics.report import write_report

    print("report:", write_report(output_dir))


app.command(context_settings=PASS_ON | {"help_option_names": []})(quickstart)


def main() -> None:
    """Run the command. A RecipeError is printed as one line on stderr, and the exit status is 1."""
    try:
        app()
    except RecipeError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
