"""Memory and communication estimates for a training run, from the model's config alone."""
