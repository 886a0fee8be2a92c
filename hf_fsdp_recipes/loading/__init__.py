"""Loads models without a full copy in host memory: builds a model on meta, then fills each rank's shards."""
