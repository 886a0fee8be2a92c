"""What upstream would do in silence is refused or said before anything is loaded.

There is one case for each check.
"""

import contextlib
import inspect
import io
import os
import re
from unittest import mock

import pytest

from tests.ranks.harness import run_ranks, template_environment
from tests.recipes.launching import CPU

GOOD = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "out", "report_to": "none"}
STREAM = {"dataset_streaming": "true", "max_steps": "3"}
# (changed settings, variables of the launcher, what the message says)
REFUSED = [
    ({"config_name": "c"}, {}, "either model_name_or_path"),
    ({"dataset_name": None}, {}, "either dataset_name"),
    ({"config_overrides": "hidden_size=8"}, {}, "config_overrides needs config_name"),
    ({"output_dir": ""}, {}, "output_dir is empty"),
    ({"gradient_accumulation_steps": "0"}, {}, "gradient_accumulation_steps is 0"),
    ({"max_length": "0"}, {}, "max_length is 0"),
    ({"max_steps": "0"}, {}, "max_steps is 0"),
    ({"num_train_epochs": "0"}, {}, "num_train_epochs is 0"),
    ({"validation_split_percentage": "100"}, {}, "validation_split_percentage is 100"),
    (STREAM | {"validation_split_percentage": "4"}, {}, "A stream cannot be split"),
    ({"per_device_train_batch_size": "0"}, {}, "per_device_train_batch_size is 0"),
    ({"lora_r": "4"}, {}, "use_peft: true for lora_r"),
    ({"lora_r": "16"}, {}, "use_peft: true for lora_r"),  # the default, but a person has set it
    ({"bnb_4bit_quant_type": "fp4"}, {}, "bnb_4bit_quant_type needs load_in_4bit"),
    ({"merge_adapter": "true"}, {}, "use_peft: true for merge_adapter"),
    ({}, {"WORLD_SIZE": "2"}, "2 ranks were launched, but Trainer sees 1"),
    ({}, {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, "FULL_STATE_DICT"),
    ({}, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16: false"),
    ({"optim": "adafactor"}, {}, "optim: adafactor fails"),
]
# (changed settings, variables of the launcher, what is printed)
SAID = [
    ({}, {}, ""),
    ({"dtype": "bfloat16"}, {}, "trained in bfloat16, without float32 master weights"),
    ({"dtype": "bfloat16", "use_peft": "true"}, {}, ""),
    ({"dtype": "bfloat16", "bf16": "true"}, {}, ""),  # Accelerate keeps float32 master weights
    (
        {"dtype": "bfloat16", "bf16": "true"},
        {"ACCELERATE_USE_FSDP": "false"},
        "trained in bfloat16",
    ),
]


def _check_all():
    """Return what happens in each case: the error's text, or what is printed. Runs on one rank."""
    from hf_fsdp_recipes.errors import RecipeError
    from hf_fsdp_recipes.training.arguments import parse_arguments
    from hf_fsdp_recipes.training.checks import check_arguments

    found = []
    for changes, variables, _ in [*REFUSED, *SAID]:
        settings = {name: value for name, value in (GOOD | changes).items() if value is not None}
        with mock.patch.dict(os.environ), contextlib.redirect_stdout(io.StringIO()) as printed:
            arguments = parse_arguments(
                [word for name, value in settings.items() for word in (f"--{name}", value)]
            )
            os.environ.update(variables)
            try:
                check_arguments(arguments)
                found.append(printed.getvalue())
            except RecipeError as error:
                found.append(f"RecipeError: {error}")
    return found


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(_check_all, 1, environment=template_environment(CPU))[0]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[says for _, _, says in REFUSED])
def test_a_recipe_that_upstream_misunderstands_is_refused(number, outcomes):
    assert outcomes[number].startswith("RecipeError") and REFUSED[number][2] in outcomes[number]
    assert outcomes[number].count(".") <= 3  # nothing else is wrong


@pytest.mark.parametrize("number", range(len(SAID)))
def test_what_may_surprise_is_said(number, outcomes):
    printed, says = outcomes[len(REFUSED) + number], SAID[number][2]
    assert says in printed and bool(says) == bool(printed)
    assert ("master weights" in printed) == ("trained in" in says)


def _set_adapter_fields():
    """Set each field that only adapters use, without use_peft. Return the errors. Runs on one rank.

    The fields are those that TRL passes to PEFT, and those that quantize the base model.
    """
    from trl import ModelConfig, get_peft_config

    from hf_fsdp_recipes.errors import RecipeError
    from hf_fsdp_recipes.training.arguments import parse_arguments
    from hf_fsdp_recipes.training.checks import check_arguments

    values = {bool: "true", int: "3", float: "0.5", str: "SEQ_CLS", type(None): "q_proj"}
    names = set(re.findall(r"model_args\.(\w+)", inspect.getsource(get_peft_config)))
    names = names - {"use_peft"} | {"load_in_4bit", "load_in_8bit"}
    given = [word for name, value in GOOD.items() for word in (f"--{name}", value)]
    found = {}
    for name in names:
        value = values[type(getattr(ModelConfig, name))]
        try:
            check_arguments(parse_arguments([*given, f"--{name}", value]))
        except RecipeError as error:
            found[name] = str(error)
    return names, found


def test_every_field_of_an_adapter_is_refused_without_use_peft():
    [(names, found)] = run_ranks(_set_adapter_fields, 1, environment=template_environment(CPU))
    assert names >= {"lora_r", "lora_target_parameters", "use_rslora", "use_dora", "lora_task_type"}
    for name in names:
        assert f"Set use_peft: true for {name}. Without it, all weights are trained." in found[name]
