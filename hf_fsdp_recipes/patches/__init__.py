"""All run-time changes to upstream code, one file for each upstream package."""
