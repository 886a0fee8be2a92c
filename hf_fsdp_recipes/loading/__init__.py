"""Loads pretrained models into FSDP2 shards. No rank ever holds the full model."""
