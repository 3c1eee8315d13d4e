"""A trainer for any objective, which connects partitioner, data, optimizer and checkpoints.

Usage:
  from train import TrainConfig, train
  state = train(TrainConfig(model_dir='runs/mine', objective=..., task=..., ...))

`__init__.pyi` lists every name with its module, which is imported when the name is first used: so
commands start at once, and those that show meshes and plans need no packages of the trainer.
"""

import ast
import importlib
import sys
import types
from pathlib import Path
from typing import Any

_NAMES = ast.parse(Path(__file__).with_suffix('.pyi').read_text()).body
_MODULES = {a.name: n.module for n in _NAMES if isinstance(n, ast.ImportFrom) for a in n.names}
__all__ = sorted(_MODULES)


class _Package(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
        value = getattr(importlib.import_module(str(_MODULES[name])), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # `train` is the function, and not the module of the same name that contains it.
        if name != 'train' or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
