"""Import paths of version 1.0, for copies of recipes/sft.py. The code is in saving/."""
