"""`hf-fsdp sweep`: one recipe over templates and numbers of ranks."""
