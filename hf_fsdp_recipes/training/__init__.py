"""What recipes/sft.py adds to TRL: a few arguments, row formats, and checks before training."""
