"""The trainer: `python -m train --gin_file=...` or `from train.train import train`."""
