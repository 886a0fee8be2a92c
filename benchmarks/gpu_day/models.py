"""Writes models with random weights and tokenized rows, as fast as the disk."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.gpu_day.day import LLAMA_8B, SHAPES, TINY, Day, Figures

NUM_WORDS = 2000
FILE_BYTES = 2.2e9
NUM_WRITERS = 8


def make_models(day: Day) -> Figures:
    """Write Llama 3.1 8B, Llama 3.2 1B and a smaller one in bf16, and rows of random words."""
    found: Figures = {}
    for name, changes in SHAPES.items():
        started = time.perf_counter()
        config = AutoConfig.from_pretrained(LLAMA_8B)
        sizes = TINY if day.is_small else {}
        for key, value in (changes | sizes | {"bos_token_id": 0, "eos_token_id": 1}).items():
            setattr(config, key, value)
        num_bytes = write_model(day.model(name), config)
        found[f"{name} GB"] = num_bytes / 1e9
        found[f"{name} s"] = time.perf_counter() - started
    write_rows(day.rows, day.length)
    return found


def write_rows(directory: Path, max_length: int) -> None:
    """Write rows of token ids, a quarter of `max_length` at most, as a dataset of one file."""
    directory.mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(0)
    lengths = random.integers(max_length // 64 + 2, max_length // 4, 12_000)
    rows = [random.integers(2, NUM_WORDS, length).tolist() for length in lengths]
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": rows}), directory / "train.parquet")


def write_model(directory: Path, config: Any) -> int:
    """Write config, tokenizer and random weights in the Hub's layout; return the weights' bytes.

    `save_pretrained` would make and write one weight after the other, which takes minutes.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    config.architectures = [type(model).__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(directory)
    write_tokenizer(directory)
    files = split_into_files(shapes)
    names = [
        f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))
    ]
    with ThreadPoolExecutor(NUM_WRITERS) as threads:
        paths = [directory / name for name in names]
        list(threads.map(write_random_weights, paths, files))
    weight_map = {weight: name for name, file in zip(names, files, strict=True) for weight in file}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)
    return sum(2 * shape.numel() for shape in shapes.values())


def write_tokenizer(directory: Path) -> None:
    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(NUM_WORDS - 2))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(directory)


def split_into_files(shapes: dict[str, torch.Size]) -> list[dict[str, torch.Size]]:
    files: list[dict[str, torch.Size]] = [{}]
    num_bytes = 0
    for name, shape in shapes.items():
        if num_bytes > FILE_BYTES:
            files.append({})
            num_bytes = 0
        files[-1][name] = shape
        num_bytes += 2 * shape.numel()
    return files


def write_random_weights(path: Path, shapes: dict[str, torch.Size]) -> None:
    """Write a safetensors file in bf16. Norms are 1; all other weights are small."""
    header = {}
    end = 0
    for name, shape in shapes.items():
        begin = end
        end += 2 * shape.numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for shape in shapes.values():
            weight = torch.ones(shape, dtype=torch.bfloat16, device=device)
            if weight.ndim > 1:
                weight.normal_(0, 0.02)
            stream.write(weight.cpu().view(torch.uint8).numpy().data)
