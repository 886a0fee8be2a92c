"""The scripts in examples/, as a user would run them: launched on two CPU ranks, killed, resumed, exported."""

import re
import subprocess
import time

from tests.ranks.harness import free_port
from tests.recipes.launching import LAUNCH, ROOT, environment, kill_tree, run

CPU_TEMPLATE = ROOT / "accelerate_configs" / "fsdp2_cpu.yaml"
OWN_TRAINER = "examples/own_trainer.py"


def wait_for_checkpoint(output, process, timeout_seconds=120):
    """Return the step of the newest complete checkpoint as soon as there is one."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline and process.poll() is None:
        steps = [int(path.parent.name.split("-")[1]) for path in output.glob("checkpoint-*/manifest.json")]
        if steps:
            return max(steps)
        time.sleep(0.1)
    raise AssertionError(f"no complete checkpoint in {output}; exit status {process.poll()}")


def test_own_trainer_resumes_after_a_kill_and_exports(tiny_model, text_file, tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_fsdp_recipes import latest_checkpoint

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    output = tmp_path / "run"
    options = ["--model", str(tiny_model("llama")), "--data", str(text_file), "--output_dir", str(output)]
    command = [*LAUNCH, "--config_file", str(CPU_TEMPLATE), "--main_process_port", str(free_port())]
    process = subprocess.Popen(
        [*command, str(ROOT / OWN_TRAINER), *options, "--max_steps", "5000", "--save_steps", "2"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_checkpoint(output, process)
    finally:
        kill_tree(process)
    assert not (output / "export").exists()

    step = int(latest_checkpoint(output).name.split("-")[1])
    resumed = run(CPU_TEMPLATE, [*options, "--max_steps", str(step + 3), "--save_steps", "2"], script=OWN_TRAINER)
    assert resumed.returncode == 0, resumed.stdout
    assert len(re.findall(r"\{'loss'", resumed.stdout)) == 3, resumed.stdout

    model, info = AutoModelForCausalLM.from_pretrained(output / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    before = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(output / "export").pad_token == "<|pad|>"
