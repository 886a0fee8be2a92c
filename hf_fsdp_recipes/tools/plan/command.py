"""`hf-fsdp plan`: predicts how much memory a recipe takes, for what, and where it fits.

If the recipe does not fit, measures which options save memory.
"""

import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from multiprocessing.pool import Pool
from os import cpu_count
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Context, Exit, Option

from hf_fsdp_recipes.errors import ToolError, explained
from hf_fsdp_recipes.tools.files import RecipeOption, TemplateOption

if TYPE_CHECKING:
    from hf_fsdp_recipes.tools.plan.job import Job, Request
    from hf_fsdp_recipes.tools.plan.step import Step

GPU_GIGABYTES = (24, 40, 48, 80, 141)
MARGIN = 0.05  # of a memory. A job that needs a part of it may not fit.
SYNC = """--accelerator_config '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'"""
LORA = "--use_peft true --lora_target_modules all-linear --dtype bfloat16"
# Options that may save memory. The first ones cost nothing. The last ones change what is trained.
ADVICE = (
    "--accelerate_config full_shard",
    "--gradient_checkpointing true",
    SYNC,
    "--per_device_train_batch_size 1",
    "--fsdp_reshard_after_forward true",
    "--optim paged_adamw_32bit",
    "--fsdp_offload_params true",
    LORA,
    f"{LORA} --load_in_4bit true",
)
LEAST_SAVING = 0.01  # of what the job needs. Options that save less are not listed.


def plan(
    context: Context,
    accelerate_config: TemplateOption,
    config: RecipeOption = None,
    gpu_memory: Annotated[
        str, Option("--gpu_memory", help="Memory of one GPU, such as 24GB; not for CPU ranks.")
    ] = "80GB",
    as_json: Annotated[bool, Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Will it fit? Predict the memory of one GPU from the model's config alone.

    A table shows on how many GPUs of which size the recipe fits, and with which batch. If the run
    does not fit, the output lists options that save memory, and the exit status is 1. The arguments
    are those of `hf-fsdp sft`. Options of `accelerate launch` and fields of the recipe can follow
    in any order.
    """
    from hf_fsdp_recipes.metrics.memory import available_host_bytes
    from hf_fsdp_recipes.tools.plan.job import Request

    with explained(ToolError, f"--gpu_memory is {gpu_memory}, not gigabytes, such as 24GB"):
        limit = float(gpu_memory.upper().removesuffix("GB"))
        if not 0 < limit < inf:
            raise ValueError("out of range")
    request = Request(config, accelerate_config, context.args)
    warnings.simplefilter("ignore", FutureWarning)
    job = request.read()
    host_left = available_host_bytes() / 1e9
    if job.on_cpu:
        limit = host_left
    with explained(
        ToolError, "plan needs what an installed version lacks (tested: TRL 1.16 with torch 2.13)"
    ):
        from hf_fsdp_recipes.tools.plan import table
    # A forked process could inherit a lock that another thread of this one holds.
    workers = multiprocessing.get_context("forkserver")
    workers.set_forkserver_preload(["hf_fsdp_recipes.cli", table.__name__])
    with workers.Pool(cpu_count()) as pool:
        answer = _answer(pool, request, job, limit)
    if as_json:
        print(json.dumps(answer, indent=1))
    else:
        _print(answer, limit, host_left)
    if not answer["fits"]:
        raise Exit(1)


def _answer(pool: Pool, request: "Request", job: "Job", limit: float) -> dict[str, Any]:
    """Return all that the command says. Sizes are in GB."""
    from hf_fsdp_recipes.tools.plan import table

    own = (job.shape[0], job.num_ranks)
    estimate = table.Estimate(job)
    sizes = [own] if job.on_cpu else estimate.to_measure
    requests = [
        request.change(f"--per_device_train_batch_size={rows} --num_processes={ranks}")
        for rows, ranks in sizes
    ]
    measured = _measure_all(pool, table.measure, requests)
    steps = dict(zip(sizes, measured, strict=True))
    answer = _describe(job, steps[own])
    answer["needed"] = answer["gigabytes"]
    if job.on_cpu:
        answer["needed"] = sum(answer["host_gigabytes"].values())
    else:
        limits = {size: size * (1 - MARGIN) for size in sorted({*GPU_GIGABYTES, limit})}
        estimate.fit(steps)
        answer["table"] = list(table.make_table(job, estimate, limits))
    answer["fits"] = answer["needed"] <= limit * (1 - MARGIN)
    if not answer["fits"]:
        same_ranks = request.change(f"--num_processes={job.num_ranks}")
        changed = _measure_all(pool, partial(table.measure_change, same_ranks), ADVICE)
        answer["advice"] = _compare(answer["gigabytes"], changed)
    return answer


def _measure_all(pool: Pool, measure: Callable, jobs: Sequence) -> list:
    """Return the result of each job. On a terminal, show the progress."""
    is_hidden = not sys.stderr.isatty()
    results = pool.imap(measure, jobs)
    with typer.progressbar(results, len(jobs), "measuring", is_hidden, file=sys.stderr) as shown:
        return list(shown)


def _describe(job: "Job", step: "Step") -> dict[str, Any]:
    """Return what the command says of the job itself. Sizes are in GB."""
    rows, length = job.shape
    host = {purpose: job.ranks_of_node * size / 1e9 for purpose, size in step.host.items()}
    host["loading, on rank 0"] = step.loading / 1e9
    peak = {name: size / 1e9 for name, size in step.full_peak(job).items()}
    total = sum(peak.values())
    if job.on_cpu:
        host["ranks, at the peak of a step"] = job.ranks_of_node * total
    return {
        "ranks": job.num_ranks,
        "ranks_of_node": job.ranks_of_node,
        "rows": rows,
        "tokens_of_row": length,
        "gradient_accumulation_steps": job.arguments.training.gradient_accumulation_steps,
        "gigabytes": total,
        "gigabytes_between_steps": step.resident / 1e9,
        "peak_gigabytes": peak,
        "host_gigabytes": host,
        "not_counted": job.not_counted,
        "table": [],
        "advice": [],
    }


def _compare(gigabytes: float, changed: Sequence[float | None]) -> list[dict[str, Any]]:
    """Return the options that save memory, with how much a rank then needs."""
    return [
        {"options": options, "gigabytes": needed, "saved_gigabytes": gigabytes - needed}
        for options, needed in zip(ADVICE, changed, strict=True)
        if needed is not None and gigabytes - needed > LEAST_SAVING * gigabytes
    ]


def _print(answer: Mapping[str, Any], limit: float, host_left: float) -> None:
    """Print the answer for a person."""
    print(
        "{ranks} ranks; each: {rows} x {tokens_of_row} tokens, {gradient_accumulation_steps} times "
        "per step\nmemory of one rank at the peak of a step:".format_map(answer)
    )
    _print_sizes(answer["peak_gigabytes"])
    print(
        "{gigabytes:9.2f} GB  in total; {gigabytes_between_steps:.2f} GB between steps\n"
        "host memory of a node with {ranks_of_node} ranks, besides Python ".format_map(answer)
        + f"(this machine has {host_left:.0f} GB left):"
    )
    _print_sizes(answer["host_gigabytes"])
    if answer["not_counted"]:
        print("set, but not counted in this plan:", ", ".join(answer["not_counted"]))
    if answer["table"]:
        _print_table(answer)
    if answer["fits"]:
        print(f"fits in {limit:.4g} GB")
    elif answer["needed"] <= limit:
        print(f"may not fit in {limit:.4g} GB: less than {MARGIN:.0%} would be left")
    else:
        print(f"does not fit in {limit:.4g} GB")
    if answer["advice"]:
        print("Options that save memory:")
    for change in answer["advice"]:
        print("{saved_gigabytes:9.2f} GB  {options}".format_map(change))


def _print_sizes(sizes: Mapping[str, float]) -> None:
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        print(f"{sizes[name]:9.2f} GB  {name}")


def _print_table(answer: Mapping[str, Any]) -> None:
    """Print on how many GPUs of which size the job fits."""
    print(
        "largest per_device_train_batch_size that fits (-: none); with a batch size of {rows}, GB "
        "that a GPU needs, and a node's host memory:".format_map(answer)
    )
    sizes = answer["table"][0]["largest_batch"]
    titles = [f"{size:g} GB" for size in sizes]
    print("  GPUs  " + "".join(f"{title:>8}" for title in [*titles, "GPU", "host"]))
    for row in answer["table"]:
        cells = [number or "-" for number in row["largest_batch"].values()]
        cells += [f"{row['gigabytes']:.1f}", f"{row['host_gigabytes']:.1f}"]
        print(f"{row['ranks']:>6}  " + "".join(f"{cell:>8}" for cell in cells))
