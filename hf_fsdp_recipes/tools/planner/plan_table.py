"""Formats a plan as text for the terminal, or as JSON values."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from hf_fsdp_recipes.tools.planner.communication import estimate_traffic
from hf_fsdp_recipes.tools.planner.fsdp_simulator import GATHERED, REDUCED_GRADIENTS, UNSHARDED_GRADIENTS
from hf_fsdp_recipes.tools.planner.host_memory import estimate_host_memory
from hf_fsdp_recipes.tools.planner.memory_planner import OPTIMIZER, PARAMETERS, SCALES, STEP, UNPACKED, MemoryPlan
from hf_fsdp_recipes.tools.planner.step_trace import ACTIVATIONS, LOGITS
from hf_fsdp_recipes.tools.planner.suggestions import Alternative
from hf_fsdp_recipes.units import count, format_bytes

# Label and note of each category, in the order of the table.
CATEGORIES = {
    PARAMETERS: ("parameters", "this rank's shard"),
    OPTIMIZER: ("optimizer", "this rank's shard"),
    REDUCED_GRADIENTS: ("gradients", "this rank's shard, after reduction"),
    SCALES: ("4-bit scales", "of the full model, on every rank"),
    UNPACKED: ("unpacked weight", "one 4-bit weight at a time"),
    GATHERED: ("gathered parameters", "the current unit and the prefetched one"),
    UNSHARDED_GRADIENTS: ("unsharded gradients", "before and during reduction"),
    ACTIVATIONS: ("activations", ""),
    LOGITS: ("logits and loss", ""),
    STEP: ("optimizer step", "temporary"),
}


def align(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns. The first and last columns hold text, the others numbers."""
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  " + "  ".join([first.ljust(widths[0]), *cells, last]).rstrip())
    return lines


def format_plan(plan: MemoryPlan, strategies: Sequence[Alternative], changes: Sequence[Alternative]) -> str:
    """Return a plan as text, with a comparison of sharding strategies and a list of changed settings.

    `changes` make the job faster if it fits; if it does not, they are the ones that were tried to make it fit.
    """
    lines = [*_title(plan), "", *_device_table(plan), "", *_host_table(plan)]
    if not plan.job.strategy.on_cpu:
        lines += ["", *_traffic_table(plan)]
    if len(strategies) > 1:
        lines += ["", "strategies, sorted by fit and then by speed", *_comparison(strategies)]
    if changes and plan.fits:
        lines += ["", "faster changes that also fit", *_comparison(changes)]
    elif changes:
        lines += ["", "changes tried to make it fit, in this order", *_comparison(changes)]
        is_enough = changes[-1].plan.fits
        lines.append(
            f"smallest change: {changes[-1].label}" if is_enough else "no single change is enough; try --suggest"
        )
    return "\n".join(lines)


def _title(plan: MemoryPlan) -> Iterator[str]:
    job, cluster = plan.job, plan.job.cluster
    trained = "" if plan.num_trained == plan.num_parameters else f", {plan.num_trained / 1e6:,.1f}M trained"
    ranks = count(cluster.num_gpus, "CPU rank" if job.strategy.on_cpu else "GPU")
    hardware = f"{ranks}, {count(cluster.num_nodes, 'node')}"
    yield f"{plan.num_parameters / 1e9:,.2f}B parameters{trained}; {job.strategy.name} on {hardware}"
    settings = {key: value for key, value in job.describe().items() if value is not None}
    yield ", ".join(f"{key} {settings[key]}" for key in settings if key not in ("template", "gpus", "gpus_per_node"))


def _device_table(plan: MemoryPlan) -> list[str]:
    rows = [("memory per rank", "between steps", "peak", "")]
    for category, (label, note) in CATEGORIES.items():
        valley, peak = plan.valley.get(category, 0), plan.peak.get(category, 0)
        if valley or peak:
            rows.append((label, format_bytes(valley) if valley else "-", format_bytes(peak) if peak else "-", note))
    rows.append(("total", format_bytes(plan.valley_bytes), format_bytes(plan.peak_bytes), ""))
    if plan.allowance_bytes:
        num = plan.job.num_communicators
        nccl = ["NCCL" if num == 1 else f"{num} x NCCL"] if num else []
        note = ", ".join(["context", *nccl, "fragmentation (assumed)"])
        rows.append(("allowance", "", format_bytes(plan.allowance_bytes), note))
    unit = plan.largest_unit
    lines = [
        *align(rows),
        f"  {len(plan.units)} FSDP units; the largest is {unit.name}, {format_bytes(unit.unsharded_bytes)} when gathered",
    ]
    if plan.fits is not None:
        available = format_bytes(plan.job.cluster.gpu_bytes or 0)
        lines.append(f"  {'fits' if plan.fits else 'DOES NOT FIT'}: {format_bytes(plan.needed_bytes)} of {available}")
    return lines


def _host_table(plan: MemoryPlan) -> list[str]:
    limit = plan.job.cluster.host_bytes
    rows = [("host memory per node", "here", "stock", "")]
    for each in estimate_host_memory(plan):
        excess = " DOES NOT FIT" if limit is not None and each.ours_bytes > limit else ""
        rows.append((each.stage, format_bytes(each.ours_bytes), format_bytes(each.stock_bytes), each.why + excess))
    return align(rows)


def _traffic_table(plan: MemoryPlan) -> list[str]:
    cluster, traffic = plan.job.cluster, estimate_traffic(plan)
    links = [("into each GPU", traffic.gpu_bytes, cluster.gpu_bytes_per_second)]
    if cluster.num_nodes > 1:
        links.append(("into each node", traffic.node_bytes, cluster.node_bytes_per_second))
    rows = [("traffic per step", "bytes", "bandwidth", "")]
    rows += [(link, format_bytes(num_bytes), f"{format_bytes(rate)}/s", "") for link, num_bytes, rate in links]
    if traffic.compute_seconds is None:
        compute = "compute unknown: the FLOPs of this architecture cannot be counted"
    else:
        is_bound = traffic.seconds > traffic.compute_seconds
        bound = "communication-bound" if is_bound else "communication is hidden if the two overlap"
        compute = f"{traffic.compute_seconds:.2f} s of compute at 40% of the peak: {bound}"
    return [*align(rows), f"  {traffic.seconds:.2f} s of communication, {compute}"]


def _comparison(alternatives: Sequence[Alternative]) -> list[str]:
    rows = [("", "memory per rank", "communication", "step", "")]
    for each in alternatives:
        seconds = (f"{each.traffic.seconds:.2f} s", f"{each.traffic.step_seconds:.2f} s")
        fits = "does not fit" if each.plan.fits is False else ""
        rows.append((each.label, format_bytes(each.plan.needed_bytes), *seconds, fits))
    return align(rows)


def format_suggestion(suggestion: Alternative) -> str:
    """Format a suggestion in two lines."""
    job = suggestion.plan.job
    checkpointing = "on" if job.gradient_checkpointing else "off"
    return (
        f"suggested: {job.strategy.name}, batch {job.batch}, gradient checkpointing {checkpointing}, "
        f"optimizer {job.optimizer}\n"
        f"  needs {format_bytes(suggestion.plan.needed_bytes)} per rank; about "
        f"{suggestion.traffic.step_seconds:.2f} s per step"
    )


def to_json(plan: MemoryPlan, strategies: Sequence[Alternative], changes: Sequence[Alternative]) -> dict[str, object]:
    """Return a plan as JSON values."""
    return {
        **plan.job.describe(),
        "num_parameters": plan.num_parameters,
        "num_trained": plan.num_trained,
        "valley": plan.valley,
        "valley_bytes": plan.valley_bytes,
        "peak": plan.peak,
        "peak_bytes": plan.peak_bytes,
        "allowance_bytes": plan.allowance_bytes,
        "needed_bytes": plan.needed_bytes,
        "fits": plan.fits,
        "largest_unit": {"name": plan.largest_unit.name, "bytes": plan.largest_unit.unsharded_bytes},
        "host": [asdict(stage) for stage in estimate_host_memory(plan)],
        "communication": asdict(estimate_traffic(plan)),
        "strategies": [alternative.describe() for alternative in strategies],
        "changes": [alternative.describe() for alternative in changes],
    }
