"""Measures one recipe over several rank counts and templates, and writes a table and plots."""
