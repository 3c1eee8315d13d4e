"""Recognizes the format of the files at a path and opens their arrays; writes safetensors."""
