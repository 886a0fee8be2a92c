"""Sharded checkpoints: staging, asynchronous writing, manifests, resume and preemption."""
