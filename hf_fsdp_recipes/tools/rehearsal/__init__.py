"""A recipe run end to end on CPU ranks with a tiny model."""
