"""Metrics of a run: metrics.jsonl, FLOPs, memory, and the report with its plots."""
