"""Metrics of a run: metrics.jsonl, FLOPs, memory, progress bars, and the report with its plots."""
