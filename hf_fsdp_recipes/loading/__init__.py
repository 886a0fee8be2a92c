"""Model loading without host-memory blow-ups: build on meta, then fill the shards."""
