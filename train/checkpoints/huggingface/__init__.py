"""Reads and writes Hugging Face models: `config.json`, and weights in safetensors."""

from train.checkpoints.huggingface.folders import (
    load_huggingface_model as load_huggingface_model,
    load_huggingface_tokenizer as load_huggingface_tokenizer,
)
