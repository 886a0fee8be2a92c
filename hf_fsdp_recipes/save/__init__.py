"""Saving: checkpoints that survive, and the final export."""
