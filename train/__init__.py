"""A trainer for any objective, which connects partitioner, data, optimizer and checkpoints.

Usage:
  from train import TrainConfig, train
  state = train(TrainConfig(model_dir='runs/mine', objective=..., task=..., ...))

`__init__.pyi` lists every name with its module, which is imported when the name is first used: so
commands start at once, and those that show meshes and plans need no packages of the trainer.
"""

from partitioning.lazy_names import attach

__getattr__, __dir__ = attach(__name__)
