"""Recognizes the format of the checkpoint at a path, and opens its arrays. Writes safetensors."""
