"""What a name in a gin file stands for, and whether a gin file may use it.

gin files are code: they import modules, and they can call what these modules contain. They may
import only modules of the allowed packages, and name only what is defined there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from gin import config as gin_internals

from partitioning.rules import nearest
from train.config.parse import Statement
from train.errors import ConfigError

ALLOWED_PACKAGES = ('partitioning', 'train', 'jax', 'flax', 'optax')
# Modules of these packages that load pickles, evaluate text, touch files, or define these checks.
REFUSED_MODULES = (
    'jax.experimental.serialize_executable',
    'jax._src.debugger',
    'jax._src.test_util',
    'jax.collect_profile',
    'jax.tools',
    'flax.io',
    'train.config',
    'train.checks',
    'train.__main__',
)
REFUSED_NAMES = ('load', 'save', 'savez')  # of jax.numpy
# Packages that T5X's gin files import -> what to write instead.
_T5X_IMPORTS = {
    't5x': "'import partitioning', 'from train.t5x import configs as utils', trainer, ...",
    'seqio': "'from train.t5x import seqio'",
    '__main__': "'from train.t5x import train_script', or eval_script",
}
# Names in T5X's modules that differ here.
_RENAMED = {'ModelBasedPjitPartitioner': 'PjitPartitioner'}
_GIN_OWN = ('macro', 'gin.macro', 'singleton', 'gin.singleton', 'gin.constant', 'constant')


def is_allowed(module: str, allow: Sequence[str]) -> bool:
    """Whether a gin file may use a module, given the user's own allowed packages."""
    packages = (*ALLOWED_PACKAGES, *allow)
    return any(module == p or module.startswith(f'{p}.') for p in packages)


def refusal(statement: Statement, what: str, module: str) -> ConfigError:
    """The error for a statement that uses a module outside the allowed packages."""
    package = module.split('.')[0]
    if package in _T5X_IMPORTS:
        return ConfigError(
            f"{statement.place}: {what} is refused: T5X's names are in train.t5x. Write "
            f'{_T5X_IMPORTS[package]}; configs/t5x/MIGRATION.md lists every name'
        )
    return ConfigError(
        f'{statement.place}: {what} is refused: gin files run code, and only modules under '
        f'{", ".join(ALLOWED_PACKAGES)} are allowed. If you trust it, add --gin_allow={package}'
    )


def resolve(
    selector: str, modules: Mapping[str, str] | None, statement: Statement, allow: Sequence[str]
) -> Any:
    """The object that a selector names.

    Args:
      selector: the name, without scopes.
      modules: name in the file -> imported module, if the file uses dynamic registration. Without
        it, the selector must name a registered configurable.
      statement: the statement that contains the selector.
      allow: the user's own allowed packages.

    Returns:
      The configurable, or None for one of gin's own.

    Raises:
      ConfigError: if no object or several objects have the name, or a gin file may not use it.
    """
    if selector in _GIN_OWN:
        return None
    head = selector.partition('.')[0]
    matches = gin_internals._REGISTRY.matching_selectors(selector)
    # A flag belongs to no file, so registered names come before the names that the files import.
    registered = statement.from_flag and (matches or head not in (modules or {}))
    if modules is not None and not registered:
        found = _imported(selector, modules, statement)
    else:
        found = _registered(selector, matches, statement)
    origin = getattr(found, '__module__', None) or type(found).__module__
    if not is_allowed(origin, allow):
        raise refusal(statement, f'{selector!r}, which belongs to {origin!r},', origin)
    if _runs_code(found, origin):
        raise ConfigError(
            f'{statement.place}: {selector!r} of {origin} is refused: a gin file could use it to '
            'run code or to change files'
        )
    return found


def _imported(selector: str, modules: Mapping[str, str], statement: Statement) -> Any:
    """A member of a module that the file imports."""
    head, _, rest = selector.partition('.')
    if head not in modules:
        raise ConfigError(
            f'{statement.place}: {head!r} is not imported: a file with dynamic registration must '
            f'import every module that it names.{nearest(head, modules)}'
        )
    found = _attribute(f'{modules[head]}.{rest}' if rest else modules[head])
    if found is None and rest in _RENAMED:
        raise ConfigError(
            f'{statement.place}: {selector!r} is called {_RENAMED[rest]} here: write '
            f'{head}.{_RENAMED[rest]}'
        )
    if found is None:
        members = [n for n in dir(_attribute(modules[head])) if not n.startswith('_')]
        raise ConfigError(
            f'{statement.place}: {selector!r} does not exist in {modules[head]}.'
            f'{nearest(rest, members)}'
        )
    return found


def _registered(selector: str, matches: Sequence[str], statement: Statement) -> Any:
    """The configurable that is registered under a name, given the full names that match it."""
    if not matches:
        raise ConfigError(
            f'{statement.place}: no configurable {selector!r}.{nearest(selector, _known())}'
        )
    if len(matches) > 1:
        raise ConfigError(
            f'{statement.place}: {selector!r} is ambiguous: write one of '
            f'{", ".join(sorted(matches))}'
        )
    return gin_internals._REGISTRY[matches[0]].wrapped


def _runs_code(found: Any, origin: str) -> bool:
    """Whether a configuration could run code or change files through an object of a module."""
    if any(origin == m or origin.startswith(f'{m}.') for m in REFUSED_MODULES):
        return True
    return origin.startswith(('jax.numpy', 'jax._src.numpy')) and (
        getattr(found, '__name__', None) in REFUSED_NAMES
    )


def _attribute(dotted: str) -> Any:
    """Returns the object at a dotted path, or None. Modules are imported as necessary."""
    parts = dotted.split('.')
    for split in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module('.'.join(parts[:split]))
        except ImportError:
            continue
        for name in parts[split:]:
            found = getattr(found, name, None)
        return found
    return None


def _known() -> set[str]:
    """Returns the names of configurables as people write them: the last one or two parts."""
    return {
        '.'.join(selector.split('.')[-n:])
        for selector, _ in gin_internals._REGISTRY.items()
        for n in (1, 2)
    }
