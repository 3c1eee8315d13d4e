"""Puts objects in the place of others while a script runs, also in modules that come later."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.abc import Loader, MetaPathFinder
from typing import Any, Self

from meshwright.jax_private import Replacement

# Receives a module, and returns what to replace in it.
Hook = Callable[[Any], Iterable[Replacement]]


class Replaced:
    """A context in which objects are in the place of others; they are put back at its end.

    Args:
      replacements: what to replace.
      hooks: what to replace in a module as soon as it is imported, by the name of the module.
    """

    def __init__(self, replacements: Iterable[Replacement], hooks: Mapping[str, Hook]):
        self._replacements = list(replacements)
        self._finder = _Finder({name: self._after(hook) for name, hook in hooks.items()})
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        for replacement in self._replacements:
            self._put(*replacement)
        for name, after in self._finder.hooks.items():
            if (module := sys.modules.get(name)) is not None:
                after(module)
        sys.meta_path.insert(0, self._finder)
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self._finder)
        for owner, name, value in reversed(self._originals):
            setattr(owner, name, value)

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._originals.append((owner, name, vars(owner).get(name, getattr(owner, name, None))))
        setattr(owner, name, value)

    def _after(self, hook: Hook) -> Callable[[Any], None]:
        def after(module: Any) -> None:
            for replacement in hook(module):
                self._put(*replacement)

        return after


class _Finder(MetaPathFinder):
    """Finds the modules that have a hook as Python does, and calls it when they are loaded."""

    def __init__(self, hooks: Mapping[str, Callable[[Any], None]]):
        self.hooks = hooks
        self._finding: set[str] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.hooks or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.hooks[name])
        return spec


class _Loader(Loader):
    """A loader of Python, and what to do when it has loaded a module."""

    def __init__(self, loader: Any, after: Callable[[Any], None]):
        self._loader = loader
        self._after = after

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._after(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
