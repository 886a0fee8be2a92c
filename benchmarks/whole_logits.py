"""Runs recipes/sft.py with the loss over all logits at once, as SFTTrainer computes it without its fused head."""

import runpy
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "sft.py"


def main() -> None:
    import trl

    make = trl.SFTTrainer.__init__

    def make_with_whole_logits(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        self.compute_loss_func = cross_entropy

    trl.SFTTrainer.__init__ = make_with_whole_logits
    runpy.run_path(str(RECIPE), run_name="__main__")


def cross_entropy(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return the next-token loss of logits (B, T, V) and labels (B, T), averaged over the tokens of all ranks."""
    import torch

    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / num_items_in_batch


if __name__ == "__main__":
    main()
