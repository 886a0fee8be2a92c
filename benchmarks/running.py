"""Shared by the benchmarks: ranks on this machine, random checkpoints of a given size, the results page."""

import multiprocessing
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "measured.md"
PACKAGES = ("torch", "accelerate", "transformers", "trl", "peft")


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_seconds: float = 1800, start: str = "spawn"
) -> list[Any]:
    """Run a function in one new process per rank; return the results in rank order. `start` is multiprocessing's method."""
    context: Any = multiprocessing.get_context(start)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    results = context.Queue()
    processes = [
        context.Process(target=_run, args=(function, arguments, rank, world_size, port, results))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        outcomes = dict(results.get(timeout=timeout_seconds) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    for rank, outcome in outcomes.items():
        if isinstance(outcome, str) and outcome.startswith("Traceback"):
            raise RuntimeError(f"rank {rank}:\n{outcome}")
    return [outcomes[rank] for rank in range(world_size)]


def import_once() -> None:
    """Import what the ranks need before they are forked, so that they share it."""
    import accelerate
    import torch
    import transformers.models.llama.modeling_llama

    from hf_fsdp_recipes import callback  # noqa: F401

    assert accelerate and transformers
    torch.set_num_threads(1)


def _run(function: Callable[..., Any], arguments: Any, rank: int, world_size: int, port: int, results: Any) -> None:
    import traceback

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    try:
        results.put((rank, function(*arguments)))
    except BaseException:
        results.put((rank, traceback.format_exc()))


class HostPeak:
    """Measures the seconds of a block, and the peak of this process's anonymous memory, sampled every millisecond."""

    def __enter__(self) -> "HostPeak":
        self.before_bytes = self.peak_bytes = _anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self._stop.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, _anonymous_bytes())

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, _anonymous_bytes())


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def sync_files(directory: Path, rank: int) -> None:
    """Flush to disk the files that a rank has written with torch DCP."""
    for file in directory.rglob(f"__{rank}_*.distcp"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def llama_config(num_parameters: float) -> Any:
    """Return a Llama config of about `num_parameters`, with the proportions of TinyLlama 1.1B."""
    from transformers import LlamaConfig

    layers = max(2, round(22 * (num_parameters / 1.1e9) ** (1 / 3)))
    per_layer = (num_parameters * 0.88) / layers
    hidden = max(64, round((per_layer / 10.5) ** 0.5 / 64) * 64)
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=round(hidden * 2.75 / 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 64 // 8)
        if (hidden // 64) % max(1, hidden // 64 // 8) == 0
        else hidden // 64,
        vocab_size=32000,
        tie_word_embeddings=False,
    )


def make_checkpoint(
    directory: Path, num_parameters: float, max_shard_size: str = "500MB", config: Any | None = None
) -> int:
    """Write a random bf16 checkpoint in the Hub's layout; return its size in bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    if not (directory / "config.json").is_file():
        torch.manual_seed(0)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = AutoModelForCausalLM.from_config(config or llama_config(num_parameters), dtype=torch.bfloat16)
        finally:
            torch.set_default_dtype(previous)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def machine() -> str:
    """Describe machine and versions in one line."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {system}, {versions}"


def write_section(title: str, lines: Sequence[str]) -> None:
    """Replace one section of docs/measured.md."""
    text = RESULTS.read_text() if RESULTS.is_file() else "# Measured\n"
    section = f"## {title}\n\n" + "\n".join(lines) + "\n"
    pattern = rf"## {re.escape(title)}\n.*?(?=\n## |\Z)"
    if re.search(pattern, text, flags=re.DOTALL):
        text = re.sub(pattern, lambda _: section, text, flags=re.DOTALL)
    else:
        text = text.rstrip("\n") + "\n\n" + section
    RESULTS.write_text(text)
