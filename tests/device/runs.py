"""The runs that the tests compare, each trained once on the device and once on CPU ranks."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.device.emulator.events import Event, read_events
from tests.device.ranks import Ranks, environment_for, signal_in_step
from tests.ranks.harness import run_ranks
from tests.ranks.training import LORA, build, losses_of

# A device and the CPU draw different random numbers, so nothing drops out.
NF4 = {
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "float32",
    "bnb_4bit_use_double_quant": True,
}
SAVES = {"save_strategy": "steps", "save_steps": 2, "steps": 6}
EXPERTS = {
    "r": 4,
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "task_type": "CAUSAL_LM",
}


@dataclass(frozen=True)
class Case:
    """A run: what `build` is called with, and on which ranks."""

    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "llama"
    num_ranks: int = 2  # 4: hybrid sharding
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "no"


CASES = {
    "full": Case(SAVES),
    "direct": Case(SAVES | {"loader": "direct"}),
    "lora": Case(SAVES | {"lora": LORA}),
    "lora on experts": Case({"lora": EXPERTS}, "qwen3_moe"),
    "qlora": Case(
        {"lora": LORA, "quantization": NF4, "gradient_checkpointing": True}, "llama_wide"
    ),
    "hybrid": Case(num_ranks=4),
    "offload": Case(SAVES, fsdp={"fsdp_offload_params": True}),
    "size wrap": Case(
        fsdp={"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000}
    ),
    "packed and accumulated": Case(
        {"packing": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    ),
    "bf16": Case({"bf16": True}, precision="bf16"),
    "stock": Case({"loader": "stock"}),
}


def train(
    model: str,
    data: str,
    output: str,
    options: Mapping[str, Any],
    resume: bool = False,
    stop: int = 0,
) -> list[float]:
    """Train and export on this rank; return the losses of all steps.

    `stop` is a signal that the rank gets in step 5.
    """
    from hf_fsdp_recipes import ShardedCheckpointCallback, latest_checkpoint

    is_stock = options.get("loader") == "stock"
    is_merged = "lora" in options
    callback = ShardedCheckpointCallback(export_dir=f"{output}/export", merge_adapter=is_merged)
    changes = {
        "use_cpu": os.environ["ACCELERATE_USE_CPU"] == "true",
        "callbacks": [] if is_stock else [callback],
    }
    trainer = build(model, data, output, **(dict(options) | changes))
    if stop:
        signal_in_step(5, signal.Signals(stop), Path(output, "checkpoint-4", "manifest.json"))
    trainer.train(resume_from_checkpoint=latest_checkpoint(output) if resume else None)
    return losses_of(trainer)


@dataclass(frozen=True)
class Run:
    """A finished run: its directory, its losses, and its ranks' requests to the device."""

    output: Path
    losses: list[float]
    events: list[Event]


@dataclass(frozen=True)
class Inputs:
    """What all runs are trained on, and where."""

    tiny_model: Callable[..., Path]
    data: Path
    directory: Path

    def arguments(self, name: str, output: Path) -> tuple[str, str, str]:
        """Return the model, the data and the output directory of a case."""
        return str(self.tiny_model(CASES[name].kind)), str(self.data), str(output)

    def train_on_cpu(self) -> dict[str, Run]:
        """Train all cases on CPU ranks."""
        done = {}
        for name, case in CASES.items():
            output = self.directory / f"{name.replace(' ', '_')}-cpu"
            environment = environment_for(case.num_ranks, case.fsdp, case.precision)
            arguments = (*self.arguments(name, output), dict(case.options))
            losses = run_ranks(train, case.num_ranks, *arguments, environment=environment)[0]
            done[name] = Run(output, losses, [])
        return done


@dataclass(frozen=True)
class Runs:
    """Trains each case on the device when a test first needs it.

    `on_cpu` has the same cases, trained on CPU ranks.
    """

    ranks: Ranks
    inputs: Inputs
    on_cpu: Mapping[str, Run]
    done: dict[str, Run] = field(default_factory=dict)

    def get(self, name: str) -> Run:
        """Return the finished run of a case."""
        if name not in self.done:
            output = self.inputs.directory / name.replace(" ", "_")
            watch = output.with_name(f"{output.name}-events")
            losses = self.train(name, output, watch=watch)
            self.done[name] = Run(output, losses, read_events(watch))
        return self.done[name]

    def train(
        self,
        name: str,
        output: Path,
        resume: bool = False,
        num_ranks: int = 0,
        watch: Path | None = None,
        **changes: Any,
    ) -> list[float]:
        """Train a case in another directory, on `num_ranks` or its own ranks; return the losses."""
        case = CASES[name]
        arguments = (*self.inputs.arguments(name, output), dict(case.options) | changes, resume)
        options = {"fsdp": case.fsdp, "precision": case.precision, "watch": watch}
        return self.ranks.run(train, num_ranks or case.num_ranks, *arguments, **options)[0]
