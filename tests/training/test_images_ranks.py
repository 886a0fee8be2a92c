"""Batches in which only some ranks have images are refused, instead of a hang."""

import os

import torch

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks

LAYERS = {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,CLIPEncoderLayer"}
IMAGE = 9  # the token that an image's features replace
NUM_PATCHES = 4


def _model(is_text=False):
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlamaForCausalLM,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    text = LlamaConfig(**size, vocab_size=32, num_hidden_layers=2)
    if is_text:
        return LlamaForCausalLM(text)
    vision = CLIPVisionConfig(**size, image_size=16, patch_size=8, num_hidden_layers=2)
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    )


def _shard(model):
    from accelerate import Accelerator

    from hf_fsdp_recipes.upstream import patches

    patches.enable_cpu_ranks()
    optimizer = torch.optim.SGD(model.parameters())
    return Accelerator(cpu=True).prepare(model, optimizer)[0]


def _loss(model, has_image):
    ids = torch.tensor([[IMAGE] * NUM_PATCHES + [3, 4, 5]])
    if not has_image:
        return model(input_ids=ids[:, NUM_PATCHES:], labels=ids[:, NUM_PATCHES:]).loss
    return model(input_ids=ids, labels=ids, pixel_values=torch.ones(1, 3, 16, 16)).loss


def _train(images, is_protected=True):
    from hf_fsdp_recipes.training.units import train_like_one_process

    model = _shard(_model())
    if is_protected:
        train_like_one_process(model)
    losses = []
    for ranks_with_image in images:
        loss = _loss(model, int(os.environ["RANK"]) in ranks_with_image)
        loss.backward()
        losses.append(loss.item())
    return losses


def _train_by_trainer(num_images, output):
    """Train on 4 rows, of which some have an image, with one row on each rank in a step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hf_fsdp_recipes.training.units import train_like_one_process
    from hf_fsdp_recipes.upstream import patches

    class Check(TrainerCallback):
        def on_train_begin(self, *_, **kwargs):
            train_like_one_process(kwargs["model"])

    patches.enable_cpu_ranks()
    ids = [IMAGE] * NUM_PATCHES + [3, 4, 5]
    with_image = {"input_ids": [ids], "labels": [ids], "pixel_values": torch.ones(1, 3, 16, 16)}
    text = {"input_ids": [ids[NUM_PATCHES:]], "labels": [ids[NUM_PATCHES:]]}
    arguments = {"per_device_train_batch_size": 1, "num_train_epochs": 1, "report_to": "none"}
    trainer = Trainer(
        _model(),
        TrainingArguments(
            output, **arguments, use_cpu=True, remove_unused_columns=False, save_strategy="no"
        ),
        train_dataset=[with_image] * num_images + [text] * (4 - num_images),
        data_collator=lambda rows: {
            name: torch.as_tensor(value) for name, value in rows[0].items()
        },
        callbacks=[Check()],
    )
    trainer.train()
    return trainer.state.global_step


def test_a_batch_in_which_one_rank_has_an_image_is_refused_by_every_rank():
    images = [(0, 1), (), (1,)]
    environment = fsdp_environment(FSDP2 | LAYERS)
    errors = run_ranks(_train, 2, images, environment=environment, expect_failure=True)
    assert errors[0] == errors[1] and errors[0][0] == "RecipeError"
    assert "the ranks have [0, 1] such inputs" in errors[0][1]


def test_batches_in_which_all_ranks_or_none_have_images_train_as_without_the_check():
    images = [(0, 1), (), (0, 1)]
    environment = fsdp_environment(FSDP2 | LAYERS)
    checked = run_ranks(_train, 2, images, environment=environment)
    assert checked == run_ranks(_train, 2, images, False, environment=environment)


def test_a_callback_protects_a_trainer(tmp_path):
    environment = fsdp_environment(FSDP2 | LAYERS)
    output = str(tmp_path)
    assert run_ranks(_train_by_trainer, 2, 4, output, environment=environment) == [2, 2]
    errors = run_ranks(
        _train_by_trainer, 2, 1, output, environment=environment, expect_failure=True
    )
    assert errors[0] == errors[1] and "only some ranks have images" in errors[0][1]
