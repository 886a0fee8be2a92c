"""Planning: what a run will need, from the model's config alone."""
