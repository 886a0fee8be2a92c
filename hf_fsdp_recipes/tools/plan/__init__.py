"""Predicts whether a recipe fits on a GPU."""
