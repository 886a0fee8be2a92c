"""One recipe over several rank counts and templates, with a table and plots."""
