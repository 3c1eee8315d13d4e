"""Models of Hugging Face: their settings in `config.json`, and their weights in safetensors."""
