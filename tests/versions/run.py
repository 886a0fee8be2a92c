"""Runs the tests of the core in the environments of `make test-versions`.

Prints a table of versions and results. The core is what depends on the insides of other packages:
loading, saving, export and the patches.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    "torch",
    "accelerate",
    "transformers",
    "trl",
    "peft",
    "huggingface_hub",
    "datasets",
    "bitsandbytes",
]
TESTS = [
    "loading",
    "saving",
    "export",
    "patches",
    "upstream",
    "oracle",
    "training/test_adjustments_ranks.py",
    "training/test_units_ranks.py",
]
# Tests of what upstream itself cannot do in an environment's versions, for pytest's -k.
# docs/upstream.md says what.
CPU_RANKS_WITHOUT_FSDP = (
    "test_without_fsdp_trainer_saves_and_the_callback_exports or (ddp and (resumed "
    "or started_again or belongs_to_the_checkpoint or kill_in_on_save or saves_all_state))"
)
TIED = "llama_tied-bfloat16-options1"
# With TRL 1.12, the weights are equal, but evaluation losses differ by 0.2 %. Accelerate 1.14
# separates tied weights.
EVALUATION = "(trains and gpt2 and hybrid_shard)"
UNSUPPORTED = {
    "lowest": [
        CPU_RANKS_WITHOUT_FSDP,
        TIED,
        EVALUATION,
        "(as_by_peft and qwen3_moe)",
        "experts_have_stocks_values_under_lora",
    ],
    "middle": [
        CPU_RANKS_WITHOUT_FSDP,
        TIED,
        EVALUATION,
        "dequantized_values[qwen3-rank0]",
        "gemma3_text",
        "(trains and gemma2)",
    ],
}
READ_VERSIONS = f"""
import importlib.metadata, platform
print(platform.python_version(), *map(importlib.metadata.version, {PACKAGES}))
"""


def main(names: list[str]) -> int:
    results = {name: run_tests(name) for name in names}
    print("\n| environment | python |", " | ".join(PACKAGES), "| result |")
    print("|---|---|" + "---|" * (len(PACKAGES) + 1))
    for name, (versions, result, _) in results.items():
        print(f"| {name} |", " | ".join(versions), f"| {result} |")
    return max(status for _, _, status in results.values())


def run_tests(name: str) -> tuple[list[str], str, int]:
    """Return the versions of Python and the packages, pytest's summary and its exit status."""
    python = ROOT / ".venv-versions" / name / "bin" / "python"
    read = [python, "-c", READ_VERSIONS]
    versions = subprocess.run(read, capture_output=True, text=True, check=True).stdout.split()
    pairs = zip(["python", *PACKAGES], versions, strict=True)
    print(f"{python}: {', '.join(map(' '.join, pairs))}", flush=True)
    command = [python, "-m", "pytest", "-q", "--timeout=900", "-p", "no:cacheprovider"]
    command += ["-m", "not slow"]
    if name in UNSUPPORTED:
        command += ["-k", f"not ({' or '.join(UNSUPPORTED[name])})"]
    command += [f"tests/{part}" for part in TESTS]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return versions, last, process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
