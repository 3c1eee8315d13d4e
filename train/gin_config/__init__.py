"""gin configuration: files and flags are read and checked before gin runs them."""

from train.gin_config.entry import find_config, find_entry
from train.gin_config.load import load_config

__all__ = ['find_config', 'find_entry', 'load_config']
