"""`hf-fsdp sweep`: runs a recipe with several templates and numbers of ranks, like AMD's article on FSDP with ROCm."""

import re
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, average, read_metrics
from hf_fsdp_recipes.tools.files import find_file
from hf_fsdp_recipes.tools.launch import find_error, run_recipe

LOG_FILE, RANK_LOGS = "log.txt", "logs"
FINISHED, OUT_OF_MEMORY = "finished", "OOM"
MEASURE_ONLY = (
    "--num_machines 1 --max_steps 13 --logging_steps 1 --save_strategy no --eval_strategy no --load_best_model_at_end false "
    "--export false --report_to none --push_to_hub false --disable_tqdm true"  # the first 3 steps are warm-up
)
# Messages of torch's allocators for device and host, of Python, and of Slurm when the kernel has killed a task.
OUT_OF_MEMORY_MESSAGE = re.compile(
    r"OutOfMemoryError|(CUDA|HIP|XPU|NPU) out of memory|DefaultCPUAllocator: (can't|not enough)|\bMemoryError\b"
    r"|Cannot allocate memory|oom[_-]kill|OUT_OF_MEMORY"
)
COLUMNS = {  # {measurement without the warm-up: title and format}
    "gigabytes": ("peak memory per rank, GB", "{:,.2f}"),
    "epoch_seconds": ("epoch, s", "{:,.0f}"),
    "step_seconds": ("step, s", "{:.3g}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "tokens_per_second_per_device": ("tokens/s per rank", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
}
Result: TypeAlias = dict[
    str, Any
]  # template, ranks and status of a case, and what is known of COLUMNS


def sweep(
    context: typer.Context,
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Directory for all runs.")],
    accelerate_config: Annotated[
        list[str], typer.Option("--accelerate_config", help="Template; repeatable.")
    ] = [],  # noqa: B006
    num_processes: Annotated[
        list[int], typer.Option("--num_processes", min=1, help="Ranks; repeatable.")
    ] = [],  # noqa: B006
) -> None:
    """Which template scales? Measure a recipe's memory, time and throughput with each template and number of ranks.

    The other arguments are those of `hf-fsdp sft`. Without templates, only the table and plots of earlier runs are written.
    """
    import torch

    if bool(accelerate_config) != bool(num_processes):
        raise ToolError(
            "Pass both --accelerate_config and --num_processes, or neither to show the earlier runs."
        )
    for template in [find_file("template", name) for name in accelerate_config]:
        for ranks in sorted(set(num_processes)):
            case = output_dir / f"{template.stem}_{ranks}ranks"
            case.mkdir(parents=True, exist_ok=True)
            for earlier in (case / METRICS_FILE, case / LOG_FILE):
                earlier.unlink(missing_ok=True)
            arguments = [
                *MEASURE_ONLY.split(),
                *context.args,
                f"--num_processes={ranks}",
                f"--output_dir={case}",
            ]
            run_recipe(
                template, arguments, case / LOG_FILE, on_cpu=not torch.accelerator.is_available()
            )
            print(f"{case.name}: {find_status(case)}", flush=True)
    print(write_table(output_dir).read_text())


def find_status(case: Path) -> str:
    """Return a case's status, from metrics.jsonl and logs: "finished", "OOM", "not run", or "failed: " and the reason."""
    entries = read_metrics(case / METRICS_FILE)
    num_done, num_steps = (
        max((entry.get(name, 0) for entry in entries), default=0) for name in ("step", "max_steps")
    )
    if any(entry.get("ended_at_step") == num_steps for entry in entries):
        return FINISHED
    files = [*case.glob("*log*"), *sorted((case / RANK_LOGS).rglob("*"))]
    log = "\n".join(file.read_text(errors="replace") for file in files if file.is_file())
    if OUT_OF_MEMORY_MESSAGE.search(log):
        return OUT_OF_MEMORY
    if error := find_error(log):
        return f"failed: {textwrap.shorten(error, 160, placeholder='...')}"
    if re.search(r"exitcode *: -9", log):
        return "failed: a rank was killed (SIGKILL), usually for lack of host memory"
    return (
        f"failed: {num_done} of {num_steps} steps; it may still be running"
        if log or entries
        else "not run"
    )


def read_result(case: Path) -> Result:
    """Return the result of a case from its directory, TEMPLATE_<n>ranks."""
    template, _, ranks = case.name.removesuffix("ranks").rpartition("_")
    result: Result = {"template": template, "ranks": int(ranks), "status": find_status(case)}
    entries = read_metrics(case / METRICS_FILE)
    steps = [entry for entry in entries if "loss" in entry and not entry.get("is_warmup")]
    if result["status"] != FINISHED or not steps:
        return result
    start = next(entry for entry in entries if "run" in entry)
    rows_per_step = (
        start["batch_per_device"] * start["num_ranks"] * start["gradient_accumulation_steps"]
    )
    seconds = statistics.median(step["step_seconds"] for step in steps)
    kinds = ("device_reserved_peak_bytes", "device_peak_bytes", "host_bytes")
    found: Result = {name: average(steps, name) for name in COLUMNS}
    found["gigabytes"] = (
        next(filter(None, (max(max(step[kind]) for step in steps) for kind in kinds)), 0) / 1e9
    )
    found["step_seconds"] = seconds
    if "num_rows" in start:  # otherwise the dataset is a stream
        found["epoch_seconds"] = -(-start["num_rows"] // rows_per_step) * seconds
    return result | {name: value for name, value in found.items() if value is not None}


def write_table(output_dir: Path) -> Path:
    """Write sweep.md and sweep.png from what the cases have measured so far. Return the path of sweep.md.

    Raises:
        ToolError: the directory holds no case.
    """
    results = [read_result(case) for case in output_dir.glob("*_*ranks") if case.is_dir()]
    results.sort(key=lambda one: (one["template"], one["ranks"]))
    if not results:
        raise ToolError(
            f"{output_dir} holds no case of a sweep. Pass the --output_dir of `hf-fsdp sweep`."
        )
    titles = ["template", "ranks", *(title for title, _ in COLUMNS.values())]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    for one in results:
        cells = [
            text.format(one[name]) if name in one else "-" for name, (_, text) in COLUMNS.items()
        ]
        if "gigabytes" not in one:
            cells[0] = one["status"].partition(":")[0]
        lines.append(f"| {' | '.join([one['template'], str(one['ranks']), *cells])} |")
    failed = [one for one in results if ":" in one["status"]]
    lines += [
        "",
        *(f"- {one['template']} on {one['ranks']}: {one['status']}" for one in failed),
        "",
    ]
    lines += [
        "Memory: largest rank, reserved by the device's allocator or, on CPU ranks, anonymous host memory at optimizer steps. "
        "Step: median after the warm-up. Epoch: steps of an epoch times the step time; no epoch was run. Padding is not counted.",
        "",
        "![scaling](sweep.png)",
        "",
    ]
    draw(results).savefig(output_dir / "sweep.png")
    table = output_dir / "sweep.md"
    table.write_text("\n".join(lines))
    return table


def draw(results: Sequence[Result]) -> Any:
    """Plot each measurement by number of ranks, with one line per template. "OOM" marks lack of memory."""
    from matplotlib.figure import Figure

    from hf_fsdp_recipes.metrics.report import style

    counts = sorted({one["ranks"] for one in results})
    figure = Figure(figsize=(11, 12), layout="constrained")
    for axes, (name, (title, _)) in zip(figure.subplots(3, 2).flat, COLUMNS.items(), strict=True):
        for template in dict.fromkeys(one["template"] for one in results):
            measured = [one for one in results if one["template"] == template and name in one]
            axes.plot(
                [one["ranks"] for one in measured],
                [one[name] for one in measured],
                "o-",
                label=template,
            )
        for ranks in counts:
            if lost := [
                one["template"]
                for one in results
                if (one["ranks"], one["status"]) == (ranks, OUT_OF_MEMORY)
            ]:
                text, place = f"OOM: {', '.join(lost)}", ("data", "axes fraction")
                axes.annotate(
                    text, (ranks, 0.95), xycoords=place, rotation=90, va="top", ha="center"
                )
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(ranks) for ranks in counts])
        axes.set_xlim(counts[0] / 1.3, counts[-1] * 1.3)
        style(axes, title, "ranks")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
