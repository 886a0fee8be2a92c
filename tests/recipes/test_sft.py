"""The recipe as a user starts it: its files, resuming, and one clear message for bad input."""

import json
import signal
import subprocess
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.ranks.harness import printed_by, run_ranks, start_ranks, template_environment
from tests.recipes.launching import ROOT, cpu_variant, environment, kill_tree, run, run_recipe, start

CPU = ROOT / "accelerate_configs" / "fsdp2_cpu.yaml"
SETTINGS = {
    "max_steps": 6,
    "save_steps": 2,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 1.0e-2,
    "max_length": 64,
    "report_to": "none",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def recipe(tmp_path, **changes):
    file = tmp_path / "recipe.yaml"
    settings = SETTINGS | {"output_dir": str(tmp_path / "run")} | changes
    file.write_text(
        yaml.safe_dump({key: str(v) if hasattr(v, "parts") else v for key, v in settings.items() if v is not None})
    )
    return file


def losses(output_dir):
    entries = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


def test_lora_run_leaves_exactly_its_files_and_resumes_after_a_kill(tiny_model, chat_file, tmp_path):
    model = tiny_model("llama")
    config = recipe(
        tmp_path, model_name_or_path=model, dataset_name=chat_file, use_peft=True, lora_target_modules="all-linear",
        merge_adapter=True, lora_r=4, max_steps=4,
    )  # fmt: skip
    environment = template_environment(CPU)
    run_ranks(run_recipe, 2, ["--config", config, "--output_dir", tmp_path / "whole"], environment=environment)

    kill_after_first_checkpoint(
        tmp_path / "run", start_ranks(run_recipe, 2, ["--config", config], environment=environment)
    )
    resume = ["--config", config, "--resume_from_checkpoint", "auto"]
    assert "resume: from" in run_ranks(printed_by, 2, run_recipe, resume, environment=environment)[0]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert (tmp_path / "run/export/adapter_model.safetensors").read_bytes() == (
        tmp_path / "whole/export/adapter_model.safetensors"
    ).read_bytes()
    for output in (tmp_path / "run", tmp_path / "whole"):
        [log] = output.glob("fsdp_training_*_2.txt")
        # A forked rank skips the exit handlers that delete the lock file, so ignore that file.
        assert {path.name for path in output.iterdir()} - {".writer.lease"} == {
            log.name, "checkpoint-2", "checkpoint-4", "export", "export_merged", "metrics.jsonl", "report.md", "loss.png",
            "throughput.png", "memory.png", "model.txt",
        }  # fmt: skip
        assert {path.name for path in (output / "export").iterdir()} == {
            "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "export_manifest.json",
            "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip
    from transformers import AutoModelForCausalLM

    for name in ("export", "export_merged"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / name)


def kill_after_first_checkpoint(output, started):
    """SIGKILL all ranks as soon as a checkpoint is complete, whatever they are doing then."""
    processes, _results = started
    deadline = time.monotonic() + 120
    try:
        while not list(output.glob("checkpoint-*/manifest.json")):
            assert all(process.is_alive() for process in processes) and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not (output / "export").exists()


@pytest.mark.slow
def test_full_run_exports_a_model_that_plain_transformers_loads(tiny_model, text_file, tmp_path):
    config = recipe(
        tmp_path,
        model_name_or_path=tiny_model("llama_tied"),
        dataset_name=text_file,
        export_dtype="bfloat16",
        save_strategy="no",
    )
    result = run(CPU, ["--config", config])
    assert result.returncode == 0, result.stdout
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; d = sys.argv[1];"
        "m = AutoModelForCausalLM.from_pretrained(d); t = AutoTokenizer.from_pretrained(d);"
        "print(m.dtype, m.generate(**t('The big fox', return_tensors='pt'), max_new_tokens=3, do_sample=False).shape);"
        "assert not any(name.startswith('hf_fsdp') for name in sys.modules)"
    )
    import sys

    loaded = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run" / "export")], capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr
    assert "bfloat16" in loaded.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "precision"),
    [("fsdp2_full_shard", "no"), ("fsdp1_full_shard", "bf16")],
)
def test_qlora_run_exports_what_peft_merges_into_the_unquantized_base(
    tiny_model, text_file, tmp_path, template, precision
):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = tiny_model("llama", "bfloat16")
    head = "lm_head" if template.startswith("fsdp2") else None
    config = recipe(
        tmp_path, model_name_or_path=base, dataset_name=text_file, use_peft=True, lora_target_modules="all-linear",
        lora_modules_to_save=head, use_rslora=True, load_in_4bit=True, merge_adapter=True,
        gradient_checkpointing=True,
    )  # fmt: skip
    shipped = ROOT / "accelerate_configs" / f"{template}.yaml"
    file, _, _ = cpu_variant(shipped, tmp_path / "template.yaml", precision)
    result = run(file, ["--config", config])
    assert result.returncode == 0, result.stdout
    assert "verified: the export's logits" in result.stdout
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export_merged").state_dict()
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    by_peft = PeftModel.from_pretrained(plain, tmp_path / "run" / "export").merge_and_unload().state_dict()
    assert merged.keys() == by_peft.keys()
    for name, tensor in by_peft.items():
        torch.testing.assert_close(merged[name], tensor, rtol=2**-7, atol=2**-10)  # bfloat16 rounding errors
    changed = sum(not torch.equal(before[name], merged[name]) for name in before)
    assert changed == (15 if head else 14)  # 7 linear layers of 2 blocks, and the head


@pytest.mark.slow
def test_bad_input_is_one_clear_message_from_one_rank(tiny_model, text_file, tmp_path):
    config = recipe(tmp_path, model_name_or_path=tiny_model("llama"), dataset_name=text_file, learning_rat=1.0)
    assert_clear_failure(run(CPU, ["--config", config], timeout_seconds=90), "RecipeError")


def assert_clear_failure(result, kind):
    assert result.returncode != 0
    lines = [line for line in result.stdout.splitlines() if kind in line.split(":")[0]]
    assert len(lines) == 1, result.stdout
    assert "[rank" not in result.stdout  # no traceback


@pytest.mark.slow
def test_dora_run_is_exported_and_resumed(tiny_model, chat_file, tmp_path):
    config = recipe(
        tmp_path, model_name_or_path=tiny_model("llama"), dataset_name=chat_file, use_peft=True, use_dora=True,
        lora_target_modules="all-linear", merge_adapter=True,
    )  # fmt: skip
    whole = run(CPU, ["--config", config, "--output_dir", tmp_path / "whole", "--verify_export", "logits"])
    assert whole.returncode == 0, whole.stdout
    assert "verified: the export's logits differ" in whole.stdout
    ranks = start_ranks(run_recipe, 2, ["--config", config], environment=template_environment(CPU))
    kill_after_first_checkpoint(tmp_path / "run", ranks)
    resumed = run(CPU, ["--config", config, "--resume_from_checkpoint", "auto"])
    assert resumed.returncode == 0, resumed.stdout
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    merged, resumed = (load_file(tmp_path / name / "export_merged" / "model.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in merged.items())


@pytest.mark.slow
def test_embeddings_train_with_an_adapter_if_they_are_named(tiny_model, text_file, tmp_path):
    common = {
        "model_name_or_path": tiny_model("llama"), "dataset_name": text_file, "use_peft": True, "max_steps": 2,
        "lora_target_modules": "all-linear", "special_tokens": [f"<|new{number}|>" for number in range(40)],
    }  # fmt: skip
    frozen = run(CPU, ["--config", recipe(tmp_path, **common), "--output_dir", tmp_path / "frozen"])
    assert frozen.returncode == 0, frozen.stdout
    assert "does not train the new embedding rows" in frozen.stdout
    config = recipe(tmp_path, **common, lora_modules_to_save=["embed_tokens", "lm_head"])
    trained = run(CPU, ["--config", config, "--output_dir", tmp_path / "trained", "--verify_export", "logits"])
    assert trained.returncode == 0, trained.stdout
    assert "new embedding rows" not in trained.stdout
    assert "verified: the export's logits differ" in trained.stdout
    stored = load_file(tmp_path / "trained" / "export" / "adapter_model.safetensors")
    assert any("embed_tokens" in name for name in stored)


@pytest.mark.slow
def test_saved_output_head_under_fsdp1_is_refused(tiny_model, text_file, tmp_path):
    config = recipe(
        tmp_path, model_name_or_path=tiny_model("llama"), dataset_name=text_file, use_peft=True,
        lora_target_modules="all-linear", lora_modules_to_save="lm_head",
    )  # fmt: skip
    file, _, _ = cpu_variant(ROOT / "accelerate_configs" / "fsdp1_full_shard.yaml", tmp_path / "template.yaml")
    assert_clear_failure(run(file, ["--config", config], timeout_seconds=90), "TemplateError")


@pytest.mark.slow
def test_signal_to_the_launcher_ends_the_run_with_a_checkpoint(tiny_model, text_file, tmp_path):
    config = recipe(
        tmp_path, model_name_or_path=tiny_model("llama"), dataset_name=text_file, max_steps=5000, save_steps=5000
    )
    output = tmp_path / "run"
    patient = environment(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="60")
    process = start(config, env=patient, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 90
        while not (output / "metrics.jsonl").is_file() or not losses(output):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=60)
    finally:
        kill_tree(process)
    assert process.returncode != 0
    assert "writing a checkpoint at step" in text, text
    assert len(list(output.glob("checkpoint-*/manifest.json"))) == 1
