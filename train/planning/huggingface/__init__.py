"""Turns the `config.json` of a Hugging Face model into one of our models, without weights."""
