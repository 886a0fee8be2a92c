"""Runs tests in the environments of `make test-versions`, and prints a table of their versions and results."""

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
    "typer",
]
# Every patch, and on ranks: load, train, save, resume, export; full and LoRA, FSDP2 and FSDP1.
TESTS = [
    "tests/patches",
    "tests/test_cli.py",
    "tests/test_model_class.py",
    "tests/loading/test_weight_mapping.py",
    "tests/loading/test_build_on_meta.py",
    "tests/loading/test_load_model_ranks.py::test_fsdp2_losses_equal_stock_loading",
    "tests/loading/test_load_model_ranks.py::test_fsdp1_losses_equal_stock_loading",
    "tests/loading/test_load_model_ranks.py::test_hybrid_losses_equal_stock_loading",
    "tests/checkpointing/test_dcp_metadata.py",
    "tests/checkpointing/test_layout.py",
    "tests/checkpointing/test_payload_ranks.py",
    "tests/checkpointing/test_resume_checks_ranks.py",
    "tests/checkpointing/test_runs_ranks.py",
    "tests/checkpointing/test_without_fsdp_ranks.py",
    "tests/checkpointing/test_save_ranks.py::test_plans_of_saves_are_kept_only_while_they_fit",
    "tests/checkpointing/test_save_ranks.py::test_resumed_run_equals_the_uninterrupted_one",
    "tests/export/test_export_model_ranks.py::test_export_loads_as_the_gathered_model",
    "tests/export/test_export_model_ranks.py::test_adapter_and_merged_model_are_pefts_own",
    "tests/export/test_export_checkpoint_ranks.py::test_lora_checkpoint_exports_adapter_and_merged_model",
    "tests/export/test_hub_launch.py",
    "tests/recipes/test_sft.py::test_lora_run_leaves_exactly_its_files_and_resumes_after_a_kill",
]


def main(names: list[str]) -> int:
    results = {name: run_tests(ROOT / ".venv-versions" / name / "bin" / "python") for name in names}
    print("\n| environment |", " | ".join(PACKAGES), "| result |")
    print("|---|" + "---|" * (len(PACKAGES) + 1))
    for name, (versions, result, _) in results.items():
        print(f"| {name} |", " | ".join(versions), f"| {result} |")
    return max(code for _, _, code in results.values())


def run_tests(python: Path) -> tuple[list[str], str, int]:
    """Return the installed versions, pytest's summary and its exit status."""
    code = f"from importlib.metadata import version; print(*map(version, {PACKAGES}))"
    versions = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    print(f"{python}: {', '.join(map(' '.join, zip(PACKAGES, versions, strict=True)))}", flush=True)
    command = [python, "-m", "pytest", "-q", "--timeout=900", "-p", "no:cacheprovider", *TESTS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        last = ""
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return versions, last, process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
