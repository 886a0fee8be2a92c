"""Measuring: probes, metrics.jsonl, the report."""
