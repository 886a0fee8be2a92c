"""`hf-fsdp rehearse`: runs a recipe from start to end on CPU ranks.

The model is a tiny one of the same architecture.
"""

import json
import os
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Optional

from typer import Context, Option

from hf_fsdp_recipes.errors import ToolError, explained
from hf_fsdp_recipes.settings import read_settings
from hf_fsdp_recipes.tools.files import TemplateOption, find_file
from hf_fsdp_recipes.tools.launch import find_error, run_recipe

NUM_ROWS = 256
SAVE_STEPS = 2
LIMIT_SECONDS = 600
WITHOUT_GPU = ["--use_cpu=true", "--bf16=false", "--fp16=false", "--validation_split_percentage=0"]
# Options of the launcher that replace a template's values for GPUs.
ON_CPU = [
    "--num_machines=1",
    "--machine_rank=0",
    "--main_process_ip=127.0.0.1",
    "--mixed_precision=no",
    "--dynamo_backend=no",
]
# Values for settings that would need a GPU, much time or an account.
SHORT = (
    "--dtype float32 --attn_implementation eager --torch_compile false --use_liger_kernel false "
    f"--push_to_hub false --report_to none --max_steps {3 * SAVE_STEPS} --save_strategy steps "
    f"--save_steps {SAVE_STEPS} --save_total_limit 9 --logging_steps 1 --max_length 256 "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 1 --eval_strategy no "
    "--load_best_model_at_end false --dataset_streaming false --disable_tqdm true "
    "--resume_from_checkpoint auto"
).split()
# The two runs that are compared. Their rows come in one order, and nothing in them is random. In
# the first step, only one of LoRA's two matrices changes, so there are two steps.
COMPARED = (
    "--max_steps 2 --save_steps 1 --optim sgd --lr_scheduler_type constant --learning_rate 0.3 "
    "--per_device_train_batch_size 2 --train_sampling_strategy sequential --export true "
    "--export_dtype float32 --merge_adapter false --average_tokens_across_devices true "
    "--neftune_noise_alpha 0"
)
# Options of the launcher. The tiny model is smaller than one FSDP unit of a real one. The sizes of
# replicas count only with hybrid sharding.
SMALL = [
    "--fsdp_min_num_params=5000",
    "--parallelism_config_dp_replicate_size=2",
    "--parallelism_config_dp_shard_size=2",
]
TOLERANCE = 1e-3  # of a relative error


def rehearse(
    context: Context,
    config: Annotated[str, Option(help="Recipe: a name or a file.")],
    accelerate_config: TemplateOption = "cpu",
    directory: Annotated[Optional[Path], Option(help="Keep the files in this directory.")] = None,
) -> None:
    """Will my recipe run to the end? Try all of it with a tiny model on CPU ranks.

    The model is loaded, trained, killed, resumed and exported, and it generates text.

    Fields of the recipe can follow, such as `--dataset_name my_rows.jsonl`.
    """
    from hf_fsdp_recipes.saving.directory import MANIFEST
    from hf_fsdp_recipes.tools.generate import complete

    with TemporaryDirectory(prefix="hf-fsdp-rehearsal-") as temporary:
        directory = directory or Path(temporary)
        run = directory / "run"
        if run.exists():
            raise ToolError(
                f"{directory} holds a rehearsal already. Remove it, or use another --directory."
            )
        template = find_file("template", accelerate_config)
        arguments = write_recipe(find_file("recipe", config), directory, context.args)
        # With hybrid sharding, there are two replicas of two ranks each.
        num_ranks = 4 if "parallelism_config" in read_settings(template) else 2
        arguments += [f"--num_processes={num_ranks}", *ON_CPU, *SMALL]
        os.environ["ACCELERATE_USE_CPU"] = "true"
        print("train, and kill all ranks after the first checkpoint", flush=True)
        last_file = run / f"checkpoint-{SAVE_STEPS}" / MANIFEST
        train(template, arguments, directory, last_file.exists)
        print("resume and export", flush=True)
        text = train(template, arguments, directory)
        if "resuming from" not in text:
            raise ToolError("the second run did not resume from the first one's checkpoint.")
        for export in sorted(run.glob("export*")):
            [text] = complete(export, ["The"], max_new_tokens=8)
            print(f"generate with {export.name}: {text!r}", flush=True)
        compare(template, arguments, directory, num_ranks)
        print(
            f"{Path(config).stem} with {template.stem}: loaded, killed, resumed, exported and "
            "generated"
        )


def write_recipe(file: Path, directory: Path, fields: Sequence[str] = ()) -> list[str]:
    """Write a tiny model and rows for a recipe. Return arguments for sft.py.

    The model and the recipe's tokenizer go to model/, the first rows to rows.jsonl, repeated
    if they are few. `fields` are arguments that override the recipe's. Raises a RecipeError.
    """
    from transformers import AutoTokenizer, logging

    from hf_fsdp_recipes.loading.load_model import find_class
    from hf_fsdp_recipes.tools.plan.job import find_config
    from hf_fsdp_recipes.tools.tiny_model import shrink
    from hf_fsdp_recipes.training.arguments import parse_arguments
    from hf_fsdp_recipes.training.rows import read_rows

    logging.disable_progress_bar()
    options = ["--config", str(file), *fields, *WITHOUT_GPU]
    arguments = parse_arguments([*options, "--dataset_streaming=true"])
    name = arguments.recipe.config_name or arguments.model.model_name_or_path
    if name is None:
        raise ToolError(
            "the recipe names no model. Add --model_name_or_path, a directory or a Hub id."
        )
    tokenizer_name = arguments.recipe.tokenizer_name or name
    with explained(
        ToolError,
        f"the tokenizer of {tokenizer_name} cannot be read (log in, or use --tokenizer_name "
        "of another model; without a network, set HF_HUB_OFFLINE=1)",
    ):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    model = directory / "model"
    config = shrink(find_config(name), len(tokenizer))
    model_class = find_class(config.architectures)
    getattr(model_class, "from_config", model_class)(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows, _ = read_rows(arguments)
    data = directory / "rows.jsonl"
    data.write_text(
        "".join(json.dumps(row, default=str) + "\n" for row in islice(cycle(rows), NUM_ROWS))
    )
    return [
        *options,
        f"--model_name_or_path={model}",
        f"--tokenizer_name={model}",
        "--config_name=",
        "--config_overrides=",
        f"--dataset_name={data}",
        f"--output_dir={directory / 'run'}",
        *SHORT,
        *["--lora_dropout=0"] * arguments.model.use_peft,  # refused without use_peft
    ]


def compare(template: Path, arguments: list[str], directory: Path, num_ranks: int) -> None:
    """Train two steps on ranks and in one process without FSDP, and compare the changes.

    The micro-batches of all ranks are the process's accumulation steps. Raises a ToolError if a
    weight changes differently.
    """
    options = arguments + COMPARED.split()
    train(template, [*options, f"--output_dir={directory}/ranks"], directory)
    options += ["--num_processes=1", f"--gradient_accumulation_steps={num_ranks}"]
    try:
        train(find_file("template", "ddp"), [*options, f"--output_dir={directory}/one"], directory)
    except ToolError as error:
        return print("note: not compared with one process, which fails:", error)
    errors = find_errors(directory)
    worst = max(errors, key=errors.__getitem__)
    found = f"(relative error {errors[worst]:.1g})"
    if errors[worst] > TOLERANCE:
        raise ToolError(
            f"{worst} is trained differently on ranks than in one process {found}. Do not train "
            "this combination; report it with the recipe."
        )
    print(f"{num_ranks} ranks change all {len(errors)} weights as one process does {found}")


def find_errors(directory: Path) -> dict[str, float]:
    """Return how far each weight is from that of one process, relative to its change there.

    What may be rounding is added to the change. Values that are no numbers are infinitely far.
    """
    import torch
    from safetensors.torch import load_file

    before, after, on_ranks = (
        load_file(next(directory.glob(f"{run}/*.safetensors")))
        for run in ("one/checkpoint-1", "one/export", "ranks/export")
    )
    errors = {}
    for name, start in before.items():
        expected = after[name]
        rounding = 4000 * torch.finfo(start.dtype).eps * start.norm()
        change = (expected - start).norm() + rounding + 1e-3
        error = (on_ranks[name] - expected).norm() / change
        errors[name] = float(error.nan_to_num(torch.inf))
    return errors


def train(
    template: Path,
    arguments: list[str],
    directory: Path,
    is_done: Callable = lambda: False,
) -> str:
    """Run the recipe to its end, or kill the run once `is_done()` is true. Return its output.

    If the run fails, raise ToolError.
    """
    log = directory / "log.txt"
    status = run_recipe(template, arguments, log, is_done, LIMIT_SECONDS)
    text = log.read_text(errors="replace")
    if status != 0 and not is_done():
        raise ToolError(
            find_error(text)
            or f"the run failed, or took too long. Its output ends with:\n{text[-2000:]}"
        )
    return text
