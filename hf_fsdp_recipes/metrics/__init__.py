"""What a run measures about itself: metrics.jsonl, FLOPs, memory, progress and the report."""
