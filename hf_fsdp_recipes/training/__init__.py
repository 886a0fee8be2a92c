"""Recipe arguments, data preparation, and model and trainer construction."""
