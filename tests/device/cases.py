"""The runs that the tests compare: each has a strategy, a recipe and a tiny model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.device.emulator.events import Event, read_events
from tests.device.ranks import CPU, DEVICE, Ranks, variant
from tests.loading.quantized import make

SETTINGS = {
    "max_steps": 6,
    "save_steps": 2,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 1.0e-2,
    "max_length": 64,
    "report_to": "none",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
SHORT = {"max_steps": 3, "save_strategy": "no"}
LORA = {
    "use_peft": True,
    "lora_target_modules": "all-linear",
    "lora_r": 4,
    "lora_dropout": 0.0,  # a device and the CPU draw different random numbers
}


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        template: name of a shipped template.
        settings: the recipe's fields.
        num_ranks: 2, or 4 for hybrid sharding.
        model: kind and dtype, as for `tiny_model`; for a quantized model the kind is, for example, "qwen3 in fp8".
        precision: the template's `mixed_precision`.
    """

    template: str = "fsdp2_full_shard"
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    model: tuple[str, str] = ("llama", "float32")
    precision: str = "no"


PACKED = {
    "packing": True,
    "packing_strategy": "wrapped",
    "gradient_checkpointing": True,
    "gradient_accumulation_steps": 2,
}
PACKED_DOCUMENTS = {"packing": True, "attention": "sdpa"}
QLORA = LORA | SHORT | {"load_in_4bit": True, "gradient_checkpointing": True, "merge_adapter": True}
CASES = {
    "full": Case(),
    "direct": Case(settings={"load_source": "direct"}),
    "lora": Case(settings=LORA | {"merge_adapter": True}),
    "dora": Case(settings=LORA | {"use_dora": True, "merge_adapter": True}),
    "fp8": Case(settings=SHORT | {"dtype": "float32"}, model=("qwen3 in fp8", "float32")),
    "qlora": Case(settings=QLORA, model=("llama_wide", "float32")),
    "qlora fsdp1": Case("fsdp1_full_shard", settings=QLORA, model=("llama_wide", "bfloat16"), precision="bf16"),
    "fsdp1": Case("fsdp1_full_shard"),
    "hybrid": Case("fsdp2_hybrid_shard", SHORT, num_ranks=4),
    "offload": Case("fsdp2_full_shard_offload"),
    "packing, checkpointing and accumulation": Case(settings=SHORT | PACKED),
    "packed documents": Case(settings=SHORT | PACKED_DOCUMENTS),
    "mixture of experts": Case(settings=SHORT, model=("qwen3_moe", "float32")),
    "bf16": Case(settings=SHORT, precision="bf16"),
}


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        output: the run's output_dir.
        losses: one per step.
        settings: the recipe's fields, to run it again.
        template: the Accelerate config, to run it again.
        events: the requests of the run's ranks to the device.
    """

    output: Path
    losses: list[float]
    settings: dict[str, Any]
    template: Path
    events: list[Event]


@dataclass(frozen=True)
class Runs:
    """Trains each case at most once on the device and once on CPU ranks, when a test first needs the run."""

    ranks: Ranks
    tiny_model: Callable[..., Path]
    data: Path
    directory: Path
    done: dict[tuple[str, str], Run] = field(default_factory=dict)

    def get(self, name: str, place: Literal["device", "cpu"] = "device") -> Run:
        """Return the finished run of a case."""
        if (name, place) not in self.done:
            case, output = CASES[name], self.directory / f"{name.replace(' ', '_')}-{place}"
            settings = self.settings(name, output)
            template = variant(case.template, self.directory / "templates", case.precision)
            on, watch = (DEVICE, output.with_name(f"{output.name}-events")) if place == "device" else (CPU, None)
            losses = self.ranks.train(settings, template, case.num_ranks, on=on, watch=watch)
            self.done[name, place] = Run(output, losses, settings, template, read_events(watch) if watch else [])
        return self.done[name, place]

    def settings(self, name: str, output: Path) -> dict[str, Any]:
        """Return the recipe of a case, for another run."""
        case = CASES[name]
        kind, _, quantized = case.model[0].partition(" in ")
        model = make(output.with_name(f"{output.name}-model"), kind) if quantized else self.tiny_model(*case.model)
        names = {"model_name_or_path": model, "dataset_name": self.data, "output_dir": output}
        return SETTINGS | dict(case.settings) | names
