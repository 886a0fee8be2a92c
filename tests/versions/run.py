"""Runs the tests of the core in the environments of `make test-versions`, and prints a table of versions and results.

The core is what depends on the insides of other packages: loading, checkpointing, export, the
patches and the private names.
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
    "checkpointing",
    "export",
    "patches",
    "upstream",
    "training/test_adjustments_ranks.py",
]
# Tests of what upstream itself cannot do in an environment's versions, for pytest's -k. docs/upstream.md says what.
CPU_RANKS_WITHOUT_FSDP = "test_without_fsdp_trainer_saves_and_the_callback_exports"
UNSUPPORTED = {
    "lowest": f"{CPU_RANKS_WITHOUT_FSDP} or (as_by_peft and qwen3_moe) or llama_tied-bfloat16-options1",
    "middle": f"{CPU_RANKS_WITHOUT_FSDP} or dequantized_values[qwen3-rank0] or gemma3_text or llama_tied-bfloat16-options1",
}


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
    code = f"import platform as p, importlib.metadata as m; print(p.python_version(), *map(m.version, {PACKAGES}))"
    versions = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    print(
        f"{python}: {', '.join(map(' '.join, zip(['python', *PACKAGES], versions, strict=True)))}",
        flush=True,
    )
    chosen = [
        "-m",
        "not slow",
        *(["-k", f"not ({UNSUPPORTED[name]})"] if name in UNSUPPORTED else ()),
    ]
    command = [python, "-m", "pytest", "-q", "--timeout=900", "-p", "no:cacheprovider", *chosen]
    command += [f"tests/{part}" for part in TESTS]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return versions, last, process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
