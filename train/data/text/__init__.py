"""Turns files into streams of tokens: sources, tokenizers, and the index that stores tokens."""
