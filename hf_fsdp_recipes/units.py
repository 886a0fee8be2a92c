"""Parses and formats sizes, bandwidths and counts: "80GB", "512GiB", "200Gb/s", "2 nodes"."""

import re

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes in decimal units: `1.2 GB` is 1.2e9 bytes."""
    if abs(num_bytes) < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if abs(num_bytes) < 1000:
            return f"{num_bytes:,.1f} {unit}"
    return f"{num_bytes / 1000:,.1f} TB"


def count(number: int, noun: str) -> str:
    """Return a number and its noun in singular or plural: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'s'[: number != 1]}"


def parse_bytes(text: str) -> int:
    """Convert a size such as "80GB" (decimal), "512GiB" (binary) or "1.5T" to bytes; raise a ValueError for other text."""
    number, prefix, _ = _split(text, r"B?", "80GB or 512GiB")
    return int(number * _FACTORS[prefix.upper()])


def parse_bandwidth(text: str) -> float:
    """Convert a bandwidth such as "200Gb/s" (bits) or "25GB/s" (bytes) to bytes per second; raise a ValueError for other text."""
    number, prefix, unit = _split(text, r"[bB](?:/s|ps|it/s)?", "200Gb/s or 25GB/s")
    return number * _FACTORS[prefix.upper()] / (8 if unit.startswith("b") else 1)


def _split(text: str, unit: str, example: str) -> tuple[float, str, str]:
    match = re.fullmatch(rf"\s*(\d+\.?\d*|\.\d+)\s*([kKmMgGtT]?i?)({unit})\s*", text)
    if match is None or match.group(2) == "i":
        raise ValueError(f"cannot read {text!r}; use a value such as {example}")
    return float(match.group(1)), match.group(2), match.group(3)
