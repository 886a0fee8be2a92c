"""Random models and rows of text, so that measurements need neither the Hub nor a trained model."""

import json
import random
from pathlib import Path
from shutil import disk_usage

from hf_fsdp_recipes.errors import RecipeError


def write_random_model(config: dict[str, int], directory: Path) -> None:
    """Write a random bf16 Llama checkpoint without holding it in memory.

    Norm weights are 1. The other parameters are parts of one noise tensor, each at its own offset, so no two are equal.
    `config` has the fields of a LlamaConfig.
    """
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    model_config = LlamaConfig(**config, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
    model_config.save_pretrained(directory)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}  # tied parameters once
    plan = split_torch_state_dict_into_shards(dict(model.named_parameters()), max_shard_size="2GB")
    num_bytes, free_bytes = plan.metadata["total_size"], disk_usage(directory).free
    if free_bytes < num_bytes:
        raise RecipeError(
            f"{directory} has {free_bytes / 1e9:.1f} GB free, but the model needs {num_bytes / 1e9:.1f} GB. Use another disk."
        )
    num_values = max(shape.numel() for shape in shapes.values()) + len(shapes)
    noise = (torch.randn(num_values, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    offsets = {name: offset for offset, name in enumerate(shapes)}

    def make_parameter(name: str) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shapes[name], dtype=torch.bfloat16)
        return noise[offsets[name] :][: shapes[name].numel()].reshape(shapes[name]).clone()

    for file, names in plan.filename_to_tensors.items():
        tensors = {name: make_parameter(name) for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer in which every word of `write_rows` is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)


def words() -> list[str]:
    """Return the vocabulary, without special tokens."""
    return [f"w{number}" for number in range(250)]


def write_rows(directory: Path, num_rows: int, num_words: int = 300) -> None:
    """Write text rows of about `num_words` random words each."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    lengths = [rng.randint(num_words // 2, num_words + num_words // 2) for _ in range(num_rows)]
    rows = [json.dumps({"text": " ".join(rng.choices(words(), k=length))}) + "\n" for length in lengths]
    (directory / "train.jsonl").write_text("".join(rows))
