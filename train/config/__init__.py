"""gin files: read, checked, and only then handed to gin."""

from train.config.load import load_config, save_operative_config

__all__ = ['load_config', 'save_operative_config']
