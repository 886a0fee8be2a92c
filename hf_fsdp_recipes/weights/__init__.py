"""What loading and export share: files, rows of sharded tensors, and the test of values."""
