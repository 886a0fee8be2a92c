"""Every bad input ends a recipe early, on every rank.

It ends with the same single message and a status other than 0.

Each case changes one thing in a recipe that trains (tests/ranks/broken_inputs.py). `make test` runs
one of each kind.
"""

import pytest

from tests.ranks import broken_inputs as bad
from tests.ranks import refusals
from tests.ranks.broken_inputs import TEXT_ROWS, Inputs
from tests.ranks.harness import run_ranks, template_environment
from tests.recipes.launching import CPU, LORA, SETTINGS, run_recipe, write_recipe

STREAM = {"dataset_streaming": True}
QUICK = (
    "duplicate key",
    "learning_rate: fast",
    "shapes of another size",
    "no row is JSON",
    "target",
    "file",
    "byte",
    "tp",
)
# {name: (pattern for the message, changed settings or a function that breaks something and returns
# them)}
VALUES = {
    "no recipe file": ("nothing.yaml", {"flags": ["--config", "nothing.yaml"]}),
    "recipe is a directory": ("/", {"flags": ["--config", "/"]}),
    "recipe is not YAML": ("recipe.yaml", {"recipe": lambda text: text + "a: [\n"}),
    "recipe is a list": ("recipe.yaml", {"recipe": lambda text: "- max_steps: 3\n"}),
    "recipe is empty": ("recipe.yaml", {"recipe": lambda text: ""}),
    "recipe is not UTF-8": (
        "recipe.yaml",
        {"recipe": lambda text: text.encode() + b"run_name: \xe9\n"},
    ),
    "duplicate key": ("max_steps is set twice", {"recipe": lambda text: text + "max_steps: 3\n"}),
    "unknown key": ("learning_rat .* learning_rate", {"learning_rat": 1.0}),
    "unknown flag": ("no_such_flag", {"flags": ["--no_such_flag", "1"]}),
    "flag without its value": ("learning_rate", {"flags": ["--learning_rate"]}),
    "two precisions": ("fp16|bf16", {"bf16": True, "fp16": True}),
    "best model without evaluation": ("load_best_model_at_end", {"load_best_model_at_end": True}),
    "padding_free and max_length": ("padding_free", {"padding_free": True}),
    "packing without a length": (
        "max_length",
        {"packing": True, "recipe": lambda t: t.replace("max_length: 64", "max_length: null")},
    ),
    "evaluation without rows": ("eval", {"eval_strategy": "steps", "eval_steps": 1}),
    "stream without an end": ("max_steps", STREAM | {"max_steps": -1}),
    "rows held out from a stream": ("stream", STREAM | {"validation_split_percentage": 10}),
    "LoRA fields without use_peft": ("use_peft", {"lora_r": 64}),
    "4-bit full fine-tune": ("quantized|adapter", {"load_in_4bit": True}),
    "8-bit weights": ("4-bit|4bit", LORA | {"load_in_8bit": True}),
    "merge_adapter without use_peft": ("merge_adapter", {"merge_adapter": True}),
    "target": ("no_such_proj", LORA | {"lora_target_modules": ["no_such_proj"]}),
    "assistant_only_loss with text": ("assistant_only_loss", {"assistant_only_loss": True}),
    "unknown argument of from_pretrained": ("no_such", {"model_init_kwargs": {"no_such": 1}}),
    "unknown key of the schedule": ("no_such", {"lr_scheduler_kwargs": {"no_such": 1}}),
    "part of a mixture is missing": (
        "no-such.jsonl|no-such",
        {"datasets": [{"path": "./no-such.jsonl"}], "dataset_name": None},
    ),
    "part of a mixture has no path": (
        "path",
        {"datasets": [{"fraction": 1.0}], "dataset_name": None},
    ),
    "no chat template file": ("connect|no_such", {"chat_template_path": "no_such.jinja"}),
    "no dataset": ("dataset_name", {"dataset_name": None}),
    "no model": ("model_name_or_path", {"model_name_or_path": None}),
    "fp8": ("fp8", {"environment": {"ACCELERATE_MIXED_PRECISION": "fp8"}}),
}
# Settings with wrong values; the message has the setting's name or the value.
WRONG_VALUES = {
    "max_steps": ("many", 2.5, 0),
    "learning_rate": ("fast", [1.0e-3], -1.0, float("nan")),
    "num_train_epochs": (),
    "prompt_format": ("poem",),
    "adam_beta1": (1.5,),
    "warmup_steps": (-1,),
    "per_device_train_batch_size": (0, -1, 2.5),
    "gradient_accumulation_steps": (0, -2),
    "max_length": (-5, 0),
    "logging_steps": (0,),
    "save_strategy": ("sometimes",),
    "optim": ("adamw_of_mine", "ademamix", "adamw_torch_8bit"),
    "lr_scheduler_type": ("wavy",),
    "seed": (-1, "lucky"),
    "dataloader_num_workers": (-1,),
    "tf32": (True,),
    "report_to": ("my_board",),
    "hub_strategy": ("often",),
    "packing_strategy": ("tight",),
    "eos_token": ("<|no_such|>",),
    "validation_split_percentage": (100, -5, float("nan")),
    "dtype": ("float99",),
    "attn_implementation": ("no_such",),
    "export_dtype": ("float99",),
    "dataset_text_field": ("body",),
    "bf16": ("maybe",),
    "model_name_or_path": ("./no-such-model", "no/such/model", "no-such-model"),
    "config_name": ("x",),
    "tokenizer_name": ("./none",),
    "dataset_name": ("./no-such.jsonl", "./no-such-folder", "no-such/dataset"),
    "resume_from_checkpoint": ("./no-such",),
    "push_to_hub": (True,),
}
for name, values in WRONG_VALUES.items():
    for value in values:
        extra = {"packing": True} if name == "packing_strategy" else {}
        VALUES[f"{name}: {value}"] = (
            f"{name}|{name.partition('_')[2] or name}|{str(value).replace('|', '.')}",
            {name: value} | extra,
        )
for name, value in {"lora_r": 0, "lora_dropout": 2.0, "bnb_4bit_quant_type": "int3"}.items():
    VALUES[f"{name}: {value}"] = (
        f"{name}|{name.split('_')[-1]}|{value}|rank",
        LORA | {name: value, "load_in_4bit": "4bit" in name},
    )

BROKEN = {
    "model directory is empty": ("model", bad.model(bad.remove("*"))),
    "model is a file": (
        "safetensors",
        lambda i: {"model_name_or_path": i.model("llama") / "model.safetensors"},
    ),
    "weights are unreadable": ("safetensors", bad.model(bad.protect("model.safetensors"))),
    "no weights": ("safetensors", bad.model(bad.remove("*.safetensors"))),
    "weights are empty": ("safetensors", bad.model(bad.truncate("model.safetensors", 0))),
    "weights are a pointer": (
        "safetensors",
        bad.model(bad.write("model.safetensors", "version https://git-lfs\n" * 9)),
    ),
    "weights are truncated": ("safetensors", bad.model(bad.truncate("model.safetensors", -100))),
    "a tensor is missing": (
        "model.norm.weight",
        bad.model(bad.weights(lambda t: t.pop("model.norm.weight"))),
    ),
    "no tensor has a name of the model": ("embed_tokens", bad.model(bad.weights(bad.rename_all))),
    "a weight file is missing": (
        "is missing",
        bad.model(bad.remove("model-00002*"), max_shard_size="60KB"),
    ),
    "shapes of another size": ("32|48", bad.model(bad.config(hidden_size=48))),
    "more layers than weights": ("layers", bad.model(bad.config(num_hidden_layers=4))),
    "no config": ("config", bad.model(bad.remove("config.json"))),
    "config is not JSON": ("config", bad.model(bad.write("config.json", "{"))),
    "config of an unknown type": ("my_type", bad.model(bad.config(model_type="my_type"))),
    "quantized model": (
        "quantized",
        bad.model(bad.config(quantization_config={"quant_method": "gptq", "bits": 4})),
    ),
    "no tokenizer": ("tokenizer", bad.model(bad.remove("*token*"))),
    "tokenizer is not JSON": ("tokenizer", bad.model(bad.write("tokenizer.json", "{"))),
    "config of a new model is missing": ("no_such.json", bad.new_model(config_name="no_such.json")),
    "dataset is empty": ("rows.jsonl", bad.rows("")),
    "one row for two ranks": ("1 rows", bad.rows(TEXT_ROWS[:1])),
    "unknown columns": ("text|columns", bad.rows([{"q": "a", "r": "b"}] * 4)),
    "no row is JSON": ("rows.jsonl", bad.rows('{"text": "one"}\n{"text": \n')),
    "rows are numbers": ("rows.jsonl", bad.rows("1\n2\n3\n")),
    "file is binary": ("rows.jsonl", bad.rows(bytes(range(256)) * 8)),
    "parquet file is text": ("rows.parquet", bad.rows("no parquet" * 10, name="rows.parquet")),
    "unknown kind of file": ("rows.doc", bad.rows("text\n", name="rows.doc")),
    "texts are numbers": ("rows", bad.rows([{"text": 7}] * 8)),
    "texts are null": ("rows", bad.rows([{"text": None}] * 8)),
    "messages without a role": ("columns", bad.rows([{"messages": [{"content": "a"}]}] * 8)),
    "messages are text": ("columns", bad.rows([{"messages": "hello"}] * 8)),
    "no chat template": ("chat.template", bad.chat_rows(bad.remove("chat_template.jinja"))),
    "chat template is not Jinja": (
        "template|tag",
        bad.chat_rows(bad.write("chat_template.jinja", "{% for m in messages %}{{ m")),
    ),
    "chat template raises": (
        "only users",
        bad.chat_rows(bad.write("chat_template.jinja", "{{ raise_exception('only users') }}")),
    ),
    "no marks for assistant_only_loss": (
        "template",
        bad.chat_rows(lambda _: None, assistant_only_loss=True),
    ),
    "file": ("place/run", bad.output(lambda path: path.write_text("my notes"))),
    "output_dir is in a file": (
        "place/run",
        bad.output(lambda path: path.write_text("my notes"), "run"),
    ),
    "output_dir is a dangling link": (
        "place/run",
        bad.output(lambda path: path.symlink_to("gone/run")),
    ),
    "output_dir is not writable": ("place/run", bad.output(lambda path: path.mkdir(mode=0o500))),
    "output_dir holds another run": ("an earlier run", bad.used_output),
    "checkpoint is a model": ("llama", lambda i: {"resume_from_checkpoint": i.model("llama")}),
    "checkpoint is empty": ("checkpoint-2", bad.resume(bad.empty)),
    "checkpoint is incomplete": ("checkpoint-2", bad.resume(bad.remove("manifest.json"))),
    "manifest is not JSON": ("manifest.json", bad.resume(bad.write("manifest.json", "{"))),
    "byte": ("distcp is damaged", bad.resume(bad.flip_byte)),
    "checkpoint is truncated": (
        "distcp",
        bad.resume(bad.truncate("pytorch_model_fsdp_0/*.distcp", -10)),
    ),
    "optimizer is missing": ("optimizer_0", bad.resume(bad.remove("optimizer_0/*.distcp"))),
    "checkpoint is unreadable": ("checkpoint-2", bad.resume(bad.protect())),
    "global batch cannot be kept": (
        "per_device_train_batch_size",
        bad.resume(per_device_train_batch_size=3),
    ),
    "checkpoint of a full fine-tune, run of LoRA": ("does not fit", bad.resume(**LORA)),
    "checkpoint of LoRA, full fine-tune": ("does not fit", bad.resume(kind="lora")),
    "checkpoint of another model": ("does not fit", bad.resume_with_model("gpt2")),
}
LAUNCHED = {
    "FSDP1": ("fsdp_version: 2", {"FSDP_VERSION": "1"}),
    "FULL_STATE_DICT": ("SHARDED_STATE_DICT", {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}),
    "tp": ("", {"PARALLELISM_CONFIG_TP_SIZE": "2", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}),
    "unknown layer class": ("NoSuchLayer", {"FSDP_TRANSFORMER_CLS_TO_WRAP": "NoSuchLayer"}),
}
CASES = (
    VALUES
    | BROKEN
    | {name: (says, {"environment": changes}) for name, (says, changes) in LAUNCHED.items()}
)


@pytest.fixture(scope="session")
def checkpoint(tiny_model, text_file, tmp_path_factory):
    """Return a function that trains once and returns checkpoint-2 of the run.

    It trains with or without LoRA.
    """
    made = {}

    def train(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(f"trained-{kind}")
            values = SETTINGS | {
                "model_name_or_path": tiny_model("llama"),
                "dataset_name": text_file,
                "output_dir": folder / "run",
            }
            argv = write_recipe(folder / "recipe.yaml", values | (LORA if kind == "lora" else {}))
            run_ranks(run_recipe, refusals.NUM_RANKS, argv, environment=template_environment(CPU))
            made[kind] = folder / "run" / "checkpoint-2"
        return made[kind]

    return train


def _marked(name):
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("name", [_marked(name) for name in CASES])
def test_bad_input_is_refused_by_every_rank_alike(
    name, tiny_model, text_file, checkpoint, tmp_path
):
    says, change = CASES[name]
    (tmp_path / "broken").mkdir()
    place = tmp_path / "place" / "run"
    changes = dict(
        change(Inputs(tmp_path / "broken", place, tiny_model, checkpoint))
        if callable(change)
        else change
    )
    flags, edit, environment = (
        changes.pop(key, None) for key in ("flags", "recipe", "environment")
    )
    values = (
        SETTINGS
        | {
            "model_name_or_path": tiny_model("llama"),
            "dataset_name": text_file,
            "output_dir": place,
        }
        | changes
    )
    argv = [*write_recipe(tmp_path / "recipe.yaml", values, edit), *(flags or [])]
    argv = flags if flags and "--config" in flags else argv
    found = refusals.run(argv, tmp_path, template_environment(CPU) | (environment or {}))
    faults = refusals.find_faults(found, says)
    assert not faults, "\n".join(
        [*faults, *(f"--- rank {rank}\n{one.output[-2500:]}" for rank, one in enumerate(found))]
    )


def test_there_are_a_hundred_cases_and_the_quick_ones_exist():
    assert len(CASES) >= 100 and set(QUICK) <= set(CASES)
