"""Training: arguments, data and the trainer that joins everything."""
