"""Safetensors exports from a live model or a sharded checkpoint, LoRA merge and verification."""
