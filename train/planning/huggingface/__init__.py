"""Reads the `config.json` of a Hugging Face model as one of our models, without weights."""
