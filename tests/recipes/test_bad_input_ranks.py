"""Every bad input ends a recipe early, on every rank, with one message that names the value and says what to do.

Each case changes one thing in a recipe that trains. It runs on two forked ranks with the environment of a template; see
tests/ranks/refusals.py for what counts as a refusal. `make test` runs one case of each kind, `make test-all` runs all of them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ranks import broken_inputs as broken
from tests.ranks import refusals
from tests.ranks.broken_inputs import TEXT_ROWS, Inputs
from tests.ranks.harness import run_ranks
from tests.recipes.launching import run_recipe, write_recipe

SETTINGS = {
    "max_steps": 2, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1.0e-3,
    "max_length": 64, "report_to": "none", "gradient_checkpointing": False, "disable_tqdm": True, "report": False,
}  # fmt: skip
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
STREAM = {"dataset_streaming": True, "shuffle_buffer_size": 4}


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        name: what is bad.
        says: patterns that the message must match: the setting or file, and the value.
        change: changed settings of the recipe (None removes one), or a function that breaks a file and returns such settings.
        recipe: a function that changes the text of the recipe's file.
        flags: options to add to the command line.
        environment: variables of the ranks.
        template: changes to accelerate_configs/fsdp2_cpu.yaml; sections are merged, None removes a key.
        is_quick: whether `make test` runs it.
    """

    name: str
    says: tuple[str, ...]
    change: dict[str, Any] | broken.Maker = field(default_factory=dict)
    recipe: Callable[[str], str | bytes] | None = None
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    is_quick: bool = False


def settings(**changes: Any) -> list[Case]:
    """Return a case for one setting, or for several that conflict; the message must have the first one's name and value."""
    name, value = next(iter(changes.items()))
    title = ", ".join(f"{key}: {value}" for key, value in changes.items())
    says = (name,) if isinstance(value, bool) else (name, re.escape(str(value)))
    return [Case(title, says, changes)]


RECIPE_FILE = [
    Case("no recipe", (r"nothing\.yaml",), flags=("--config", "nothing.yaml")),
    Case("recipe is a directory", ("/",), flags=("--config", "/")),
    Case("recipe is not YAML", (r"recipe\.yaml", "line"), recipe=lambda text: text + "a: [\n"),
    Case("recipe with a tab", (r"recipe\.yaml", "tab|character"), recipe=lambda text: text + "\tseed: 1\n"),
    Case("recipe is a list", (r"recipe\.yaml", "list|mapping"), recipe=lambda text: "- max_steps: 3\n"),
    Case("recipe is a scalar", (r"recipe\.yaml", "mapping|str"), recipe=lambda text: "max_steps\n"),
    Case("recipe is empty", ("model_name_or_path|empty",), recipe=lambda text: ""),
    Case(
        "recipe is not UTF-8", (r"recipe\.yaml", "UTF-8|decode"),
        recipe=lambda text: text.encode() + b"run_name: \xe9\n",
    ),
    Case(
        "duplicate key", ("max_steps", "twice|duplicate|again"), recipe=lambda text: text + "max_steps: 3\n",
        is_quick=True,
    ),
    Case("unknown key", ("learning_rat", "Did you mean learning_rate"), {"learning_rat": 1.0}, is_quick=True),
    Case("unknown key that is like no other", ("zzzz_qqqq",), {"zzzz_qqqq": 1.0}),
    Case("unknown flag", ("no_such_flag",), flags=("--no_such_flag", "1")),
    Case("flag without its value", ("learning_rate",), flags=("--learning_rate",)),
]  # fmt: skip

ARGUMENTS = [
    *settings(max_steps="many"),
    *settings(bf16="maybe"),
    *settings(max_steps=2.5),
    *settings(per_device_train_batch_size=2.5),
    Case("learning_rate is a list", ("learning_rate",), {"learning_rate": [1.0e-3]}),
    Case("dataset_name is a list", ("dataset_name",), {"dataset_name": ["a.jsonl"]}),
    *settings(packing=3),
    *settings(prompt_template="poem"),
    *settings(stopping_strategy="never"),
    *settings(learning_rate="fast"),
    *settings(learning_rate=-1.0),
    Case("learning_rate: nan", ("learning_rate", "nan"), {"learning_rate": float("nan")}, is_quick=True),
    Case("learning_rate: inf", ("learning_rate", "inf"), {"learning_rate": float("inf")}),
    *settings(weight_decay=-1.0),
    *settings(adam_beta1=1.5),
    *settings(adam_epsilon=-1.0),
    *settings(warmup_steps=-1),
    *settings(num_train_epochs=-1, max_steps=-1),
    Case(
        "per_device_train_batch_size: 0", ("per_device_train_batch_size", " 0"), {"per_device_train_batch_size": 0}
    ),
    *settings(per_device_train_batch_size=-1),
    *settings(gradient_accumulation_steps=0),
    *settings(gradient_accumulation_steps=-2),
    *settings(max_length=-5),
    *settings(max_length=0),
    *settings(save_steps=0),
    *settings(save_steps=-1),
    Case("logging_steps: 0", ("logging_steps",), {"logging_steps": 0}),
    *settings(logging_steps=-1),
    *settings(eval_steps=-1, eval_strategy="steps", validation_split_percentage=10),
    *settings(per_device_eval_batch_size=0, eval_strategy="steps", eval_steps=1, validation_split_percentage=10),
    *settings(save_strategy="sometimes"),
    *settings(eval_strategy="sometimes"),
    *settings(load_best_model_at_end=True),
    *settings(save_only_model=True),
    *settings(optim="adamw_of_mine"),
    *settings(optim="ademamix"),
    *settings(optim="adamw_torch_8bit"),
    *settings(lr_scheduler_type="wavy"),
    Case(
        "unknown key of the schedule", ("lr_scheduler_kwargs", "no_such"), {"lr_scheduler_kwargs": {"no_such": 1}},
        is_quick=True,
    ),
    *settings(seed=-1),
    *settings(seed="lucky"),
    *settings(dataloader_num_workers=-1),
    Case("dataloader_prefetch_factor without workers", ("dataloader_num_workers",), {"dataloader_prefetch_factor": 2}),
    *settings(ddp_timeout=0),
    *settings(bf16=True, fp16=True),
    *settings(tf32=True),
    *settings(report_to="wandb"),
    *settings(report_to="my_board"),
    Case("deepspeed", ("deepspeed",), {"deepspeed": "no_such.json"}),
    *settings(throughput_warmup_steps=-1, report=True),
    *settings(padding_free=True),
    *settings(activation_offloading=True),
    *settings(use_liger_kernel=True),
    *settings(torch_compile_backend="no_such"),
    *settings(push_to_hub=True),
    Case(
        "hub_model_id: a/b/c", ("hub_model_id", "a/b/c"),
        {"hub_model_id": "a/b/c", "push_to_hub": True, "hub_token": "hf_x"}, environment={"HF_HUB_OFFLINE": "0"},
    ),
    *settings(hub_strategy="often"),
]  # fmt: skip

MODEL = [
    Case("model does not exist", (r"\./no-such-model",), {"model_name_or_path": "./no-such-model"}),
    Case("model is not on the Hub", ("no/such/model/here",), {"model_name_or_path": "no/such/model/here"}),
    Case("no model", ("model_name_or_path",), {"model_name_or_path": None}),
    *settings(config_name="x"),
    Case("new model without a tokenizer", ("tokenizer_name",), {"model_name_or_path": None, "config_name": "x"}),
    Case("overrides of a loaded model", ("config_overrides", "config_name"), {"config_overrides": "hidden_size=8"}),
    Case(
        "argument of from_pretrained for a new model", ("model_init_kwargs", "use_kernels", "new model"),
        broken.new_model(model_init_kwargs={"use_kernels": True}),
    ),
    Case("config of a new model is missing", (r"no_such\.json",), broken.new_model(config_name="no_such.json")),
    Case("override of an unknown field", ("no_such_field",), broken.new_model(config_overrides="no_such_field=3")),
    Case(
        "override that is text", ("num_hidden_layers", "two"),
        broken.new_model(config_overrides="num_hidden_layers=two"),
    ),
    Case("model directory is empty", ("model",), broken.model(broken.remove("*"))),
    Case(
        "model is a file", (r"model\.safetensors",),
        lambda inputs: {"model_name_or_path": inputs.model("llama") / "model.safetensors"},
    ),
    Case("model directory is unreadable", ("model", "permission|readable|read"), broken.model(broken.protect())),
    Case(
        "weights are unreadable", (r"model\.safetensors", "permission|readable"),
        broken.model(broken.protect("model.safetensors")),
    ),
    Case("no weights", (r"model\.safetensors",), broken.model(broken.remove("*.safetensors"))),
    Case("weights are empty", (r"model\.safetensors",), broken.model(broken.truncate("model.safetensors", 0))),
    Case(
        "weights are text", (r"model\.safetensors",),
        broken.model(broken.write("model.safetensors", "version https://git-lfs.github.com/spec/v1\n" * 3)),
    ),
    Case(
        "weights are truncated", (r"model\.safetensors", "byte"),
        broken.model(broken.truncate("model.safetensors", -100)), is_quick=True,
    ),
    Case(
        "weights end in their header", (r"model\.safetensors",),
        broken.model(broken.truncate("model.safetensors", 100)),
    ),
    Case(
        "length of the header is absurd", (r"model\.safetensors", "header"),
        broken.model(broken.write("model.safetensors", b"\xff" * 64)),
    ),
    Case("tensors overlap", (r"model\.safetensors",), broken.model(broken.header(broken.overlap))),
    Case(
        "weights are pickled", (r"pytorch_model\.bin", "Convert"),
        broken.model(lambda directory: (directory / "model.safetensors").rename(directory / "pytorch_model.bin")),
    ),
    Case("weights are NaN", ("up_proj", "NaN"), broken.model(broken.weights(broken.fill_with_nan))),
    Case(
        "a tensor is missing", (r"model\.norm\.weight",),
        broken.model(broken.weights(lambda tensors: tensors.pop("model.norm.weight"))),
    ),
    Case(
        "no tensor has a name of the model", ("embed_tokens|no tensor",),
        broken.model(broken.weights(lambda tensors: [tensors.update({f"x.{name}": tensors.pop(name)}) for name in list(tensors)])),
    ),
    Case(
        "index lists a missing file", (r"index\.json", r"model-00002"),
        broken.sharded_model(broken.remove("model-00002*")),
    ),
    Case(
        "index is not JSON", (r"index\.json",), broken.sharded_model(broken.write("model.safetensors.index.json", "{")),
    ),
    Case(
        "index has no map", (r"index\.json", "weight_map"),
        broken.sharded_model(broken.write("model.safetensors.index.json", "{}")),
    ),
    Case(
        "index leaves the directory", (r"\.\./",),
        broken.sharded_model(broken.index(lambda names: names.update({"lm_head.weight": "../x.safetensors"}))),
    ),
    Case(
        "index has a tensor in the wrong file", (r"lm_head\.weight",),
        broken.sharded_model(broken.index(lambda names: names.update({"lm_head.weight": names["model.embed_tokens.weight"]}))),
    ),
    Case("shapes of another size", ("32", "48"), broken.model(broken.config(hidden_size=48)), is_quick=True),
    Case("more layers than weights", (r"layers\.[23]",), broken.model(broken.config(num_hidden_layers=4))),
    Case(
        "config of another model", ("wte|transformer|no tensor",), broken.model(broken.model_of_other_config),
        is_quick=True,
    ),
    Case("no config", ("config",), broken.model(broken.remove("config.json"))),
    Case(
        "an adapter", ("model is a PEFT adapter", "hf-fsdp export .*model merged --merge-adapter"),
        broken.model(broken.write("adapter_config.json", "{}")), is_quick=True,
    ),
    Case("config is not JSON", (r"config",), broken.model(broken.write("config.json", "{"))),
    Case("config is a list", (r"config",), broken.model(broken.write("config.json", "[]"))),
    Case("config of an unknown type", ("my_type",), broken.model(broken.config(model_type="my_type"))),
    Case("config without a type", ("model_type",), broken.model(broken.config(model_type=None, architectures=None))),
    Case("config of an encoder and decoder", ("t5",), broken.model(broken.encoder_decoder_config)),
    Case("config without layers", ("num_hidden_layers|layers", " 0"), broken.model(broken.config(num_hidden_layers=0))),
    Case(
        "heads do not divide the size", ("heads|divi", "5"),
        broken.model(broken.config(num_attention_heads=5, num_key_value_heads=5, head_dim=None)),
    ),
    Case("vocabulary is negative", ("-1",), broken.model(broken.config(vocab_size=-1))),
    Case(
        "quantized model", ("quantized",),
        broken.model(broken.config(quantization_config={"quant_method": "gptq", "bits": 4})),
    ),
    Case("custom code", ("trust_remote_code",), broken.model(broken.custom_code)),
    Case("no tokenizer", ("tokenizer",), broken.model(broken.remove("*token*"))),
    Case("tokenizer is not JSON", ("tokenizer",), broken.model(broken.write("tokenizer.json", "{"))),
    Case("tokenizer_name: ./no-such-tokenizer", (r"no-such-tokenizer",), {"tokenizer_name": "./no-such-tokenizer"}),
    *settings(dtype="float99"),
    *settings(dtype="int8"),
    *settings(attention="fast"),
    *settings(attention="flash"),
    *settings(attention="sdpa", attn_implementation="eager"),
    *settings(attn_implementation="no_such"),
    Case("unknown argument of from_pretrained", ("no_such",), {"model_init_kwargs": {"no_such": 1}}),
    Case("device_map", ("device_map",), {"model_init_kwargs": {"device_map": "auto"}}),
    Case(
        "unknown experts_implementation", ("experts_implementation", "fast", "Use eager"),
        {"model_init_kwargs": {"experts_implementation": "fast"}},
    ),
    *settings(load_source="all"),
]  # fmt: skip

DATA = [
    Case("dataset_name: ./no-such-file.jsonl", (r"no-such-file\.jsonl",), {"dataset_name": "./no-such-file.jsonl"}),
    Case("dataset_name: ./no-such-folder", (r"no-such-folder",), {"dataset_name": "./no-such-folder"}),
    Case("dataset_name: no-such/dataset", (r"no-such/dataset",), {"dataset_name": "no-such/dataset"}),
    Case("no dataset", ("dataset_name",), {"dataset_name": None}),
    Case("file is empty", (r"rows\.jsonl", "no rows"), broken.rows("")),
    Case("file has blank lines only", (r"rows\.jsonl",), broken.rows("\n" * 30)),
    Case("file is an empty list", (r"rows\.json", "no rows"), broken.rows("[]", name="rows.json")),
    Case(
        "file is one object with rows inside", (r"rows\.json", "data"),
        broken.rows('{"data": [{"text": "a"}]}', name="rows.json"),
    ),
    Case("file is an empty object", (r"rows\.jsonl",), broken.rows("{}\n")),
    Case("file has eight empty objects", (r"rows\.jsonl",), broken.rows([{}] * 8)),
    Case("one row for two ranks", ("1 row", "2 ranks"), broken.rows(TEXT_ROWS[:1])),
    Case("unknown columns", (r"rows\.jsonl", "columns"), broken.rows([{"q": "a", "r": "b"}] * 4), is_quick=True),
    Case("a row is not JSON", (r"rows\.jsonl",), broken.rows('{"text": "one"}\n{"text": \n')),
    Case("rows are numbers", (r"rows\.jsonl",), broken.rows("1\n2\n3\n")),
    Case("rows are strings", (r"rows\.jsonl",), broken.rows('"one"\n"two"\n"three"\n')),
    Case("no row is UTF-8", (r"rows\.jsonl", "UTF-8"), broken.rows(b'{"text": "caf\xe9"}\n' * 8)),
    Case("file is binary", (r"rows\.jsonl",), broken.rows(bytes(range(256)) * 8)),
    Case("parquet file is text", (r"rows\.parquet",), broken.rows("no parquet" * 10, name="rows.parquet")),
    Case("unknown kind of file", (r"rows\.csv",), broken.rows("text\none\n", name="rows.csv")),
    Case("file is unreadable", (r"rows\.jsonl", "permission|readable"), broken.unreadable_rows),
    Case("folder is empty", ("rows",), broken.folder({})),
    Case(
        "folder has hidden files only", ("rows",),
        broken.folder({"._a.jsonl": TEXT_ROWS, ".ipynb_checkpoints/a.jsonl": TEXT_ROWS}),
    ),
    Case("folder mixes types", ("rows", "types"), broken.folder({"a.jsonl": TEXT_ROWS, "b.txt": "one\ntwo\n"})),
    Case(
        "folder has two schemas", (r"b\.jsonl",),
        broken.folder({"a.jsonl": TEXT_ROWS, "b.jsonl": [{"prompt": "a", "completion": "b"}] * 8}), is_quick=True,
    ),
    Case("all texts are empty", ("empty",), broken.rows([{"text": " "}] * 8)),
    Case("texts are numbers", (r"rows\.jsonl",), broken.rows([{"text": 7}] * 8)),
    Case("messages without a role", (r"rows\.jsonl",), broken.rows([{"messages": [{"content": "a"}]}] * 8)),
    Case("messages are text", (r"rows\.jsonl",), broken.rows([{"messages": "hello"}] * 8)),
    Case("no messages", (r"rows\.jsonl",), broken.rows([{"messages": []}] * 8)),
    Case("no answer", ("answer",), broken.rows([{"prompt": "Why?", "completion": " "}] * 8)),
    Case("token beyond the vocabulary", ("input_ids", "9999"), broken.rows([{"input_ids": [5, 9999, 7]}] * 8)),
    Case("negative token", ("input_ids", "-4"), broken.rows([{"input_ids": [5, -4, 7]}] * 8)),
    Case("tokens are text", ("input_ids",), broken.rows([{"input_ids": ["a", "b"]}] * 8)),
    Case(
        "label beyond the vocabulary", ("labels", "9999"),
        broken.rows([{"input_ids": [5, 6, 7], "labels": [5, 9999, 7]}] * 8),
    ),
    Case(
        "labels of another length", ("labels", "2", "3"), broken.rows([{"input_ids": [5, 6, 7], "labels": [5, 6]}] * 8),
    ),
    Case(
        "nothing to learn", ("learn|labels",),
        broken.rows([{"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}] * 8),
    ),
    Case(
        "no chat template", ("chat template", "chat_template_path"),
        broken.chat_rows(broken.remove("chat_template.jinja")),
    ),
    Case(
        "chat template is not Jinja", ("template", "endfor|syntax|tag|line"),
        broken.chat_rows(broken.chat_template("{% for message in messages %}{{ message")),
    ),
    Case(
        "chat template raises", ("template", "only users"),
        broken.chat_rows(broken.chat_template("{{ raise_exception('only users may speak') }}")),
    ),
    *settings(chat_template_path="no_such.jinja"),
    Case("assistant_only_loss with text", ("assistant_only_loss",), {"assistant_only_loss": True}),
    *settings(eos_token="<|no_such|>"),
    Case("column of the text is missing", ("body|columns",), {"dataset_text_field": "body"}),
    *settings(dataset_train_split="no_such"),
    Case("evaluation without a split", ("eval_strategy", "test"), {"eval_strategy": "steps", "eval_steps": 1}),
    Case(
        "split for evaluation is empty", ("test|no rows",),
        broken.folder({"train.jsonl": TEXT_ROWS, "test.jsonl": ""}, eval_strategy="steps", eval_steps=1),
    ),
    *settings(validation_split_percentage=100),
    *settings(validation_split_percentage=-5),
    Case(
        "validation_split_percentage: nan", ("validation_split_percentage", "nan"),
        {"validation_split_percentage": float("nan")},
    ),
    Case(
        "rows held out from a stream", ("stream",),
        STREAM | {"eval_strategy": "steps", "eval_steps": 1, "validation_split_percentage": 10},
    ),
    Case(
        "packing without a length", ("packing", "max_length"), {"packing": True},
        recipe=lambda text: text.replace("max_length: 64", "max_length: null"),
    ),
    *settings(packing_strategy="tight", packing=True),
    Case("stream without an end", ("max_steps",), STREAM | {"max_steps": -1}),
    Case("stream with a negative buffer", ("shuffle_buffer_size", "-1"), STREAM | {"shuffle_buffer_size": -1}),
    Case("stream of too few rows", ("1 row|no rows", "rank"), broken.rows(TEXT_ROWS[:1], **STREAM)),
    Case(
        "negative fraction", ("fraction", "-1"),
        lambda inputs: {
            "datasets": [{"path": str(broken.rows(TEXT_ROWS)(inputs)["dataset_name"]), "fraction": -1.0}],
            "dataset_name": None,
        },
    ),
    Case("part of a mixture is missing", (r"no-such\.jsonl",), {"datasets": [{"path": "./no-such.jsonl"}], "dataset_name": None}),
    Case("part of a mixture has no path", ("path",), {"datasets": [{"fraction": 1.0}]}),
    *settings(dataset_num_proc=-1),
    Case(
        "prepared rows with a broken manifest", (r"prepared\.json",),
        broken.folder({"prepared.json": "{", "state.json": "{}"}),
    ),
    *settings(special_tokens=7),
]  # fmt: skip

ADAPTERS = [
    Case("lora_r: 0", ("lora_r", " 0"), LORA | {"lora_r": 0}),
    Case("lora_r: -4", ("lora_r", "-4"), LORA | {"lora_r": -4}),
    Case("lora_r: four", ("lora_r", "four"), LORA | {"lora_r": "four"}),
    Case("lora_dropout: 2", ("lora_dropout", "2"), LORA | {"lora_dropout": 2.0}),
    Case("lora_alpha: -8", ("lora_alpha", "-8"), LORA | {"lora_alpha": -8}),
    Case(
        "unknown target", ("no_such_proj", "lora_target_modules"), LORA | {"lora_target_modules": ["no_such_proj"]},
        is_quick=True,
    ),
    Case(
        "unknown module to save", ("no_such_head", "lora_modules_to_save"),
        LORA | {"lora_modules_to_save": ["no_such_head"]},
    ),
    Case("LoRA settings without use_peft", ("use_peft", "lora_r"), {"lora_r": 64, "lora_target_modules": "all-linear"}),
    Case("use_dora without use_peft", ("use_peft", "use_dora"), {"use_dora": True}),
    Case("merge_adapter without use_peft", ("merge_adapter", "use_peft"), {"merge_adapter": True}),
    Case("adapter_dtype: int8", ("adapter_dtype", "int8"), LORA | {"adapter_dtype": "int8"}),
    Case("4-bit full fine-tune", ("load_in_4bit", "use_peft"), {"load_in_4bit": True}, is_quick=True),
    Case("8-bit weights", ("8-bit",), LORA | {"load_in_8bit": True}),
    Case(
        "4-bit and 8-bit weights", ("8 bit", "4 bit"),
        LORA | {"load_in_4bit": True, "load_in_8bit": True},
    ),
    Case(
        "bnb_4bit_quant_type: int3", ("bnb_4bit_quant_type", "int3"),
        LORA | {"load_in_4bit": True, "bnb_4bit_quant_type": "int3"},
    ),
    Case("new model with an adapter", ("config_name", "use_peft"), broken.new_model(**LORA)),
]  # fmt: skip

EXPORT = [
    *settings(export_max_shard_size="tiny"),
    *settings(export_max_shard_size="5GiB"),
    *settings(export_max_shard_size="-1"),
    *settings(export_max_shard_size="0"),
    *settings(export_dtype="int8"),
    *settings(export_dtype="float99"),
    *settings(verify_export="maybe"),
    Case("export/ is another model's", (r"export\b",), broken.foreign_export("export"), is_quick=True),
    Case("export/ holds notes", (r"export\b",), broken.foreign_export("export", ("notes.txt",))),
    Case("export/ is a file", (r"export\b",), broken.export_is_a_file),
    Case(
        "export_merged/ is another model's", ("export_merged",),
        broken.foreign_export("export_merged", **LORA, merge_adapter=True),
    ),
    Case("no room for the export", ("small", "free|room|space"), broken.full_disk(64 * 1024, save_strategy="no")),
]  # fmt: skip

OUTPUT = [
    Case("output_dir is a file", ("place/file",), broken.output_is_a_file, is_quick=True),
    Case("output_dir is in a file", ("place/file",), broken.output_in_a_file),
    Case("output_dir is a dangling link", ("place/link",), broken.dangling_link),
    Case("output_dir is not writable", ("place/run", "permission|writable"), broken.unwritable_output),
    Case("its parent is not writable", ("place/parent", "permission|writable"), broken.unwritable_parent),
    Case("its name is too long", ("output_dir|x{300}",), {"output_dir": "x" * 300}),
    Case("its name is empty", ("output_dir",), {"output_dir": ""}),
    Case("its disk is full", ("place/small", "free|room|space"), broken.full_disk(64 * 1024, fill=True)),
    Case("an earlier run is in it", ("place/run", "checkpoint-2|earlier|another run"), broken.used_output),
]  # fmt: skip

RESUME = [
    Case(
        "resume_from_checkpoint: ./no-such-checkpoint", (r"no-such-checkpoint",),
        {"resume_from_checkpoint": "./no-such-checkpoint"},
    ),
    Case(
        "checkpoint is a file", (r"config\.json",),
        lambda inputs: {"resume_from_checkpoint": inputs.model("llama") / "config.json"},
    ),
    Case("checkpoint is a model", ("llama",), lambda inputs: {"resume_from_checkpoint": inputs.model("llama")}),
    Case("checkpoint is empty", ("checkpoint-2",), broken.resume(broken.empty)),
    Case("checkpoint is another tool's", ("checkpoint-2",), broken.resume(broken.foreign)),
    Case("checkpoint is half written", ("checkpoint-2",), broken.resume(broken.half_written)),
    Case(
        "checkpoint was interrupted", (r"checkpoint-2\.incomplete",),
        broken.resume(broken.remove("manifest.json"), name=".checkpoint-2.incomplete"),
    ),
    Case("checkpoint is renamed", ("checkpoint-7", "step 2"), broken.resume(name="checkpoint-7")),
    Case("manifest is not JSON", (r"manifest\.json",), broken.resume(broken.write("manifest.json", "{"))),
    Case(
        "a byte of the weights is flipped", ("distcp", "checksum"),
        broken.resume(broken.flip_byte("pytorch_model_fsdp_0/*.distcp")), is_quick=True,
    ),
    Case(
        "weights of the checkpoint are truncated", ("distcp", "bytes"),
        broken.resume(broken.truncate("pytorch_model_fsdp_0/*.distcp", -10)),
    ),
    Case(
        "optimizer of the checkpoint is missing", ("optimizer_0", "missing"),
        broken.resume(broken.remove("optimizer_0/*.distcp")),
    ),
    Case("checkpoint is unreadable", ("checkpoint-2", "permission|readable|read"), broken.resume(broken.protect())),
    Case("checkpoint of another optimizer", ("optim", "adamw", "sgd"), broken.resume(optim="sgd")),
    Case(
        "checkpoint of a full fine-tune, run of LoRA", ("checkpoint-2", "LoRA|adapter|use_peft"), broken.resume(**LORA),
    ),
    Case(
        "checkpoint of LoRA, full fine-tune", ("checkpoint-2", "LoRA|adapter|use_peft"), broken.resume(kind="lora"),
    ),
    Case(
        "checkpoint of another rank", ("lora_|rank|shape", "8", "4"),
        broken.resume(kind="lora", **LORA | {"lora_r": 8}),
    ),
    Case(
        "checkpoint of other targets", ("_proj|target", "checkpoint-2"),
        broken.resume(kind="lora", **LORA | {"lora_target_modules": ["q_proj"]}),
    ),
    Case("checkpoint of fewer layers", ("checkpoint-2", "layers"), broken.resume_with_model(num_hidden_layers=3)),
    Case("checkpoint of more layers", ("checkpoint-2", "layers"), broken.resume_with_model(num_hidden_layers=1)),
    Case("checkpoint of another width", ("checkpoint-2", "52"), broken.resume_with_model(intermediate_size=64)),
    Case("checkpoint of another model", ("checkpoint-2",), broken.resume_with_model("gpt2")),
    Case(
        "global batch cannot be kept", ("per_device_train_batch_size 3",), broken.resume(per_device_train_batch_size=3),
    ),
]  # fmt: skip

FSDP1 = {
    "fsdp_config": {
        "fsdp_version": 1, "fsdp_reshard_after_forward": None, "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_use_orig_params": True, "fsdp_sync_module_states": False,
    }
}  # fmt: skip


def parallel(**sizes: int) -> dict[str, Any]:
    return {"parallelism_config": {f"parallelism_config_{name}_size": size for name, size in sizes.items()}}


def fsdp(**keys: Any) -> dict[str, Any]:
    return {"fsdp_config": {f"fsdp_{key}": value for key, value in keys.items()}}


LAUNCH = [
    Case(
        "two ranks without FSDP", ("FSDP", "2 ranks"), template={"distributed_type": "MULTI_GPU", "fsdp_config": None},
        is_quick=True,
    ),
    Case("tensor parallelism", ("tensor parallel|tp_size", "2"), template=parallel(tp=2), is_quick=True),
    Case("context parallelism", ("context parallel|cp_size", "2"), template=parallel(cp=2)),
    Case("sharding and context parallelism", ("context parallel|cp_size", "2"), template=parallel(dp_shard=1, cp=2)),
    Case(
        "mesh of more ranks", ("dp_replicate|mesh|parallelism", "4", "2"),
        template=parallel(dp_replicate=2, dp_shard=2),
    ),
    Case("fp8", ("fp8",), environment={"ACCELERATE_MIXED_PRECISION": "fp8"}),
    Case(
        "FULL_STATE_DICT", ("FULL_STATE_DICT", "SHARDED_STATE_DICT"), template=fsdp(state_dict_type="FULL_STATE_DICT"),
        is_quick=True,
    ),
    Case("unknown layer class", ("NoSuchLayer",), template=fsdp(transformer_layer_cls_to_wrap="NoSuchLayer")),
    Case(
        "layers recomputed twice", ("gradient_checkpointing", "fsdp_activation_checkpointing"),
        {"gradient_checkpointing": True}, template=fsdp(activation_checkpointing=True),
    ),
    Case("compile_blocks under FSDP1", ("compile_blocks", "FSDP1|FSDP2"), {"compile_blocks": True}, template=FSDP1),
    Case("8-bit optimizer under FSDP1", ("optim", "adamw_8bit"), {"optim": "adamw_8bit"}, template=FSDP1),
    Case(
        "output head saved under FSDP1", ("lora_modules_to_save",), LORA | {"lora_modules_to_save": ["lm_head"]},
        template=FSDP1,
    ),
    Case(
        "two dtypes under FSDP1", ("dtype", "bfloat16|float32"),
        LORA | {"dtype": "bfloat16", "adapter_dtype": "float32"}, template=FSDP1,
    ),
]  # fmt: skip

CASES = [*RECIPE_FILE, *ARGUMENTS, *MODEL, *DATA, *ADAPTERS, *EXPORT, *OUTPUT, *RESUME, *LAUNCH]


@pytest.fixture(scope="session")
def checkpoint(tiny_model, text_file, ranks_environment, tmp_path_factory):
    """Return a function that trains once with or without LoRA and returns checkpoint-2 of the run."""
    made: dict[str, Path] = {}

    def train(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(f"trained-{kind}")
            values = SETTINGS | {"model_name_or_path": tiny_model("llama"), "dataset_name": text_file, "max_steps": 4}
            values |= {"output_dir": folder / "run", "report": True} | (LORA if kind == "lora" else {})
            argv = write_recipe(folder / "recipe.yaml", values)
            run_ranks(run_recipe, refusals.NUM_RANKS, argv, environment=ranks_environment({}))
            made[kind] = folder / "run" / "checkpoint-2"
        return made[kind]

    return train


@pytest.fixture
def inputs(tiny_model, checkpoint, mount, tmp_path):
    output = tmp_path / "place" / "run"
    (output / "kept").mkdir(parents=True)
    (output / "notes.txt").write_text("keep me")
    (output / "kept" / "more.txt").write_text("keep me too")
    (tmp_path / "broken").mkdir()
    return Inputs(tmp_path / "broken", output, tiny_model, checkpoint, mount)


@pytest.fixture
def argv_of(inputs, tiny_model, text_file, tmp_path):
    """Return a function that prepares a case and returns the recipe's command line."""

    def make(case: Case) -> list[str]:
        values = {"model_name_or_path": tiny_model("llama"), "dataset_name": text_file, "output_dir": inputs.output}
        changes = case.change(inputs) if callable(case.change) else case.change
        argv = write_recipe(tmp_path / "recipe.yaml", values | SETTINGS | changes, case.recipe)
        return list(case.flags) if "--config" in case.flags else [*argv, *case.flags]

    return make


def test_recipe_without_a_change_trains(argv_of, inputs, ranks_environment, tmp_path):
    one, other = refusals.run(argv_of(Case("nothing", ())), tmp_path, ranks_environment({}))
    assert (one.status, other.status) == (0, 0), one.output
    assert (inputs.output / "export" / "model.safetensors").is_file()


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES) >= 100


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.is_quick else pytest.mark.slow) for case in CASES],
)
def test_bad_input_is_refused_by_every_rank_alike(case, argv_of, inputs, ranks_environment, record_property, tmp_path):
    argv, place = argv_of(case), inputs.output.parent
    before = refusals.describe_tree(place)
    found = refusals.run(argv, tmp_path, ranks_environment(case.template) | case.environment)
    after = refusals.describe_tree(place)
    output_dir = yaml_value(tmp_path / "recipe.yaml", "output_dir", inputs.output)
    faults = refusals.find_faults(found, case.says, [tmp_path, tmp_path.parent])
    faults += refusals.find_changes(before, after, Path(str(output_dir)).name)
    record_property("seconds", f"{max(one.seconds for one in found):.1f}")
    record_property("message", (found[0].errors or [""])[0])
    record_property("faults", "; ".join(faults))
    assert not faults, "\n".join(
        [*faults, *(f"--- rank {rank}\n{one.output[-3000:]}" for rank, one in enumerate(found))]
    )


def yaml_value(file: Path, key: str, default: Any) -> Any:
    """Return a setting of a recipe, or the default if the recipe is broken on purpose."""
    try:
        return dict(yaml.safe_load(file.read_text()))[key]
    except (ValueError, TypeError, KeyError, yaml.YAMLError):
        return default
