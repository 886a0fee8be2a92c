"""`hf-fsdp sweep`: runs recipes with several templates and numbers of ranks.

AMD's article on FSDP with ROCm does the same.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby, product
from math import ceil, nan
from operator import attrgetter
from os.path import getmtime
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Context, Option

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.metrics.metrics_file import (
    METRICS_FILE,
    read_metrics,
    summarize,
)
from hf_fsdp_recipes.tools.files import find_file
from hf_fsdp_recipes.tools.launch import find_error, run_recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOG = "launch.log"  # launch.slurm uses the same name
OUT_OF_MEMORY = "OOM"
# The first 3 of the 13 steps are warm-up.
MEASURE_ONLY = (
    "--num_machines 1 --max_steps 13 --logging_steps 1 --save_strategy no --eval_strategy no "
    "--load_best_model_at_end false --export false --report_to none --push_to_hub false "
    "--disable_tqdm true"
)
# Messages of torch's allocators for device and host, of Python, of Slurm, and of the launcher when
# the kernel has killed a rank.
OUT_OF_MEMORY_MESSAGE = re.compile(
    r"OutOfMemoryError|(CUDA|HIP|XPU|NPU) out of memory|DefaultCPUAllocator: (can't|not enough)"
    r"|\bMemoryError\b|Cannot allocate memory|oom[_-]kill|OUT_OF_MEMORY|exitcode *: -9"
)
COLUMNS = {  # {measurement: title and format}
    "device_reserved_peak_bytes": ("peak memory per rank, GB", "{:,.2f}"),
    "epoch_seconds": ("epoch, s", "{:,.0f}"),
    "step_seconds": ("step, s", "{:.3g}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "tokens_per_second_per_device": ("tokens/s per rank", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
}
EXPLANATION = (
    "\nMemory: largest rank, reserved by the device's allocator or, on CPU ranks, anonymous host "
    "memory at optimizer steps. Step: median after the warm-up. Epoch: steps of an epoch times the "
    "step time; no epoch was run. Padding is not counted.\n\n![scaling](sweep.png)\n"
)


class Result(NamedTuple):
    """What is known of a case: its status, and those of COLUMNS that were measured."""

    line: str  # recipe and template, in two columns of the table and as a label in the plots
    ranks: int
    status: str
    measured: dict[str, float]


def sweep(
    context: Context,
    output_dir: Annotated[Path, Option("--output_dir", help="Directory for all runs.")],
    config: Annotated[list[str], Option(help="Recipe; repeatable.")] = [],  # noqa: B006
    accelerate_config: Annotated[
        list[str], Option("--accelerate_config", help="Template; repeatable.")
    ] = [],  # noqa: B006
    num_processes: Annotated[
        list[int], Option("--num_processes", min=1, help="Ranks; repeatable.")
    ] = [],  # noqa: B006
) -> None:
    """Which template scales? Measure recipes with each template and number of ranks.

    The table has memory, time and throughput.

    The other arguments are those of `hf-fsdp sft`. Without recipes, only the table and plots of
    earlier runs are written.
    """
    given = (config, accelerate_config, num_processes)
    if any(given) and not all(given):
        raise ToolError(
            "a case needs --config, --accelerate_config and --num_processes. Without all three, "
            "the table of earlier runs is written."
        )
    recipes = [find_file("recipe", name) for name in config]
    templates = [find_file("template", name) for name in accelerate_config]
    for files in (recipes, templates):
        if len({file.stem for file in files}) < len(files):
            raise ToolError("two files have the same name, which names their cases. Rename one.")
    for recipe, template, ranks in product(recipes, templates, num_processes):
        case = output_dir / recipe.stem / f"{template.stem}_{ranks}ranks"
        case.mkdir(parents=True, exist_ok=True)
        run_recipe(
            template,
            [
                f"--config={recipe}",
                *MEASURE_ONLY.split(),
                *context.args,
                f"--num_processes={ranks}",
                f"--output_dir={case}",
            ],
            case / LOG,
        )
        print(f"{case}: {find_status(case)}", flush=True)
    print(write_table(output_dir))


def find_status(case: Path) -> str:
    """Return a case's status: "finished", "OOM", or "failed: " and the reason.

    Each start of a case has its own log, and only the newest one counts. metrics.jsonl may be of an
    earlier start until the newest has finished.
    """
    logs = sorted(case.rglob(LOG), key=getmtime)
    log = logs[-1].read_text(errors="replace") if logs else ""
    if "train_runtime" in log and "stopped by a signal" not in log:  # Trainer's last line; ours
        return "finished"
    if OUT_OF_MEMORY_MESSAGE.search(log):
        return OUT_OF_MEMORY
    error = find_error(log) or "no error in its log; it may still be running"
    return f"failed: {shorten(error, 160)}"


def read_result(case: Path) -> Result:
    """Return the result of a case from its directory, RECIPE/TEMPLATE_<n>ranks."""
    template, _, ranks = case.name.removesuffix("ranks").rpartition("_")
    status = find_status(case)
    entries = read_metrics(case / METRICS_FILE) if status == "finished" else []
    measured = summarize([entry for entry in entries if "loss" in entry])
    if "host_bytes" in measured:  # CPU ranks have no memory of a device
        measured.setdefault("device_reserved_peak_bytes", measured["host_bytes"])
    for start in entries:
        with suppress(KeyError):  # entries of steps, streams, and runs within their warm-up
            rows_of_step = (
                start["num_ranks"]
                * start["batch_per_device"]
                * start["gradient_accumulation_steps"]
            )
            num_steps = ceil(start["num_rows"] / rows_of_step)
            measured["epoch_seconds"] = num_steps * measured["step_seconds"]
    return Result(f"{case.parent.name} | {template}", int(ranks), status, measured)


def write_table(output_dir: Path) -> str:
    """Write sweep.md and sweep.png from what the cases have measured so far.

    Returns the text of sweep.md.

    Raises:
        ToolError: the directory holds no case.
    """
    results = sorted(map(read_result, output_dir.glob("*/*_*ranks/")))
    if not results:
        raise ToolError(
            f"{output_dir} holds no case of a sweep. Pass --config, --accelerate_config and "
            "--num_processes."
        )
    titles = " | ".join(title for title, _ in COLUMNS.values())
    lines = [
        f"| recipe | template | ranks | {titles} | status |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for result in results:
        cells = " | ".join(
            number.format(result.measured[name]) if name in result.measured else "-"
            for name, (_, number) in COLUMNS.items()
        )
        lines.append(
            f"| {result.line} | {result.ranks} | {cells} | {result.status.replace('|', '/')} |"
        )
    lines.append(EXPLANATION)
    draw(results).savefig(output_dir / "sweep.png")
    table = "\n".join(lines)
    (output_dir / "sweep.md").write_text(table)
    return table


def draw(results: Sequence[Result]) -> "Figure":
    """Plot each measurement by number of ranks, with one line per recipe and template.

    Below the number of ranks on which a line's case ran out of memory, the x axis has an OOM in the
    line's color.
    """
    from matplotlib.figure import Figure

    from hf_fsdp_recipes.metrics.report import style

    figure = Figure(figsize=(11, 13), layout="constrained")
    counts = sorted({result.ranks for result in results})
    for axes, name in zip(figure.subplots(3, 2).flat, COLUMNS, strict=True):
        space = "\n\n"  # of an OOM below the axis; the first line is that of the ticks' labels
        for label, group in groupby(results, attrgetter("line")):
            cases = list(group)
            ranks = [case.ranks for case in cases]
            values = [case.measured.get(name, nan) for case in cases]
            lost = [case.ranks for case in cases if case.status == OUT_OF_MEMORY]
            [line] = axes.plot(ranks, values, "o-", label=label, clip_on=False)
            for count in lost:
                axes.text(
                    count,
                    0,
                    space + OUT_OF_MEMORY,
                    ha="center",
                    va="top",
                    color=line.get_color(),
                )
            if lost:
                space += "\n"
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, map(str, counts))
        style(axes, COLUMNS[name][0], space[1:] + "ranks")
    figure.legend(handles=axes.get_lines(), loc="outside upper center")
    return figure
