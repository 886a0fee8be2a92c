"""Starting ranks: templates, their check, FSDP on CPU ranks."""
