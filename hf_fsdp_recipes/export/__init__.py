"""Writes trained models as Hugging Face safetensors."""
