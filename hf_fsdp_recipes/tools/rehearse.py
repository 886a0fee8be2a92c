"""`hf-fsdp rehearse`: runs a recipe from start to end on CPU ranks.

The model is a tiny one of the same architecture.
"""

import copy
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

from typer import Context, Option

from hf_fsdp_recipes.errors import ToolError, describe
from hf_fsdp_recipes.tools.files import find_file, read_yaml
from hf_fsdp_recipes.tools.launch import FLOAT32, find_error, run_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NUM_ROWS = 64
SAVE_STEPS = 2
LIMIT_SECONDS = 600
WITHOUT_GPU = ["--use_cpu=true", *FLOAT32, "--validation_split_percentage=0"]
# Values for settings that would need a GPU, much time or an account.
SHORT = (
    "--dtype float32 --attn_implementation eager --torch_compile false --use_liger_kernel false "
    f"--push_to_hub false --report_to none --max_steps {3 * SAVE_STEPS} --save_strategy steps "
    f"--save_steps {SAVE_STEPS} --save_total_limit 9 --logging_steps 1 --max_length 256 "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 1 --eval_strategy no "
    "--load_best_model_at_end false --dataset_streaming false --disable_tqdm true "
    "--resume_from_checkpoint auto"
).split()
# Sizes of the tiny model, with names from configs of Llama, GPT-2 and mixtures of experts.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def rehearse(
    context: Context,
    config: Annotated[str, Option("--config", help="Recipe: a name or a file.")],
    accelerate_config: Annotated[
        str, Option("--accelerate_config", help="Template for the sharding.")
    ] = "cpu",
    directory: Annotated[Optional[Path], Option(help="Keep the files in this directory.")] = None,
) -> None:
    """Will my recipe run to the end? Try all of it with a tiny model on CPU ranks.

    The model is loaded, trained, killed, resumed and exported, and it generates text.

    Fields of the recipe can follow, such as `--dataset_name my_rows.jsonl`.
    """
    from hf_fsdp_recipes.tools.generate import complete

    with tempfile.TemporaryDirectory(prefix="hf-fsdp-rehearsal-") as temporary:
        directory = directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        run = directory / "run"
        if run.exists():
            raise ToolError(
                f"{directory} holds a rehearsal already. Remove it, or use another --directory."
            )
        template = find_file("template", accelerate_config)
        arguments = write_recipe(find_file("recipe", config), directory, context.args)
        arguments += ranks_of(template)
        print("train, and kill all ranks after the first checkpoint", flush=True)
        last_file = run / f"checkpoint-{SAVE_STEPS}" / "trainer_state.json"
        train(template, arguments, directory, last_file.exists)
        print("resume and export", flush=True)
        text = train(template, arguments, directory)
        if "resuming from" not in text:
            raise ToolError("the second run did not resume from the first one's checkpoint.")
        for export in sorted(run.glob("export*")):
            [text] = complete(export, ["The"], max_new_tokens=8)
            print(f"generate with {export.name}: {text!r}", flush=True)
        print(
            f"{Path(config).stem} with {template.stem}: loaded, killed, resumed, exported and "
            "generated"
        )


def write_recipe(file: Path, directory: Path, fields: Sequence[str] = ()) -> list[str]:
    """Write a tiny model and rows for a recipe. Return arguments for sft.py.

    The model and the recipe's tokenizer go to model/, the first rows to rows.jsonl. `fields` are
    arguments that override the recipe's. Raises a RecipeError for wrong arguments and unreadable
    files.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    from hf_fsdp_recipes.tools.plan.job import find_config
    from hf_fsdp_recipes.training.arguments import parse_arguments
    from hf_fsdp_recipes.training.rows import read_rows

    logging.disable_progress_bar()
    options = ["--config", str(file), *fields, *WITHOUT_GPU]
    arguments = parse_arguments([*options, "--dataset_streaming", "true"])
    name = arguments.recipe.config_name or arguments.model.model_name_or_path
    if name is None:
        raise ToolError(
            "the recipe names no model. Add --model_name_or_path, a directory or a Hub id."
        )
    tokenizer_name = arguments.recipe.tokenizer_name or name
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    except (OSError, ValueError) as error:
        raise ToolError(
            f"the tokenizer of {tokenizer_name} cannot be read: {describe(error)} Log in, or use "
            "--tokenizer_name of another model. Without a network, set HF_HUB_OFFLINE=1."
        ) from error
    model = directory / "model"
    config = shrink(find_config(name), len(tokenizer))
    AutoModelForCausalLM.from_config(config, dtype="float32").save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows, _ = read_rows(arguments)
    lines = [json.dumps(row, default=str) + "\n" for row in islice(rows, NUM_ROWS)]
    data = directory / "rows.jsonl"
    data.write_text("".join(lines))
    return [
        *options,
        f"--model_name_or_path={model}",
        f"--tokenizer_name={model}",
        "--config_name=",
        "--config_overrides=",
        f"--dataset_name={data}",
        f"--output_dir={directory / 'run'}",
        *SHORT,
    ]


def shrink(config: "PreTrainedConfig", num_tokens: int) -> "PreTrainedConfig":
    """Return a tiny config of the same class.

    Tied weights stay tied. Of several kinds of layers, two kinds are kept.
    """
    tiny = copy.deepcopy(config)
    sizes = SIZES | {"vocab_size": num_tokens}
    num_groups = getattr(tiny, "num_key_value_heads", None)
    if num_groups:
        num_heads = getattr(tiny, "num_attention_heads", 4)
        sizes["num_key_value_heads"] = max(
            1, sizes["num_attention_heads"] * num_groups // num_heads
        )
    for name, size in sizes.items():
        if isinstance(getattr(tiny, name, None), int):
            with suppress(AttributeError):  # the field is computed from others
                setattr(tiny, name, size)
    # Each has one entry per layer. Keep different kinds.
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(tiny, name, None)
        if isinstance(kinds, list):
            different_first = [*dict.fromkeys(kinds), *kinds]
            setattr(tiny, name, different_first[: SIZES["num_hidden_layers"]])
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(tiny, name, None)
    return tiny


def ranks_of(template: Path) -> list[str]:
    """Return the launcher's options for a rehearsal.

    It has two ranks or, with hybrid sharding, two replicas of two ranks each.
    """
    # The tiny model is smaller than one FSDP unit of a real one.
    units = "--fsdp_min_num_params=5000"
    if "parallelism_config" not in read_yaml(template):
        return [units, "--num_processes=2"]
    return [
        units,
        "--num_processes=4",
        "--parallelism_config_dp_replicate_size=2",
        "--parallelism_config_dp_shard_size=2",
    ]


def train(
    template: Path,
    arguments: Sequence[str],
    directory: Path,
    is_done: Callable[[], bool] = lambda: False,
) -> str:
    """Run the recipe to its end, or kill the run once `is_done()` is true. Return its output.

    If the run fails, raise ToolError.
    """
    log = directory / "log.txt"
    log.unlink(missing_ok=True)
    status = run_recipe(template, arguments, log, is_done, LIMIT_SECONDS, on_cpu=True)
    text = log.read_text(errors="replace")
    if status != 0 and not is_done():
        raise ToolError(
            find_error(text)
            or f"the run failed, or took too long. Its output ends with:\n{text[-2000:]}"
        )
    return text
