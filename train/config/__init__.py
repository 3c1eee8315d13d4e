"""gin files: read, checked, and only then handed to gin."""

from train.config.check import check_complete
from train.config.entry import find_entry
from train.config.load import load_config

__all__ = ['check_complete', 'find_entry', 'load_config']
