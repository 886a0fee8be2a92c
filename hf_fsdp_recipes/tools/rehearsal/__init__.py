"""Runs a recipe end to end on CPU ranks with a tiny model."""
