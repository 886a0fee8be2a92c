"""Cases that differ or fail for reasons outside of this package."""

from typing import Any

BAD = ("WRONG", "FAILS", "driver error")
# Parts of `CASE: REASON`, and why.
KNOWN = {
    "only the ranks train 1 parameters: model.z_L_init": "hrm_text freezes this parameter when "
    "transformers initializes missing weights, after from_pretrained made it trainable",
    "aten.where.self got mixed torch.Tensor and DTensor": "gemma4 indexes the weight of its "
    "embeddings before it calls them, which works only if they are in one unit with the head",
}


def is_known(text: str, result: dict[str, Any]) -> bool:
    return any(part in f"{text}: {result['why']}" for part in KNOWN)


def surprises(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the reasons of cases that differ or fail without a known reason."""
    return {
        text: result["why"]
        for text, result in results.items()
        if result["verdict"] in BAD and not is_known(text, result)
    }
