"""Contains all run-time changes to upstream code: one file for each upstream package, and one for FSDP1."""
