"""Builds the trainer of a case: on FSDP ranks with this package, or as the reference without."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from tests.oracle.adapters import (
    DoesNotApply,
    adapter_config,
    fill_adapters,
    freeze,
    keep_float32,
    plain_name,
)
from tests.oracle.cases import Case
from tests.oracle.rows import EVAL_BATCH, MAX_LENGTH, make_rows, num_eval_rows

SEED = 7
# AdamW divides a gradient by its size plus this number. A small one would turn the rounding of a
# gradient that is almost zero into a change as large as any other.
ADAM_EPSILON = 1e-3


@dataclass(frozen=True)
class Run:
    """One of the runs of a case."""

    model: str  # its directory
    tokenizer: str
    output: str
    is_reference: bool
    # Of the ranks' run: whole; or first and second, if it stops and goes on in new processes.
    part: str = "whole"


def build_trainer(case: Case, run: Run, callbacks: list[Any]) -> tuple[Any, str | None]:
    """Return the trainer, and the checkpoint from which it shall go on."""
    import transformers
    from datasets import Dataset

    args = make_arguments(case, run)
    checkpoint = find_checkpoint(args, run)
    model = load(case, run)
    freeze(model, case.freeze)
    rows = Dataset.from_list(fault_of_rows(case, run, make_rows(case)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.tokenizer)
    fields = {
        "model": model,
        "args": args,
        "train_dataset": rows.to_iterable_dataset() if case.stream else rows,
        "eval_dataset": rows.select(range(num_eval_rows(case))) if case.eval else None,
        "processing_class": tokenizer,
        "callbacks": callbacks,
    }
    if not run.is_reference:
        from hf_fsdp_recipes import sharded_optimizer

        fields["optimizer_cls_and_kwargs"] = sharded_optimizer(args)
    transformers.set_seed(SEED)  # adapters start with random values
    peft = adapter_config(model, case)
    trainer_class = choose_trainer(case, run)
    if case.is_plain:
        trainer = plain_trainer(case, trainer_class, peft, fields)
    else:
        trainer = trainer_class(peft_config=peft, **fields)
    fill_adapters(trainer.model)
    if case.method.startswith("qlora"):
        keep_float32(trainer.model)
    if not run.is_reference and not case.is_plain and case.loader != "stock":
        from hf_fsdp_recipes.training.adjustments import adjust

        adjust(trainer, is_streamed=bool(case.stream))
    return trainer, checkpoint


def load(case: Case, run: Run) -> Any:
    import torch
    import transformers

    from tests.oracle import branching

    name = transformers.AutoConfig.from_pretrained(run.model).architectures[0]
    model_class = getattr(transformers, name, None) or getattr(branching, name)
    options: dict[str, Any] = {"dtype": "float32"}
    if case.attention:
        options["attn_implementation"] = case.attention
    if case.method.startswith("qlora"):
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_quant_storage=torch.float32,
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_use_double_quant=True,
        )
    if run.is_reference or case.loader == "stock":
        return model_class.from_pretrained(run.model, **options)
    from hf_fsdp_recipes import load_model

    return load_model(run.model, auto_class=model_class, source=case.loader, **options)


def make_arguments(case: Case, run: Run) -> Any:
    """Return the trainer's arguments. The reference accumulates the micro-batches of all ranks."""
    import transformers
    from trl import SFTConfig

    ranks = case.num_ranks if run.is_reference else 1
    fields: dict[str, Any] = {
        "output_dir": run.output,
        "max_steps": case.num_steps,
        "per_device_train_batch_size": batch_of(case, run),
        "gradient_accumulation_steps": case.accumulate * ranks,
        "gradient_checkpointing": bool(case.checkpointing) and not run.is_reference,
        "optim": case.optimizer,
        "adam_epsilon": ADAM_EPSILON,
        "learning_rate": case.learning_rate * fault_of_rate(case, run),
        "lr_scheduler_type": "constant",
        "max_grad_norm": case.clip,
        "weight_decay": case.decay,
        "average_tokens_across_devices": bool(case.average),
        "bf16": case.precision == "bf16",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": SEED,
    }
    if not case.shuffle:
        fields["train_sampling_strategy"] = "sequential"
    if case.loss == "smooth":
        fields["label_smoothing_factor"] = 0.1
    if case.eval:
        fields |= {"eval_strategy": "steps", "eval_steps": 1}
        fields["per_device_eval_batch_size"] = EVAL_BATCH
    if case.resume and not run.is_reference:
        fields |= {"save_strategy": "steps", "save_steps": case.resume}
    if case.stream:  # otherwise Accelerate joins batches of different lengths, which fails
        fields["accelerator_config"] = {"dispatch_batches": False}
    if case.liger:
        if importlib.util.find_spec("liger_kernel") is None:
            raise DoesNotApply("liger-kernel is not installed")
        fields["use_liger_kernel"] = True
    if case.is_plain:
        return transformers.TrainingArguments(**fields)
    return SFTConfig(**fields, **sft_fields(case))


def batch_of(case: Case, run: Run) -> int:
    """Return the rows of a micro-batch: fewer if more ranks go on with the same global batch."""
    if run.part != "second" or not case.resume_ranks:
        return case.batch
    return min(case.batch, case.batch * case.accumulate * case.num_ranks // case.resume_ranks)


def sft_fields(case: Case) -> dict[str, Any]:
    """Return arguments that only SFTTrainer knows."""
    # TRL does not truncate rows of padding_free, and drops truncated rows without a label.
    is_cut = not case.padding_free and not case.empty
    fields: dict[str, Any] = {"max_length": MAX_LENGTH if is_cut or case.packing else None}
    if case.packing:
        fields |= {"packing": True, "packing_strategy": case.packing}
    if case.padding_free:
        fields["padding_free"] = True
    if case.completion or case.empty:
        fields["completion_only_loss"] = True
    if case.loss not in ("", "smooth"):
        fields["loss_type"] = case.loss
    if case.aux:
        fields["router_aux_loss_coef"] = 0.01
    return fields


def plain_trainer(case: Case, trainer_class: Any, peft: Any, fields: dict[str, Any]) -> Any:
    import transformers
    from peft import get_peft_model

    tokenizer = fields["processing_class"]
    if peft is not None:
        fields["model"] = get_peft_model(fields["model"], peft)
    if case.kind == "score":
        collate = transformers.DataCollatorWithPadding(tokenizer)
    else:
        collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return trainer_class(data_collator=collate, **fields)


def choose_trainer(case: Case, run: Run) -> Any:
    import transformers
    from trl import SFTTrainer

    trainer_class = transformers.Trainer if case.is_plain else SFTTrainer
    if case.groups:
        trainer_class = with_groups(trainer_class)
    if run.is_reference and not case.average:
        trainer_class = counting_tokens_per_rank(trainer_class, case.num_ranks)
    return trainer_class


def with_groups(trainer_class: Any) -> Any:
    """Return a trainer whose optimizer has a second group for every group of Trainer.

    It holds every second parameter, with half of the learning rate.
    """

    class WithGroups(trainer_class):
        def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
            optimizer = super().create_optimizer(*arguments, **options)
            names = {id(value): name for name, value in self.model.named_parameters()}
            ordered = sorted(plain_name(name) for name in names.values())
            slow = set(ordered[::2])
            for group in list(optimizer.param_groups):
                rest = [p for p in group["params"] if plain_name(names[id(p)]) in slow]
                fast = [p for p in group["params"] if plain_name(names[id(p)]) not in slow]
                group["params"] = fast
                half = {"params": rest, "lr": group["lr"] / 2}
                optimizer.add_param_group(group | half)
            # torch reads a checkpoint's groups only if none but the last is empty.
            groups = optimizer.param_groups
            groups[:] = [group for group in groups if group["params"]]
            return optimizer

    return WithGroups


def counting_tokens_per_rank(trainer_class: Any, num_ranks: int) -> Any:
    """Return a reference that counts tokens as ranks with average_tokens_across_devices false."""

    class CountingPerRank(trainer_class):
        def get_batch_samples(self, iterator: Any, count: int, device: Any) -> Any:
            samples, total = super().get_batch_samples(iterator, count, device)
            if total is not None:
                counts = [(batch["labels"][..., 1:] != -100).sum() for batch in samples]
                parts = [counts[rank::num_ranks] for rank in range(num_ranks)]
                self.per_rank = [sum(part) * num_ranks for part in parts]
                self.next_sample = 0
            return samples, total

        def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
            if options.get("num_items_in_batch") is not None and model.training:
                options["num_items_in_batch"] = self.per_rank[self.next_sample % num_ranks]
                self.next_sample += 1
            return super().compute_loss(model, inputs, **options)

    return CountingPerRank


def find_checkpoint(args: Any, run: Run) -> str | None:
    """Return the checkpoint of the first part, and keep its global batch. Collective."""
    if run.part != "second":
        return None
    from hf_fsdp_recipes import keep_global_batch, latest_checkpoint

    checkpoint = latest_checkpoint(run.output)
    assert checkpoint is not None
    keep_global_batch(args, checkpoint)
    return checkpoint


def fault_of_rate(case: Case, run: Run) -> float:
    return 1.01 if case.fault == "rate" and not run.is_reference else 1.0


def fault_of_rows(case: Case, run: Run, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let one token of one row differ on the ranks, if this is the case's fault."""
    if case.fault == "row" and not run.is_reference:
        rows[1]["input_ids"][3] += 1
    return rows
