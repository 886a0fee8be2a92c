"""A script like `run_clm.py` of transformers, with three lines for FSDP.

These lines make it shard, resume and export.

    accelerate launch --config_file accelerate_configs/full_shard.yaml examples/own_clm.py \
        --model_name_or_path Qwen/Qwen3-8B --train_file my_rows.jsonl --output_dir runs/mine --bf16
        --do_train

Each line of `my_rows.jsonl` is a JSON object with the field `text`. Every argument of
`TrainingArguments` is an option. If the run stops, start the same command again. It resumes from
the latest complete checkpoint. The trained model is written to `<output_dir>/export`. On a machine
without a GPU, use accelerate_configs/cpu.yaml.
"""

import math
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_fsdp_recipes import ShardedCheckpointCallback, latest_checkpoint, load_model


@dataclass
class ScriptArguments:
    """The model to train, and the texts to train it on."""

    model_name_or_path: str = field(metadata={"help": "Directory or Hub id."})
    train_file: str = field(metadata={"help": "JSON lines file with a text column."})
    dtype: str = field(default="float32", metadata={"help": "Dtype of the trained weights."})
    validation_file: str | None = field(default=None, metadata={"help": "The same for --do_eval."})
    block_size: int = field(default=1024, metadata={"help": "Tokens per training sequence."})


def group_texts(rows: dict[str, list[list[int]]], block_size: int) -> dict[str, list[list[int]]]:
    """Join the tokenized texts and cut them into blocks.

    Drop the incomplete last block of each batch of rows.
    """
    tokens = list(chain.from_iterable(rows["input_ids"]))
    blocks = [
        tokens[start : start + block_size]
        for start in range(0, len(tokens) - block_size + 1, block_size)
    ]
    return {"input_ids": blocks, "labels": blocks}


def main() -> None:
    """Train and evaluate with the options from the command line."""
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    script, arguments = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)

    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    model = load_model(script.model_name_or_path, dtype=script.dtype)  # instead of from_pretrained

    files = {"train": script.train_file, "validation": script.validation_file}
    # Rank 0 tokenizes, and the other ranks read its cache.
    with arguments.main_process_first(desc="tokenize"):
        rows = load_dataset(
            "json", data_files={split: file for split, file in files.items() if file}
        )
        rows = rows.map(
            lambda row: tokenizer(row["text"]),
            batched=True,
            remove_columns=rows["train"].column_names,
        )
        block_size = {"block_size": script.block_size}
        rows = rows.map(
            group_texts,
            batched=True,
            remove_columns=rows["train"].column_names,
            fn_kwargs=block_size,
        )

    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows["train"],
        eval_dataset=rows.get("validation"),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        # new, instead of save_model
        callbacks=[ShardedCheckpointCallback(export_dir=f"{arguments.output_dir}/export")],
    )
    if arguments.do_train:
        # instead of get_last_checkpoint, which would also return an interrupted save
        result = trainer.train(resume_from_checkpoint=latest_checkpoint(arguments.output_dir))
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if arguments.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
