"""Rows with images: TRL tokenizes them while training, and every rank has an image in every batch."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from hf_fsdp_recipes.errors import DataError
from tests.conftest import SENTENCES, make_tokenizer
from tests.loading.test_model_class_ranks import class_and_config
from tests.ranks.harness import FSDP2, fsdp_environment, read_losses, run_ranks
from tests.recipes.launching import run_recipe

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<boi>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SETTINGS = {
    "max_steps": 3, "save_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
    "max_length": "null", "report_to": "none", "gradient_checkpointing": False, "disable_tqdm": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def image_model(tmp_path_factory):
    """The directory of a tiny Gemma 3 with its processor."""
    from transformers import AutoTokenizer, Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    directory = tmp_path_factory.mktemp("gemma3-with-images")
    make_tokenizer(directory)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=AutoTokenizer.from_pretrained(directory).backend_tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        extra_special_tokens={"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
        chat_template=CHAT_TEMPLATE,
    )
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=CHAT_TEMPLATE).save_pretrained(directory)
    model_class, config = class_and_config("gemma3")
    config.image_token_id = config.image_token_index = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    model_class(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def image_file(tmp_path_factory):
    """A JSON Lines file of 24 conversations, each about one image."""
    from PIL import Image

    directory = tmp_path_factory.mktemp("images")
    for number in range(4):
        Image.new("RGB", (20, 20), (60 * number, 10, 200)).save(directory / f"{number}.png")
    return write_rows(directory / "rows.jsonl", [[str(directory / f"{number % 4}.png")] for number in range(24)])


def write_rows(file, images):
    question = [{"role": "user", "content": "What is it?"}]
    rows = [
        {"messages": [*question, {"role": "assistant", "content": sentence}], "images": one}
        for sentence, one in zip(SENTENCES, images, strict=False)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def train(output, model, rows, expect_failure=False, **settings):
    settings = SETTINGS | {"model_name_or_path": model, "dataset_name": rows, "output_dir": output} | settings
    arguments = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    environment = fsdp_environment(FSDP2) | {"HF_DATASETS_CACHE": str(output.parent / "cache")}
    run = {"environment": environment, "timeout_seconds": 200, "expect_failure": expect_failure}
    return run_ranks(_build if expect_failure else run_recipe, 2, arguments, **run)


def _build(arguments):
    from hf_fsdp_recipes.training.arguments import parse_arguments
    from hf_fsdp_recipes.training.build import build_trainer

    build_trainer(parse_arguments(arguments))


def tower(directory):
    [file] = directory.glob("*.safetensors")
    return {name: tensor for name, tensor in load_file(file).items() if "vision_tower" in name}


def test_run_trains_the_vision_tower_resumes_and_exports_the_processor(image_model, image_file, tmp_path):
    from transformers import AutoProcessor

    train(tmp_path / "run", image_model, image_file)
    before, after = tower(image_model), tower(tmp_path / "run" / "export")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    train(tmp_path / "resumed", image_model, image_file, resume_from_checkpoint=tmp_path / "run" / "checkpoint-1")
    assert read_losses(tmp_path / "resumed") == read_losses(tmp_path / "run")[1:]
    assert type(AutoProcessor.from_pretrained(tmp_path / "run" / "export")).__name__ == "Gemma3Processor"


@pytest.mark.slow
def test_lora_on_the_language_model_leaves_the_vision_tower_frozen(image_model, image_file, tmp_path):
    lora = {"use_peft": True, "lora_target_modules": r".*language_model.*(q_proj|v_proj)", "merge_adapter": True}
    train(tmp_path / "run", image_model, image_file, **lora)
    after = tower(tmp_path / "run" / "export_merged")
    assert all(torch.equal(tensor, after[name]) for name, tensor in tower(image_model).items())
    assert len(read_losses(tmp_path / "run")) == 3


def test_texts_with_a_single_image_train(image_model, image_file, tmp_path):
    paths = [json.loads(line)["images"][0] for line in image_file.read_text().splitlines()]
    rows = [{"text": f"<boi>{text}", "image": path} for text, path in zip(SENTENCES, paths, strict=False)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(tmp_path / "run", image_model, tmp_path / "rows.jsonl")
    assert len(read_losses(tmp_path / "run")) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": True, "max_length": 64}, "Packing is not supported for vision datasets"),
        ({"padding_free": True}, "Padding-free training is yet not supported for vision datasets"),
        ({"dataset_streaming": True}, "rows with images cannot be streamed"),
    ],
)
def test_what_images_exclude_is_refused(image_model, image_file, tmp_path, settings, message):
    errors = train(tmp_path / "run", image_model, image_file, expect_failure=True, **settings)
    assert errors[0] == errors[1]
    assert message in errors[0][1]


def test_column_without_images_is_no_reason_to_refuse_a_text_model(tiny_model, tmp_path):
    train(tmp_path / "run", tiny_model("llama"), write_rows(tmp_path / "rows.jsonl", [None] * 24))
    assert len(read_losses(tmp_path / "run")) == 3


def test_text_model_is_refused(tiny_model, image_file, tmp_path):
    errors = train(tmp_path / "run", tiny_model("llama"), image_file, expect_failure=True)
    assert "the rows have images, but" in errors[0][1]


def part_of(tmp_path, images):
    from hf_fsdp_recipes.training.data.dataset_parts import DatasetPart, read_splits

    return DatasetPart("rows", read_splits(str(write_rows(tmp_path / "rows.jsonl", images)))["train"], None)


def test_row_without_an_image_is_refused(tmp_path):
    from hf_fsdp_recipes.training.data.image_rows import open_images

    with pytest.raises(DataError, match="rows, row 3: images is empty"):
        open_images(part_of(tmp_path, [["a.png"], ["b.png"], [], ["c.png"]]), "text")


def test_rows_without_trls_columns_are_refused(tmp_path):
    from hf_fsdp_recipes.training.data.image_rows import open_images

    part = part_of(tmp_path, [["a.png"]])
    part = replace(part, train=part.train.rename_column("messages", "dialogue"))
    with pytest.raises(DataError, match="need messages, prompt \\+ completion, or text"):
        open_images(part, "text")
