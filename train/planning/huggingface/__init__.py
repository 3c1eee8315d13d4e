"""Models of Hugging Face, read from their `config.json` as one of our models, without weights."""
