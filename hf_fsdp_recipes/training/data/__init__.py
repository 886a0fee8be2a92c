"""Datasets: reading, filtering, tokenizing, caching and streaming."""
