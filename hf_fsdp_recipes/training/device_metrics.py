"""Keeps the metrics of a step on the device until they are logged.

TRL's SFTTrainer copies five values to the host in every forward pass. Each copy makes the host wait until the device has run all
queued work; then the device idles until the host queues more.

Source: trl 1.16 `sft_trainer.py`, `compute_loss` and `log`.
"""

from typing import Any, TypeAlias

import torch
from trl import SFTTrainer


class _Pending:
    """A number that stays on the device, even after `item`, with the operations that SFTTrainer applies to metrics."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value.detach()

    def sum(self) -> "_Pending":
        return _Pending(self.value.sum())

    def mean(self) -> "_Pending":
        return _Pending(self.value.mean())

    def item(self) -> "_Pending":
        return self

    def __gt__(self, other: float) -> bool:
        return True  # SFTTrainer divides only if this is true; __truediv__ handles a divisor of 0

    def __truediv__(self, other: "Number") -> "_Pending":
        divisor = torch.as_tensor(_value(other))
        return _Pending(torch.where(divisor > 0, self.value / divisor, 0.0))  # 0 in a batch without labels

    def __floordiv__(self, other: "Number") -> "_Pending":
        return _Pending(self.value // _value(other))

    def __add__(self, other: "Number") -> "_Pending":
        return _Pending(self.value + _value(other))

    __radd__ = __add__


Number: TypeAlias = _Pending | torch.Tensor | float


def _value(number: Number) -> torch.Tensor | float:
    return number.value if isinstance(number, _Pending) else number


class DeviceMetricsTrainer(SFTTrainer):
    """An SFTTrainer that copies its metrics to the host once per log, not in every forward pass. The values are the same."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, object]:
        """Compute the loss as SFTTrainer does, but keep its metrics on the device."""
        gather = self.accelerator.gather_for_metrics
        self.accelerator.gather_for_metrics = lambda value: _Pending(gather(value))
        try:
            return super().compute_loss(*args, **kwargs)
        finally:
            self.accelerator.gather_for_metrics = gather

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Copy all metrics since the last log to the host in a single transfer, which waits for the device once, and log them."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        pending = [number for numbers in metrics.values() for number in numbers if isinstance(number, _Pending)]
        if pending:
            read = iter(torch.stack([number.value.double() for number in pending]).tolist())
            for name, numbers in metrics.items():
                metrics[name] = [next(read) if isinstance(number, _Pending) else number for number in numbers]
        super().log(logs, start_time)
