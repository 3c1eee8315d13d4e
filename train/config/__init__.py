"""gin configuration: files and flags are read and checked before gin runs them."""

from train.config.check import check_complete
from train.config.entry import find_entry
from train.config.load import load_config

__all__ = ['check_complete', 'find_entry', 'load_config']
