"""Starts the shipped scripts and copies the shipped recipes, from any directory."""
