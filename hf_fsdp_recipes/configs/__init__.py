"""Accelerate configs: the shipped templates, rendering and validation."""
