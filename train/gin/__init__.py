"""gin configuration: files and flags are read and checked before gin runs them."""

from train.gin.entry import find_config, find_entry
from train.gin.load import load_config

__all__ = ['find_config', 'find_entry', 'load_config']
