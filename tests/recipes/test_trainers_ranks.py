"""The other trainers, DPO, KTO, reward and GRPO: sharded reference models, resume, LoRA and exports on two CPU ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_fsdp_recipes.export.verify_files import has_weights
from hf_fsdp_recipes.metrics.metrics_file import read_metrics
from tests.conftest import SENTENCES
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, read_losses, run_ranks, template_environment
from tests.recipes import small
from tests.recipes.launching import ROOT, run_recipe

PAIRS = [
    {"prompt": left + " over", "chosen": right, "rejected": SENTENCES[-1 - number].partition(" over")[2]}
    for number, (left, _, right) in enumerate(sentence.partition(" over") for sentence in SENTENCES[:24])
]
ANSWERS = [
    {"prompt": row["prompt"], "completion": row[column], "label": column == "chosen"}
    for row in PAIRS
    for column in ("chosen", "rejected")
]
NUM_ELEMENTS = {"llama": 36128, "llama_tied": 26112}  # of the tiny models
BOTH = [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)]


def write_rows(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def pair_file(tmp_path_factory):
    """Return a JSON Lines file of 24 preferences."""
    return write_rows(tmp_path_factory.mktemp("rows") / "pairs.jsonl", PAIRS)


@pytest.fixture(scope="module")
def answer_file(tmp_path_factory):
    """Return a JSON Lines file of 48 answers, good and bad."""
    return write_rows(tmp_path_factory.mktemp("rows") / "answers.jsonl", ANSWERS)


def environment(tmp_path, fsdp=FSDP2, precision="no"):
    return fsdp_environment(fsdp, precision=precision) | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}


# Own scripts.

OWN = {
    "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2, "use_cpu": True,
    "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
}  # fmt: skip


def build_own(model, data, output, reference="load_model", lora=False, loader="rank0", **settings):
    """Build a DPOTrainer as in a user's own script; `reference` is load_model or none."""
    from hf_fsdp_recipes.patches import cpu_ranks

    cpu_ranks.enable()
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from hf_fsdp_recipes import load_model
    from tests.ranks.training import LORA

    defaults = OWN | {"max_steps": 3, "max_length": 64, "bf16": False}
    load = load_model if loader == "rank0" else AutoModelForCausalLM.from_pretrained
    return DPOTrainer(
        model=load(str(model), dtype="float32"),
        ref_model=load(str(model), dtype="float32") if reference == "load_model" else None,
        args=DPOConfig(output_dir=str(output), **(defaults | settings)),
        train_dataset=load_dataset("json", data_files=str(data), split="train"),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(**LORA) if lora else None,
    )


def train_own(model, *arguments, **keywords):
    """Train; return the losses, and the reference model's number of elements on this rank and in total."""
    from torch.distributed.tensor import DTensor

    trainer = build_own(model, *arguments, **keywords)
    reference = trainer.ref_model
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if reference is None:
        return losses, None
    weights = list(reference.parameters())
    local = sum((w.to_local() if isinstance(w, DTensor) else w).numel() for w in weights)
    return losses, (local, NUM_ELEMENTS[Path(model).name.partition("-")[0]])


def train_keywords(model, data, output, settings):
    return train_own(model, data, output, **settings)


@pytest.mark.parametrize("fsdp", BOTH, ids=["fsdp2", "fsdp1"])
@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
def test_losses_with_a_sharded_reference_equal_stock_trl(kind, fsdp, tiny_model, pair_file, tmp_path):
    def train(name, world_size, **settings):
        run = (tiny_model(kind), pair_file, tmp_path / name, settings)
        variables = environment(tmp_path, fsdp) if world_size > 1 else {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
        return run_ranks(train_keywords, world_size, *run, environment=variables)

    stock = train("stock", 1, loader="stock", per_device_train_batch_size=4)[0][0]
    for reference in ("load_model", "none"):
        for losses, (local, total) in train(reference, 2, reference=reference):
            assert losses == pytest.approx(stock, rel=1e-4)
            assert local <= 0.55 * total


def train_with_early_hash(model, data, output):
    trainer = build_own(model, data, output, reference="none", lora=True, precompute_ref_log_probs=True)
    trainer.train()


def test_precomputation_with_lora_needs_a_reference(tiny_model, pair_file, tmp_path):
    run = (tiny_model("llama"), pair_file, tmp_path / "run")
    errors = run_ranks(train_with_early_hash, 2, *run, environment=environment(tmp_path), expect_failure=True)
    assert errors[0] == errors[1]
    assert "Pass ref_model=load_model(...) to the trainer" in errors[0][1]


def generate(model):
    """Prepare a model for evaluation; generate more tokens on rank 1 than on rank 0; return their number and some logits."""
    from accelerate import Accelerator

    from hf_fsdp_recipes import distributed, load_model

    loaded = load_model(str(model), dtype="float32")
    prepared = Accelerator().prepare_model(loaded, evaluation_mode=True)
    num_tokens = 3 + 5 * distributed.rank()
    tokens = prepared.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    return tokens.shape[1] - 3, prepared(tokens[:, :4]).logits.tolist()


def test_ranks_wait_for_the_longest_generated_text(tiny_model):
    found = run_ranks(generate, 2, tiny_model("llama"), environment=fsdp_environment(FSDP2))
    assert [num_tokens for num_tokens, _ in found] == [3, 8]
    assert found[0][1] == found[1][1]


def distill(model, teacher, data, output):
    """Train a student; TRL prepares the teacher with `evaluation_mode`; return losses and this rank's share of the teacher."""
    from hf_fsdp_recipes.patches import cpu_ranks

    cpu_ranks.enable()
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer

    from hf_fsdp_recipes import load_model

    args = DistillationConfig(str(output), max_steps=2, max_completion_length=8, bf16=False, **OWN)
    trainer = DistillationTrainer(
        load_model(str(model), dtype="float32"),
        load_model(str(teacher), dtype="float32"),
        args=args,
        train_dataset=load_dataset("json", data_files=str(data), split="train"),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    share = sum(weight.to_local().numel() for weight in trainer.teacher_model.parameters()) / NUM_ELEMENTS["llama"]
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], share


@pytest.mark.slow
def test_teacher_of_a_distillation_is_sharded(tiny_model, pair_file, tmp_path):
    models = (tiny_model("llama_tied"), tiny_model("llama"))
    for losses, share in run_ranks(distill, 2, *models, pair_file, tmp_path / "run", environment=environment(tmp_path)):
        assert len(losses) == 2 and share <= 0.55


# Recipes.

SETTINGS = {
    "max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
    "report_to": "none", "gradient_checkpointing": False, "disable_tqdm": True, "use_cpu": True,
}  # fmt: skip


def train_recipe(name, output, model, rows, fsdp=FSDP2, precision="no", expect_failure=False, **settings):
    settings = SETTINGS | {"model_name_or_path": model, "dataset_name": rows, "output_dir": output} | settings
    arguments = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    variables = environment(output.parent, fsdp, precision)
    run = {"environment": variables, "timeout_seconds": 240, "expect_failure": expect_failure}
    if expect_failure:
        return run_ranks(_build, 2, arguments, name, **run)
    return run_ranks(run_recipe, 2, arguments, f"recipes/{name}.py", **run)


def _build(arguments, name):
    from hf_fsdp_recipes.training.arguments import parse_arguments
    from hf_fsdp_recipes.training.build import build_trainer

    build_trainer(parse_arguments([str(argument) for argument in arguments], name))


def check_run(name, model, rows, tmp_path, **settings):
    """Train, resume from the first checkpoint, and compare losses and exports; return the export."""
    train_recipe(name, tmp_path / "run", model, rows, **settings)
    assert len(read_losses(tmp_path / "run")) == 4
    assert '"tokens_per_second"' in (tmp_path / "run" / "metrics.jsonl").read_text()
    shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    train_recipe(name, tmp_path / "resumed", model, rows, resume_from_checkpoint="auto", **settings)
    assert read_losses(tmp_path / "resumed") == read_losses(tmp_path / "run")[2:]
    first, second = (read_weights(tmp_path / run / "export") for run in ("run", "resumed"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    return tmp_path / "run" / "export"


def read_weights(directory):
    return {key: tensor for file in directory.glob("*.safetensors") for key, tensor in load_file(file).items()}


def check_loads(export, auto_class="AutoModelForCausalLM"):
    """Assert that transformers loads the export with every weight; return the model."""
    import transformers

    model, info = getattr(transformers, auto_class).from_pretrained(export, output_loading_info=True)
    assert not any(info.values()), info
    return model


def check_adapter(export, model_class="AutoPeftModelForCausalLM", **kwargs):
    import peft

    model = getattr(peft, model_class).from_pretrained(export, **kwargs)
    assert any(weight.any() for name, weight in model.named_parameters() if "lora_B" in name)
    return model


LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}


def test_dpo_resumes_and_exports(tiny_model, pair_file, tmp_path):
    check_loads(check_run("dpo", tiny_model("llama"), pair_file, tmp_path))


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_first_rewards_are_zero_in_mixed_precision(name, tiny_model, pair_file, tmp_path):
    """The reference model is loaded in bf16 and sharded separately, but rounds like the model with fp32 master weights."""
    settings = {"bf16": True, "max_steps": 1, "export": False, "save_strategy": "no"}
    train_recipe(name, tmp_path / "run", tiny_model("llama"), pair_file, precision="bf16", **settings)
    [step] = [entry for entry in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in entry]
    assert {value for key, value in step.items() if key in ("rewards/chosen", "rewards/rejected")} == {0}


def test_dpo_takes_the_merged_model_of_a_lora_run_but_not_its_adapter(tiny_model, pair_file, text_file, tmp_path):
    """SFT's merged model is both the policy's base and the reference, so the first rewards are zero."""
    settings = LORA | {"merge_adapter": True, "save_strategy": "no"}
    train_recipe("sft", tmp_path / "sft", tiny_model("llama"), text_file, max_length=64, **settings)
    adapter, merged = tmp_path / "sft" / "export", tmp_path / "sft" / "export_merged"
    train_recipe("dpo", tmp_path / "dpo", merged, pair_file, **settings | {"max_steps": 1, "merge_adapter": False})
    [step] = [entry for entry in read_metrics(tmp_path / "dpo" / "metrics.jsonl") if "loss" in entry]
    assert step["rewards/chosen"] == step["rewards/rejected"] == 0
    config = json.loads((tmp_path / "dpo" / "export" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(merged)
    errors = train_recipe("dpo", tmp_path / "refused", adapter, pair_file, expect_failure=True)
    errors += run_ranks(_build, 1, one_process(tmp_path / "one", adapter, pair_file), "dpo", expect_failure=True)
    for name, message in errors:
        assert name == "LoadError" and message.startswith(f"{adapter} is a PEFT adapter, not a full model")


def one_process(output, model, rows):
    """Return the arguments of a LoRA run without FSDP."""
    settings = SETTINGS | LORA | {"model_name_or_path": model, "dataset_name": rows, "output_dir": output}
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


@pytest.mark.parametrize("precompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dpo_with_lora_resumes_and_exports(precompute, tiny_model, pair_file, tmp_path):
    settings = LORA | {"precompute_ref_log_probs": precompute}
    check_adapter(check_run("dpo", tiny_model("llama"), pair_file, tmp_path, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto", "reward", "grpo"])
def test_qlora_resumes_and_exports(name, tiny_model, pair_file, tmp_path):
    settings = LORA | {"load_in_4bit": True} | (GENERATION if name == "grpo" else {})
    export = check_run(name, tiny_model("llama_wide"), pair_file, tmp_path, **settings)
    if name == "reward":
        check_adapter(export, "AutoPeftModelForSequenceClassification", num_labels=1)
    else:
        check_adapter(export)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["dpo", "kto", "reward"])
def test_fsdp1_resumes_and_exports(name, changes, tiny_model, pair_file, tmp_path):
    assert has_weights(check_run(name, tiny_model("llama"), pair_file, tmp_path, fsdp=FSDP1, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_precomputed_log_probabilities_keep_the_losses(changes, tiny_model, pair_file, tmp_path):
    train_recipe("dpo", tmp_path / "plain", tiny_model("llama"), pair_file, **changes)
    settings = changes | {"precompute_ref_log_probs": True}
    train_recipe("dpo", tmp_path / "precomputed", tiny_model("llama"), pair_file, **settings)
    assert read_losses(tmp_path / "precomputed") == pytest.approx(read_losses(tmp_path / "plain"), rel=1e-5)


@pytest.mark.parametrize("changes", [{}, pytest.param(LORA, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_kto_resumes_and_exports(changes, tiny_model, answer_file, tmp_path):
    export = check_run("kto", tiny_model("llama"), answer_file, tmp_path, **changes)
    check_adapter(export) if changes else check_loads(export)


def test_reward_model_resumes_and_exports(tiny_model, pair_file, tmp_path):
    export = check_run("reward", tiny_model("llama"), pair_file, tmp_path)
    model = check_loads(export, "AutoModelForSequenceClassification")
    assert model.config.num_labels == 1 and model.score.weight.shape == (1, 32)


@pytest.mark.slow
def test_reward_adapter_has_its_head(tiny_model, pair_file, tmp_path):
    export = check_run("reward", tiny_model("llama"), pair_file, tmp_path, **LORA)
    model = check_adapter(export, "AutoPeftModelForSequenceClassification", num_labels=1)
    assert any("score.modules_to_save" in name for name, _ in model.named_parameters())
    assert any("score" in name for name in read_weights(export))


GENERATION = {
    "num_generations": 2, "max_completion_length": 12, "reward_funcs": "tests.recipes.rewards.count_words", "beta": 0.1,
}  # fmt: skip


def test_grpo_generates_resumes_and_exports(tiny_model, pair_file, tmp_path):
    check_loads(check_run("grpo", tiny_model("llama"), pair_file, tmp_path, **GENERATION))


def hand_to_vllm(model, data, output, lora):
    """Train; return each weight's difference between what TRL would send to vLLM and an export, or None if not exported."""
    from trl.distributed import DistributedBackend
    from trl.generation.vllm_generation import VLLMGeneration

    from hf_fsdp_recipes import distributed, export_model
    from tests.ranks import training

    trainer = training.build(str(model), str(data), str(output / "run"), lora=training.LORA if lora else None, steps=2)
    trainer.train()
    generation = VLLMGeneration.__new__(VLLMGeneration)  # its __init__ needs vLLM and CUDA
    generation.model, generation.accelerator = trainer.model, trainer.accelerator
    generation._dist = DistributedBackend(trainer.accelerator)
    sent = {name: tensor.detach().clone() for name, tensor in generation._iter_named_params()}
    export_model(trainer.model, output / "export", merge_adapter=lora)
    written = read_weights(output / "export") if distributed.is_main() else sent
    return {name: (sent[name] - written[name]).abs().max().item() if name in written else None for name in sent}, list(
        written
    )


@pytest.mark.parametrize(
    ("fsdp", "lora"),
    [
        (FSDP2, True),
        pytest.param(FSDP2, False, marks=pytest.mark.slow),
        pytest.param(FSDP1, False, marks=pytest.mark.slow),
    ],
)
def test_trl_hands_the_exported_weights_to_vllm_one_at_a_time(fsdp, lora, tiny_model, text_file, tmp_path):
    differences, names = run_ranks(
        hand_to_vllm, 2, tiny_model("llama"), text_file, tmp_path, lora, environment=environment(tmp_path, fsdp)
    )[0]
    assert sorted(differences) == sorted(names)
    assert set(differences.values()) == {0.0}


@pytest.mark.slow
def test_grpo_with_lora_and_a_reward_model(tiny_model, pair_file, tmp_path):
    train_recipe("reward", tmp_path / "reward", tiny_model("llama_tied"), pair_file)
    settings = GENERATION | LORA | {"reward_model_name_or_path": tmp_path / "reward" / "export"}
    check_adapter(check_run("grpo", tiny_model("llama"), pair_file, tmp_path, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"load_in_4bit": True}], ids=["lora", "qlora"])
def test_merged_reward_model_has_the_trained_head(changes, tiny_model, pair_file, tmp_path):
    from hf_fsdp_recipes import export_checkpoint

    settings = LORA | {"merge_adapter": True, "save_strategy": "no"} | changes
    train_recipe("reward", tmp_path / "run", tiny_model("llama_wide"), pair_file, **settings)
    adapter = tmp_path / "run" / "export"
    [head] = [tensor for name, tensor in read_weights(adapter).items() if "score" in name]
    offline = export_checkpoint(adapter, tmp_path / "out", merge_adapter=True)
    for merged in (tmp_path / "run" / "export_merged", offline):
        model = check_loads(merged, "AutoModelForSequenceClassification")
        assert torch.equal(model.score.weight, head.to(model.score.weight.dtype))


@pytest.mark.slow
def test_grpo_takes_the_merged_reward_model_of_a_lora_run_but_not_its_adapter(tiny_model, pair_file, tmp_path):
    settings = LORA | {"merge_adapter": True, "save_strategy": "no"}
    train_recipe("reward", tmp_path / "reward", tiny_model("llama_tied"), pair_file, **settings)
    adapter, merged = tmp_path / "reward" / "export", tmp_path / "reward" / "export_merged"
    judged = GENERATION | {"max_steps": 1, "save_strategy": "no", "export": False, "reward_model_name_or_path": merged}
    train_recipe("grpo", tmp_path / "grpo", tiny_model("llama"), pair_file, **judged)
    [step] = [entry for entry in read_metrics(tmp_path / "grpo" / "metrics.jsonl") if "loss" in entry]
    rewards = [value for key, value in step.items() if key.startswith("rewards/") and key.endswith("/mean")]
    assert len(rewards) == 2  # the model's and the function's
    assert step["reward"] == pytest.approx(sum(rewards), rel=1e-4)
    judged |= {"reward_model_name_or_path": adapter}
    errors = train_recipe("grpo", tmp_path / "no", tiny_model("llama"), pair_file, expect_failure=True, **judged)
    alone = [part for key, value in judged.items() for part in (f"--{key}", str(value))]
    alone += one_process(tmp_path / "one", tiny_model("llama"), pair_file)
    errors += run_ranks(_build, 1, alone, "grpo", expect_failure=True)
    for name, message in errors:
        assert name == "LoadError" and message.startswith(f"{adapter} is a PEFT adapter, not a full model")
        assert f"hf-fsdp export {adapter} merged --merge-adapter" in message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto", "reward", "grpo"])
def test_shipped_recipe_trains_a_small_model(name, tmp_path):
    model = small.write_model("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path / "model")
    recipe = ["--config", f"smollm2_135m_{name}", "--model_name_or_path", model, "--output_dir", tmp_path / "run"]
    settings = ["--max_steps", "2", "--report_to", "none", "--disable_tqdm", "true"]
    variables = template_environment(ROOT / "accelerate_configs" / "fsdp2_cpu.yaml")
    run_ranks(run_recipe, 2, [*recipe, *settings], f"recipes/{name}.py", environment=variables, timeout_seconds=240)
    assert len(read_losses(tmp_path / "run")) == 2
    assert has_weights(tmp_path / "run" / "export")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dpo", {"dry_run": True}, "dry_run applies to hf-fsdp sft only, not to dpo"),
        ("dpo", {"sync_ref_model": True}, "sync_ref_model changes the reference model"),
        ("kto", {}, "kto needs prompt + completion + label or chosen + rejected"),
        ("grpo", {"num_generations": 2}, "there is no reward"),
        (
            "grpo",
            {"num_generations": 2, "reward_model_name_or_path": "MODEL"},
            "MODEL is a LlamaForCausalLM, which has no",
        ),
        ("grpo", GENERATION | {"reward_funcs": "tests.recipes.no_such.reward"}, "cannot be imported"),
        (
            "grpo",
            GENERATION | LORA | {"use_vllm": True, "load_in_4bit": True},
            "TRL cannot merge an adapter into sharded 4-bit weights",
        ),
    ],
)
def test_what_a_trainer_does_not_support_is_refused(name, settings, message, tiny_model, text_file, tmp_path):
    if name == "grpo":
        text_file = write_rows(tmp_path / "rows.jsonl", PAIRS)
    model = tiny_model("llama")
    settings = {key: model if value == "MODEL" else value for key, value in settings.items()}
    errors = train_recipe(name, tmp_path / "run", model, text_file, expect_failure=True, **settings)
    assert errors[0] == errors[1]
    assert message.replace("MODEL", str(model)) in errors[0][1]
