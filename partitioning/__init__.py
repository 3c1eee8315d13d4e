"""Named array axes on any mesh of TPUs, GPUs or CPUs.

Usage:
  from partitioning import PjitPartitioner
  partitioner = PjitPartitioner(num_partitions=2)

`__all__` holds what programs need. The other public names of `t5x.partitioning` and the types in
the signatures can be imported from here too. `__init__.pyi` lists every name with its module, which
is imported when the name is first used.
"""

import ast
import functools
import importlib
from pathlib import Path
from typing import Any

_ROOMS = (
    *('aot', 'compat', 'constraints', 'hardware', 'layout', 'mesh'),
    *('partitioner', 'pictures', 'plan', 'programs', 'rules', 'state', 'suggestion'),
)


@functools.cache
def _names() -> tuple[dict[str, str], list[str]]:
    """The module of each name in `__init__.pyi`, and its `__all__`."""
    modules: dict[str, str] = {}
    public: list[str] = []
    for node in ast.parse(Path(__file__).with_suffix('.pyi').read_text()).body:
        if isinstance(node, ast.ImportFrom):
            modules |= dict.fromkeys((alias.name for alias in node.names), str(node.module))
        elif isinstance(node, ast.Assign):
            public = ast.literal_eval(node.value)
    return modules, public


def __getattr__(name: str) -> Any:
    modules, public = _names()
    if name == '__all__':
        return public
    if name in _ROOMS:
        return importlib.import_module(f'partitioning.{name}')
    if name not in modules:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = getattr(importlib.import_module(modules[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_names()[0]})
