"""Trains your model, with your loss, data and optimizer, on any mesh.

Usage:
  from train import TrainConfig, train
  state = train(TrainConfig(model_dir='runs/mine', objective=..., task=..., ...))

A module is imported when one of its names, listed in `__init__.pyi`, is first used. So commands
start fast, and commands that only show meshes and plans do not need the trainer's packages.
"""

from partitioning.lazy_names import attach

__getattr__, __dir__ = attach(__name__)
