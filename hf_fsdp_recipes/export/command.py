"""The `hf-fsdp export` and `hf-fsdp generate` commands. torch is imported when they run, not for `--help`."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from hf_fsdp_recipes.errors import ExportError


def register(app: typer.Typer) -> None:
    """Add the commands to the `hf-fsdp` application."""
    app.command("export")(export)
    app.command("generate")(generate)


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A sharded checkpoint: checkpoint-<step>, or a directory of .distcp files. With --merge-adapter also an "
            "exported adapter."
        ),
    ],
    output: Annotated[Path, typer.Argument(help="Directory to write.")],
    base_model: Annotated[
        Optional[str], typer.Option(help="Directory or Hub id of the base model, if the checkpoint does not record it.")
    ] = None,
    dtype: Annotated[Optional[str], typer.Option(help="Dtype to cast to, such as bfloat16.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of a file.")] = "5GB",
    merge_adapter: Annotated[
        bool, typer.Option("--merge-adapter", help="LoRA: merge the adapter into the base model.")
    ] = False,
) -> None:
    """Convert a sharded checkpoint to a model directory, or merge an adapter, without a GPU and in constant memory."""
    from hf_fsdp_recipes.export.from_checkpoint import export_checkpoint

    export_checkpoint(
        checkpoint,
        output,
        base_model=base_model,
        dtype=dtype,
        max_shard_size=max_shard_size,
        merge_adapter=merge_adapter,
    )
    print(f"exported: {output}")


def generate(
    model: Annotated[Path, typer.Argument(help="An export: a model or an adapter.")],
    prompt: Annotated[Optional[str], typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Optional[Path], typer.Option(help="Text file with the prompt.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Format the prompt with the model's chat template.")] = False,
    system: Annotated[Optional[str], typer.Option(help="System message, with --chat.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Number of tokens to generate.")] = 200,
) -> None:
    """Generate greedily from an export, to check its weights. The inference time goes to stderr."""
    from hf_fsdp_recipes.export.generate import generate_timed

    source = prompt if prompt_file is None else prompt_file
    if source is None or (prompt is not None and prompt_file is not None):
        raise ExportError("there is no prompt, or more than one. Pass either --prompt or --prompt-file.")
    text, num_tokens, seconds = generate_timed(model, source, chat, system, max_new_tokens)
    print(text)
    typer.echo(
        f"inference time: {seconds:.2f} s for {num_tokens} tokens ({num_tokens / seconds:.1f} tokens/s)", err=True
    )
