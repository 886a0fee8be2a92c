"""Tiny real models and data that the tests create themselves; nothing is downloaded."""

import json
import os
import subprocess
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Tests run on CPU ranks, even on a machine with a GPU. bitsandbytes would start CUDA when imported.
os.environ["ACCELERATE_USE_CPU"] = "true"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HIP_VISIBLE_DEVICES"] = ""
os.environ["ZE_AFFINITY_MASK"] = ""

import pytest

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SENTENCES = [
    f"The {size} {animal} {verb} over the {thing} and then it {verb} again, number {number}."
    for number, (size, animal, verb, thing) in enumerate(
        (size, animal, verb, thing)
        for size in ("big", "small")
        for animal in ("fox", "dog", "cat")
        for verb in ("runs", "jumps", "looks", "walks")
        for thing in ("fence", "river", "hill")
    )
]


def make_tokenizer(directory: Path) -> None:
    """Train a byte-level tokenizer of 300 tokens on SENTENCES and save it, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)


def tiny_config(kind: str):
    """Return the config of a tiny model.

    `kind` is llama, llama_tied, llama_wide, gpt2, qwen3_moe, mixtral or gpt_oss.
    """
    from transformers import GPT2Config, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

    common = {"vocab_size": 307, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    small = common | {
        "hidden_size": 32,
        "intermediate_size": 52,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    if kind in ("llama", "llama_tied"):
        return LlamaConfig(
            **small, tie_word_embeddings=kind == "llama_tied", attention_bias=kind == "llama"
        )
    if kind == "llama_wide":
        # Each row fills 4-bit blocks; bitsandbytes' CPU kernel misreads shorter rows.
        return LlamaConfig(**small | {"hidden_size": 64, "intermediate_size": 128})
    if kind == "gpt2":
        return GPT2Config(**common, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    if kind == "mixtral":
        return MixtralConfig(**small, num_local_experts=4, num_experts_per_tok=2)
    if kind == "qwen3_moe":
        return Qwen3MoeConfig(
            **small, head_dim=8, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2
        )
    if kind == "gpt_oss":  # experts with biases, stored as (expert, in, out)
        return GptOssConfig(
            **small | {"intermediate_size": 48},
            head_dim=8,
            num_local_experts=3,
            num_experts_per_tok=2,
            sliding_window=16,
        )
    raise ValueError(kind)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return a function that makes a tiny model's directory: random weights and a tokenizer.

    It makes each directory once.
    """
    made: dict[tuple, Path] = {}

    def make(kind: str = "llama", dtype: str = "float32", max_shard_size: str = "5GB") -> Path:
        key = (kind, dtype, max_shard_size)
        if key not in made:
            import torch
            from transformers import AutoModelForCausalLM

            directory = tmp_path_factory.mktemp(f"{kind}-{dtype}")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(tiny_config(kind)).to(getattr(torch, dtype))
            model.save_pretrained(directory, max_shard_size=max_shard_size)
            make_tokenizer(directory)
            made[key] = directory
        return made[key]

    return make


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """Return a JSON Lines file of 72 text rows."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES))
    return file


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory) -> Path:
    """Return a JSON Lines file of 24 conversations."""
    file = tmp_path_factory.mktemp("data") / "chat.jsonl"
    rows = []
    for sentence in SENTENCES[:24]:
        question = {"role": "user", "content": f"Tell me about {sentence.split()[2]}"}
        rows.append({"messages": [question, {"role": "assistant", "content": sentence}]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def mount():
    """Return a function that mounts a small file system and unmounts it after the test."""
    mounted = []

    def mount_tmpfs(directory: Path, num_bytes: int) -> None:
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs root, to mount a small file system")
        mounted.append(directory)

    yield mount_tmpfs
    for directory in mounted:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they start.

    `ranks` in test_*_ranks.py, `launch` in test_*_launch.py and tests/recipes/, `device` in
    tests/device/.
    """
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent / "device"):
            item.add_marker("device")
        elif item.path.stem.endswith("_ranks"):
            item.add_marker("ranks")
        elif item.path.stem.endswith("_launch") or "recipes" in item.path.parts:
            item.add_marker("launch")
