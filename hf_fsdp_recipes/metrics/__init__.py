"""Run metrics: metrics.jsonl, FLOPs, memory, progress and the report."""
