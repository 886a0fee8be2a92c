"""`hf-fsdp plan`: predicts how much memory a recipe takes, and for what. If it does not fit, lists options that save memory."""

import logging
import warnings
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from hf_fsdp_recipes.errors import ToolError

if TYPE_CHECKING:
    from hf_fsdp_recipes.tools.plan.job import Job
    from hf_fsdp_recipes.tools.plan.step import StepMemory

# Assumptions: bytes of the GPU's context with cuBLAS, bytes of NCCL's buffers, fragmented share of temporary memory, and MFU.
CONTEXT_BYTES, NCCL_BYTES, FRAGMENTATION, MFU = 0.9e9, 0.6e9, 0.03, 0.4
# Options that save memory. The first ones cost nothing. The last ones change what is trained.
ADVICE = (
    "--gradient_checkpointing true",
    """--accelerator_config '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}' if a full fine-tune accumulates""",
    "--per_device_train_batch_size 1, with more --gradient_accumulation_steps",
    "--fsdp_reshard_after_forward true",
    "--optim paged_adamw_32bit",
    "--fsdp_offload_params true",
    "more ranks, with --num_processes",
    "--use_peft --lora_target_modules all-linear --dtype bfloat16, and after that --load_in_4bit true",
)


def plan(
    context: typer.Context,
    accelerate_config: Annotated[
        str, typer.Option("--accelerate_config", help="A template, or an Accelerate config.")
    ],
    config: Annotated[
        Optional[str], typer.Option("--config", help="A shipped recipe, or a file.")
    ] = None,
    gpu_memory: Annotated[
        str, typer.Option("--gpu_memory", help="Memory of one GPU, such as 24GB.")
    ] = "80GB",
    gpu_tflops: Annotated[
        float, typer.Option("--gpu_tflops", help="The GPU's bf16 peak; an A100 has 312.")
    ] = 312.0,
) -> None:
    """Will it fit? Predict the memory of one GPU from the model's config alone.

    If the run does not fit, the output lists options that save memory, and the exit status is 1. The arguments are those of
    `hf-fsdp sft`. Options of `accelerate launch` and fields of the recipe can follow in any order.
    """
    from hf_fsdp_recipes.tools.plan.job import read_config, read_job

    try:
        limit = float(gpu_memory.upper().removesuffix("GB")) * 1e9
    except ValueError as error:
        raise ToolError(f"--gpu_memory is {gpu_memory}. Pass gigabytes, such as 24GB.") from error
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it logs notes about launching
    warnings.simplefilter("ignore", FutureWarning)
    job = read_job(config, accelerate_config, context.args)
    try:
        from hf_fsdp_recipes.tools.plan.step import measure_step
    except ImportError as error:
        raise ToolError(
            f"plan needs what an installed version lacks: {error}. TRL 1.16 with torch 2.13 is tested."
        ) from error
    memory = measure_step(read_config(job), job)
    print("\n".join(describe(job, memory, gpu_tflops)), flush=True)
    if job.on_cpu or needed_bytes(job, memory) <= limit:
        print("" if job.on_cpu else f"fits in {limit / 1e9:g} GB")
        return
    print(
        "\n  ".join(
            [
                f"does not fit in {limit / 1e9:g} GB. Options that save memory, if not set yet:",
                *ADVICE,
            ]
        )
    )
    raise typer.Exit(1)


def needed_bytes(job: "Job", memory: "StepMemory") -> float:
    """Return the bytes that a rank needs: those at the peak of a step and, on GPUs, what is assumed above."""
    temporary = sum(
        size for name, size in memory.peak.items() if name not in ("parameters", "optimizer state")
    )
    allowance = CONTEXT_BYTES + NCCL_BYTES * (job.num_ranks > 1) + FRAGMENTATION * temporary
    return sum(memory.peak.values()) + (0 if job.on_cpu else allowance)


def describe(job: "Job", memory: "StepMemory", gpu_tflops: float) -> list[str]:
    """Return the lines of text that describe the plan."""
    (rows, length), training, total = job.shape, job.arguments.training, needed_bytes(job, memory)
    parts = memory.peak | {
        "context, NCCL, fragmentation (assumed)": total - sum(memory.peak.values())
    }
    lines = [
        f"{job.num_ranks} ranks; each: {rows} x {length} tokens, {training.gradient_accumulation_steps} times per step",
        "memory of one rank at the peak of a step:",
        *(
            f"{size / 1e9:9.2f} GB  {name}"
            for name, size in sorted(parts.items(), key=lambda part: -part[1])
            if size
        ),
        f"{total / 1e9:9.2f} GB  in total",
    ]
    if memory.flops and not job.on_cpu:
        seconds = memory.flops / (MFU * gpu_tflops * 1e12)
        lines.append(
            f"{seconds:9.2g} s   for a step, if GPUs reach {MFU:.0%} of {gpu_tflops:g} TFLOP/s (assumed)"
        )
    if training.use_liger_kernel:
        lines.append("The plan does not know Liger's kernels, with which a rank needs less.")
    return lines
