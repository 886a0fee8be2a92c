"""Loading: from a checkpoint's bytes into the shards."""
