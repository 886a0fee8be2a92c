"""Cases of the oracle: a family of models, a method of fine-tuning, and options."""

import dataclasses
from dataclasses import dataclass
from typing import Any

AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "image": "AutoModelForImageTextToText",
    "score": "AutoModelForSequenceClassification",
}
METHODS = (
    "full",
    "lora",
    "lora_head",
    "lora_embed",
    "lora_both",
    "lora_score",
    "lora_experts",
    "qlora",
    "qlora_head",
)
# Values of options whose values can be listed. An empty text stands for the default.
CHOICES = {
    "kind": tuple(AUTO_CLASSES),
    "trainer": ("", "sft", "plain"),
    "loader": ("rank0", "direct", "stock"),
    "template": (
        "full_shard",
        "shard_grad_op",
        "hybrid_shard",
        "hybrid_shard_zero2",
        "size_wrap",
        "offload",
    ),
    "precision": ("no", "bf16"),
    "packing": ("", "bfd", "bfd_split", "wrapped"),
    "freeze": ("", "embeddings", "layers", "body", "tower"),
    "fault": ("", "rate", "head", "row", "start", "state"),
}


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"text": text})


@dataclass(frozen=True)
class Case:
    """What is trained, and how. Each option is NAME or NAME=VALUE in a case's text."""

    family: str
    method: str
    kind: str = _option("causal", "class of the model: causal, image or score (classification)")
    trainer: str = _option("", "sft, or plain for transformers.Trainer; default: plain for score")
    loader: str = _option("rank0", "rank0 or direct: load_model; stock: from_pretrained on ranks")
    template: str = _option("full_shard", "a template in accelerate_configs/")
    ranks: int = _option(0, "number of ranks; default: 2, or 4 for hybrid sharding")
    precision: str = _option("no", "no or bf16: mixed precision, in both runs")
    file_dtype: str = _option("", "dtype of the model's files; both runs load float32")
    batch: int = _option(2, "rows of a micro-batch")
    accumulate: int = _option(1, "micro-batches of a step on each rank")
    steps: int = _option(0, "optimizer steps; default: 3, or two after the step of resume")
    optim: str = _option("", "an optimizer of Trainer; default: sgd, or adamw_torch with resume")
    lr: float = _option(0.0, "learning rate; default: 0.1 (adapters: 0.5), or 0.01 without sgd")
    clip: float = _option(1e9, "max_grad_norm; the default only measures the norm")
    decay: float = _option(0.0, "weight_decay")
    groups: int = _option(0, "1: two more groups of parameters, with other learning rates")
    packing: str = _option("", "packing strategy of TRL: bfd, bfd_split or wrapped")
    padding_free: int = _option(0, "1: rows of a micro-batch in one row")
    completion: int = _option(0, "1: only the second half of a row counts for the loss")
    assistant: int = _option(0, "1: only tokens that assistant_masks marks count for the loss")
    empty: int = _option(0, "1: the rows of some micro-batches have no label at all")
    checkpointing: int = _option(0, "1: gradient checkpointing on the ranks")
    average: int = _option(1, "0: average_tokens_across_devices false")
    loss: str = _option("", "a loss_type of SFTConfig, or smooth for label smoothing")
    eval: int = _option(0, "1: evaluates after each step")
    shuffle: int = _option(0, "1: the trainer's own random order of the rows")
    stream: int = _option(0, "1: the rows come from an IterableDataset")
    freeze: str = _option("", "embeddings, layers, body or tower: not trained (full only)")
    tie: int = _option(-1, "1 or 0: tie_word_embeddings; default: as in the family's config")
    aux: int = _option(0, "1: router_aux_loss_coef 0.01")
    attention: str = _option("", "attn_implementation")
    liger: int = _option(0, "1: use_liger_kernel, in both runs")
    resume: int = _option(0, "the ranks stop after this step; new processes go on from there")
    resume_ranks: int = _option(0, "number of ranks that go on; default: as many as before")
    fault: str = _option("", "a fault of the ranks, which must be seen: rate, head, row, ...")

    @property
    def num_steps(self) -> int:
        return self.steps or (self.resume + 2 if self.resume else 3)

    @property
    def num_ranks(self) -> int:
        return self.ranks or (4 if self.template.startswith("hybrid") else 2)

    @property
    def optimizer(self) -> str:
        return self.optim or ("adamw_torch" if self.resume else "sgd")

    @property
    def model_dtype(self) -> str:
        # TRL casts a trained head of QLoRA to bfloat16, in the ranks' run before it is loaded.
        return self.file_dtype or ("bfloat16" if self.method.startswith("qlora") else "float32")

    @property
    def is_plain(self) -> bool:
        return self.trainer == "plain" or (not self.trainer and self.kind == "score")

    @property
    def learning_rate(self) -> float:
        if self.lr:
            return self.lr
        if self.optimizer != "sgd":
            return 0.01
        rate = 0.1 if self.method == "full" else 0.5
        # Each token's gradient has its probability as a factor.
        return rate * 300 if self.loss == "dft" else rate


OPTIONS = {field.name: field for field in dataclasses.fields(Case) if "text" in field.metadata}


def loss_types() -> tuple[str, ...]:
    """Return the loss types of the installed TRL."""
    from trl import SFTConfig

    metadata = SFTConfig.__dataclass_fields__["loss_type"].metadata
    return tuple(metadata.get("choices", ("nll", "dft", "chunked_nll")))


def parse_case(text: str) -> Case:
    """Return the case of a text like `llama lora_head tie=0 clip=0.5`.

    Raises:
        ValueError: no such method, option or value.
    """
    family, method, *words = text.split()
    _check("method", method, METHODS)
    values: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        _check("option", name, tuple(OPTIONS))
        if name in CHOICES:
            _check(name, value, CHOICES[name])
        elif name == "loss":
            _check(name, value, (*loss_types(), "smooth"))
        values[name] = type(OPTIONS[name].default)(value or 1)
    return Case(family, method, **values)


def _check(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{value} is no {what}. Choose one of {', '.join(filter(None, allowed))}.")


def expand(text: str) -> list[str]:
    """Return a case for every family if the family is `all`, or for every N-th if it is `all/N`.

    `all/N+M` begins with the M-th family.
    """
    from tests.loading.families import model_types

    family, _, rest = text.partition(" ")
    name, _, every = family.partition("/")
    if name != "all":
        return [text]
    step, _, first = every.partition("+")
    families = model_types(AUTO_CLASSES[parse_case(text).kind])
    return [f"{each} {rest}" for each in families[int(first or 0) :: int(step or 1)]]


def read_cases(text: str) -> list[str]:
    """Return the cases of a list: one a line, with comments behind `#`."""
    lines = [" ".join(line.partition("#")[0].split()) for line in text.splitlines()]
    return [case for line in lines if line for case in expand(line)]
