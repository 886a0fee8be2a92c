"""Writes, verifies and deletes the checkpoints of a run."""
