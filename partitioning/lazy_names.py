"""The names of a package, imported when they are first used."""

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions `__getattr__` and `__dir__` of a package.

    Type checkers read the names of a package in its `__init__.pyi`. The returned functions read the
    same file when a name is first used, so that `import` costs almost nothing, and each name is
    written once. `__all__` is the file's, or else all of its names. Subpackages are imported
    as attributes, too.

    Usage:
      __getattr__, __dir__ = attach(__name__)
    """
    folder = Path(str(sys.modules[package].__file__)).parent

    @functools.cache
    def names() -> tuple[dict[str, str], list[str]]:
        modules: dict[str, str] = {}
        public: list[str] = []
        for node in ast.parse((folder / '__init__.pyi').read_text()).body:
            if isinstance(node, ast.ImportFrom):
                modules |= {alias.name: str(node.module) for alias in node.names}
            elif isinstance(node, ast.Assign):
                public = ast.literal_eval(node.value)
        return modules, public or sorted(modules)

    def find(name: str) -> Any:
        modules, public = names()
        if name == '__all__':
            return public
        if name in modules:
            value = getattr(importlib.import_module(modules[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        is_module = (folder / name / '__init__.py').exists() or (folder / f'{name}.py').exists()
        if name and is_module:  # gin asks for the name ''
            return importlib.import_module(f'{package}.{name}')
        raise AttributeError(f'module {package!r} has no attribute {name!r}')

    return find, lambda: sorted({*vars(sys.modules[package]), *names()[0]})
