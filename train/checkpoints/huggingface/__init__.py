"""Models of Hugging Face: their settings in `config.json`, and their weights in safetensors."""

from train.checkpoints.huggingface.folders import (
    load_huggingface_model,
    load_huggingface_tokenizer,
)

__all__ = ['load_huggingface_model', 'load_huggingface_tokenizer']
