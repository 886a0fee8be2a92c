"""Exports a model in training or a sharded checkpoint to safetensors, merges LoRA adapters, and verifies the exports."""
