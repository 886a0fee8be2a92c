"""A plan as a person reads it, and as plain values for machines."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from hf_fsdp_recipes.tools.planner.communication import Traffic
from hf_fsdp_recipes.tools.planner.host_memory import host_needs
from hf_fsdp_recipes.tools.planner.job import describe
from hf_fsdp_recipes.tools.planner.rank_memory import Plan
from hf_fsdp_recipes.tools.planner.suggest import Alternative, as_dict

PARTS = (
    "parameters",
    "optimizer",
    "gradients",
    "kept outputs",
    "4-bit scales",
    "unpacked weight",
    "gathered units",
    "whole gradients",
    "activations",
    "logits and loss",
    "optimizer step",
)
NOTES = {
    "parameters": "this rank's shard",
    "gradients": "this rank's part, reduced",
    "gathered units": "the unit at work, and what is gathered ahead",
    "whole gradients": "of the unit at work, and on their way to be reduced",
    "4-bit scales": "of the whole model, on every rank",
}


def readable(num_bytes: float) -> str:
    """Write bytes in decimal units."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"


def aligned(rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Pad the columns of rows to one width; all but the first and the last are numbers."""
    rows = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        indent
        + "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_plan(plan: Plan, step: Traffic, shardings: Sequence[Alternative], changes: Sequence[Alternative]) -> str:
    """Write a plan, the strategies beside it, and the changes that were tried."""
    lines = [*_head(plan), "", *_device(plan), "", *_host(plan)]
    if not plan.job.on_cpu:
        lines += ["", *_wires(step, plan)]
    if len(shardings) > 1:
        lines += ["", "strategies, the quickest that fits first", *_compared(shardings)]
    if changes:
        lines += ["", "what would make it fit, tried in this order", *_compared(changes)]
        fitting = [change for change in changes if change.plan.fits]
        lines.append(f"smallest change: {fitting[0].label}" if fitting else "no single change is enough; try --suggest")
    return "\n".join(lines)


def _head(plan: Plan) -> Iterator[str]:
    job = plan.job
    machine = job.machine
    trained = "" if plan.num_trained == plan.num_parameters else f", {plan.num_trained / 1e6:,.1f}M trained"
    nodes = f"{machine.num_nodes} node{'s' if machine.num_nodes > 1 else ''}"
    where = f"{machine.num_gpus} {'CPU ranks' if job.on_cpu else 'GPUs'} on {nodes}"
    yield f"{plan.num_parameters / 1e9:,.2f}B parameters{trained}; {job.strategy.name} over {where}"
    settings = {
        k: v for k, v in describe(job).items() if k not in ("template", "gpus", "gpus_per_node") and v is not None
    }
    yield ", ".join(f"{key} {value}" for key, value in settings.items())


def _device(plan: Plan) -> list[str]:
    rows = [("bytes a rank", "valley", "peak", "")]
    for part in PARTS:
        valley, peak = plan.valley.get(part, 0), plan.peak.get(part, 0)
        if valley or peak:
            rows.append(
                (part, readable(valley) if valley else "-", readable(peak) if peak else "-", NOTES.get(part, ""))
            )
    rows.append(("sum", readable(plan.valley_bytes), readable(plan.peak_bytes), ""))
    if plan.allowance_bytes:
        rows.append(("allowance", "", readable(plan.allowance_bytes), "context, NCCL, fragmentation: assumed"))
    name, num_bytes = plan.largest_unit
    lines = aligned(rows)
    lines.append(f"  {len(plan.units)} units; the largest when gathered: {name}, {readable(num_bytes)}")
    if plan.fits is not None:
        has = readable(plan.job.machine.gpu_bytes or 0)
        lines.append(f"  {'fits' if plan.fits else 'DOES NOT FIT'}: {readable(plan.needed_bytes)} of {has}")
    return lines


def _host(plan: Plan) -> list[str]:
    limit = plan.job.machine.host_bytes
    rows = [("host bytes a node", "here", "stock", "")]
    for need in host_needs(plan):
        too_much = " DOES NOT FIT" if limit is not None and need.ours_bytes > limit else ""
        rows.append((need.stage, readable(need.ours_bytes), readable(need.stock_bytes), need.why + too_much))
    return aligned(rows)


def _wires(step: Traffic, plan: Plan) -> list[str]:
    machine = plan.job.machine
    rows = [("a step", "bytes", "at", "")]
    rows.append(("into each GPU", readable(step.gpu_bytes), readable(machine.gpu_bytes_per_second) + "/s", ""))
    if machine.num_nodes > 1:
        rows.append(("into each node", readable(step.node_bytes), readable(machine.node_bytes_per_second) + "/s", ""))
    wait = (
        "the wires set the pace" if step.seconds > step.compute_seconds else "hidden behind computing, if they overlap"
    )
    return [
        *aligned(rows),
        f"  {step.seconds:.2f} s of communication, {step.compute_seconds:.2f} s of computing at 40 % of the peak: {wait}",
    ]


def _compared(alternatives: Sequence[Alternative]) -> list[str]:
    rows = [("", "bytes a rank", "communication", "step", "")]
    for one in alternatives:
        seconds = (f"{one.traffic.seconds:.2f} s", f"{one.traffic.step_seconds:.2f} s")
        rows.append(
            (one.label, readable(one.plan.needed_bytes), *seconds, "does not fit" if one.plan.fits is False else "")
        )
    return aligned(rows)


def format_suggestion(found: Alternative) -> str:
    """Say what to launch, in one paragraph."""
    job = found.plan.job
    recompute = "on" if job.checkpointing else "off"
    return "\n".join(
        [
            f"suggested: {job.strategy.name}, batch {job.batch}, gradient checkpointing {recompute}, optimizer {job.optimizer}",
            f"  needs {readable(found.plan.needed_bytes)} a rank; about {found.traffic.step_seconds:.2f} s a step",
        ]
    )


def plain(
    plan: Plan, step: Traffic, shardings: Sequence[Alternative], changes: Sequence[Alternative]
) -> dict[str, Any]:
    """Return everything as values that JSON takes."""
    return {
        **describe(plan.job),
        "num_parameters": plan.num_parameters,
        "num_trained": plan.num_trained,
        "valley": plan.valley,
        "valley_bytes": plan.valley_bytes,
        "peak": plan.peak,
        "peak_bytes": plan.peak_bytes,
        "allowance_bytes": plan.allowance_bytes,
        "needed_bytes": plan.needed_bytes,
        "fits": plan.fits,
        "largest_unit": {"name": plan.largest_unit[0], "bytes": plan.largest_unit[1]},
        "host": [asdict(need) for need in host_needs(plan)],
        "communication": asdict(step),
        "strategies": [as_dict(one) for one in shardings],
        "changes": [as_dict(one) for one in changes],
    }
