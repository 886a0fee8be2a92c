"""Loads pretrained models into FSDP2 shards; no rank ever holds the full model."""
