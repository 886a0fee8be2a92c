"""`hf-fsdp plan`: predicts how much memory a recipe takes, and for what.

If the recipe does not fit, lists options that save memory.
"""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from typer import Context, Exit, Option

from hf_fsdp_recipes.errors import ToolError, explained
from hf_fsdp_recipes.tools.files import RecipeOption, TemplateOption

if TYPE_CHECKING:
    from hf_fsdp_recipes.tools.plan.job import Job

# Assumptions
CONTEXT_BYTES = 0.9e9  # the GPU's context with cuBLAS
NCCL_BYTES = 0.6e9  # NCCL's buffers
FRAGMENTATION = 0.03  # fragmented share of temporary memory

# Options that save memory. The first ones cost nothing. The last ones change what is trained.
ADVICE = (
    "--gradient_checkpointing true",
    """--accelerator_config '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}' """
    "if a full fine-tune accumulates",
    "--per_device_train_batch_size 1, with more --gradient_accumulation_steps",
    "--fsdp_reshard_after_forward true",
    "--optim paged_adamw_32bit",
    "--fsdp_offload_params true",
    "more ranks, with --num_processes",
    "--use_peft --lora_target_modules all-linear --dtype bfloat16, and after that --load_in_4bit "
    "true",
)


def plan(
    context: Context,
    accelerate_config: TemplateOption,
    config: RecipeOption = None,
    gpu_memory: Annotated[
        str, Option("--gpu_memory", help="Memory of one GPU, such as 24GB.")
    ] = "80GB",
) -> None:
    """Will it fit? Predict the memory of one GPU from the model's config alone.

    If the run does not fit, the output lists options that save memory, and the exit status is 1.
    The arguments are those of `hf-fsdp sft`. Options of `accelerate launch` and fields of the
    recipe can follow in any order.
    """
    from hf_fsdp_recipes.tools.plan.job import read_config, read_job

    with explained(ToolError, f"--gpu_memory is {gpu_memory}, not gigabytes, such as 24GB"):
        limit_gigabytes = float(gpu_memory.upper().removesuffix("GB"))
    warnings.simplefilter("ignore", FutureWarning)
    job = read_job(config, accelerate_config, context.args)
    with explained(
        ToolError, "plan needs what an installed version lacks (tested: TRL 1.16 with torch 2.13)"
    ):
        from hf_fsdp_recipes.tools.plan.step import measure_step
    parts = measure_step(read_config(job), job)
    if not job.on_cpu:
        temporary = sum(parts.values()) - parts["parameters"] - parts["optimizer state"]
        nccl = NCCL_BYTES if job.num_ranks > 1 else 0
        parts["context, NCCL, fragmentation (assumed)"] = (
            CONTEXT_BYTES + FRAGMENTATION * temporary + nccl
        )
    print_parts(job, parts)
    if sum(parts.values()) > limit_gigabytes * 1e9:
        print(
            f"does not fit in {limit_gigabytes:g} GB. Options that save memory, if not set yet:",
            *ADVICE,
            sep="\n  ",
        )
        raise Exit(1)
    print(f"fits in {limit_gigabytes:g} GB")


def print_parts(job: "Job", parts: Mapping[str, float]) -> None:
    """Print the planned run and what takes the memory of a rank."""
    rows, length = job.shape
    training = job.arguments.training
    print(
        f"{job.num_ranks} ranks; each: {rows} x {length} tokens, "
        f"{training.gradient_accumulation_steps} times per step"
    )
    print("memory of one rank at the peak of a step:")
    for name in sorted(parts, key=parts.__getitem__, reverse=True):
        print(f"{parts[name] / 1e9:9.2f} GB  {name}")
    print(f"{sum(parts.values()) / 1e9:9.2f} GB  in total")
    if training.use_liger_kernel:
        print("The plan does not know Liger's kernels, with which a rank needs less.")
