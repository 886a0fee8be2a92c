"""Checks that the nodes of a job can work together, before the job starts."""
