"""Describes how TRL's trainers differ, and checks and loads what only some of them need."""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.environment import fsdp_version
from hf_fsdp_recipes.errors import RecipeError, summarize
from hf_fsdp_recipes.model_class import CAUSAL, TASK_TYPES, declared_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from hf_fsdp_recipes.training.arguments import Arguments

SEQUENCE = "AutoModelForSequenceClassification"
# Arguments that only SFT supports: those for this package's data preparation, for new models and for dry runs.
SFT_ONLY = [
    "add_special_tokens",
    "append_concat_token",
    "config_name",
    "config_overrides",
    "dataset_streaming",
    "dry_run",
    "prompt_template",
    "shuffle_buffer_size",
    "special_tokens",
    "streaming",
]


@dataclass(frozen=True)
class TrainerKind:
    """The properties of one of TRL's trainers."""

    title: str  # as in TRL's class names: DPO for DPOTrainer and DPOConfig
    columns: tuple[tuple[str, ...], ...] = ()  # rows must have one of these sets of columns; for SFT, see row_formats
    auto_class: str | None = None  # None takes the class that the checkpoint declares
    has_reference: bool = False  # whether the trainer takes a `ref_model`

    @property
    def name(self) -> str:
        """The name of the `hf-fsdp` subcommand for this trainer, such as dpo."""
        return self.title.lower()

    @property
    def task_type(self) -> str:
        """PEFT's task type for the models of this trainer, such as CAUSAL_LM."""
        return TASK_TYPES[self.auto_class or CAUSAL]


PAIRS = ("chosen", "rejected")
KINDS = {
    kind.name: kind
    for kind in (
        TrainerKind("SFT"),
        TrainerKind("DPO", (PAIRS,), has_reference=True),
        TrainerKind("KTO", (("prompt", "completion", "label"), PAIRS), has_reference=True),
        TrainerKind("Reward", (PAIRS,), auto_class=SEQUENCE),
        TrainerKind("GRPO", (("prompt",),)),
    )
}


def find_kind(training: "TrainingArguments") -> TrainerKind:
    """Return the entry of KINDS that belongs to a TRL config, such as a DPOConfig."""
    return KINDS[type(training).__name__.removesuffix("Config").lower()]


def check_trainer(arguments: "Arguments", given: Collection[str]) -> None:
    """Raise a RecipeError for arguments that this trainer does not support. Not a collective.

    `given` contains the names of the arguments that the recipe or the command line sets.
    """
    kind, training = find_kind(arguments.training), arguments.training
    if kind.name == "sft":
        return
    if refused := [name for name in SFT_ONLY if name in given]:
        verb, names = "applies" if len(refused) == 1 else "apply", ", ".join(refused)
        raise RecipeError(f"{names} {verb} to hf-fsdp sft only, not to {kind.name}. Drop {names}.")
    if getattr(training, "sync_ref_model", False):
        raise RecipeError(
            "sync_ref_model changes the reference model, but checkpoints do not contain it, so a resumed run would go back to the "
            "original one. Drop sync_ref_model."
        )
    if kind.name != "grpo":
        return
    if not (arguments.script.reward_funcs or arguments.script.reward_model_name_or_path):
        raise RecipeError("there is no reward. Set reward_funcs or reward_model_name_or_path.")
    if fsdp_version() == 1 and not training.use_vllm:
        raise RecipeError(
            "grpo cannot generate under FSDP1, where ranks that end early would leave the others waiting. Use an fsdp2_*.yaml "
            "template, or use_vllm: true."
        )
    if training.use_vllm and arguments.model.use_peft and fsdp_version() is not None:
        if fsdp_version() == 1:
            raise RecipeError(
                "with use_vllm, TRL cannot merge an adapter under FSDP1 to hand it to vLLM. Use an fsdp2_*.yaml template."
            )
        if arguments.model.load_in_4bit:
            raise RecipeError(
                "with use_vllm, TRL cannot merge an adapter into sharded 4-bit weights to hand it to vLLM. Drop load_in_4bit or "
                "use_vllm."
            )


def needs_reference(arguments: "Arguments") -> bool:
    """Return whether the trainer needs a separate reference model.

    With an adapter, TRL uses the base model as the reference, so no other is needed. The exception is
    precompute_ref_log_probs, for which TRL needs the reference before the base model is sharded.
    """
    if not find_kind(arguments.training).has_reference:
        return False
    return not arguments.model.use_peft or arguments.training.precompute_ref_log_probs


def load_rewards(arguments: "Arguments") -> "list[PreTrainedModel | Callable[..., object]]":
    """Return the reward model, if any, and the reward functions for GRPO. Collective: every rank must call this.

    A function is given by its name in `trl.rewards`, or by a dotted path, such as my_rewards.count_words. The current
    directory is searched, too.

    Raises:
        RecipeError: on every rank, if there is no such function, or the model is not a classifier.
        LoadError: on every rank, if the model cannot be loaded or is an adapter.
    """
    from trl import rewards

    from hf_fsdp_recipes.loading.load_model import load_model

    found: list[PreTrainedModel | Callable[..., object]] = []
    script = arguments.script
    with distributed.sync_errors():
        sys.path.insert(0, str(Path.cwd()))
        for name in script.reward_funcs or ():
            try:
                reward = resolve_name(name) if "." in name else getattr(rewards, name)
            except Exception as error:  # the module's own code may raise anything
                raise RecipeError(
                    f"reward_funcs names {name}, which cannot be imported: {summarize(error, 'sentence')}. Set a function of "
                    f"trl.rewards, or a dotted path such as my_rewards.count_words."
                ) from error
            if name == "get_soft_overlong_punishment":
                # The same values as in trl 1.16 `scripts/grpo.py`.
                reward = reward(max_completion_len=1280, soft_punish_cache=256)
            found.append(reward)
    if script.reward_model_name_or_path:
        name, source = script.reward_model_name_or_path, arguments.recipe.load_source
        distributed.run_on_main(lambda: _check_reward_model(name), distributed.patient_group())
        found.insert(0, load_model(name, auto_class=SEQUENCE, num_labels=1, source=source))
    return found


def _check_reward_model(name: str) -> None:
    """Refuse a reward model that is an adapter or not a classifier: it would get a new head, whose scores are random."""
    from hf_fsdp_recipes.loading.build_on_meta import read_config, resolve_directory
    from hf_fsdp_recipes.loading.load_model import refuse_adapter

    directory = resolve_directory(name, {})
    refuse_adapter(name, directory)
    declared = declared_class(read_config(str(directory)))
    if declared is not None and not declared.endswith("ForSequenceClassification"):
        raise RecipeError(
            f"reward_model_name_or_path: {name} is a {declared}, which has no trained head for rewards. Set the export of hf-fsdp "
            f"reward, or another model for sequence classification."
        )
