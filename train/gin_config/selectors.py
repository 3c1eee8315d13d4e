"""What a name in a gin file stands for, and whether a gin file may use it.

gin files are code: they import modules and call what they name. They may only use names on a list:
names.ini, and what modules of the user register. A name is compared with the list as text, so
nothing is imported, and no attribute is read, that is not on the list.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any

from gin import config as gin_internals

from partitioning.rules import nearest
from train.errors import ConfigError
from train.gin_config.names import BY_MODULE
from train.gin_config.parse import Statement

# Packages that T5X's gin files import -> what to write instead.
_T5X_IMPORTS = {
    't5x': "'import partitioning', 'from train.t5x import configs as utils', trainer, ...",
    'seqio': "'from train.t5x import seqio'",
    '__main__': "'from train.t5x import train_script', or eval_script",
}
# Names that differ here -> what to write instead.
_RENAMED = {
    'partitioning.ModelBasedPjitPartitioner': 'partitioning.PjitPartitioner',
    'optax.chain': 'chain, of train.optimizers, and chain.transformations = [...]',
    'optax.named_chain': 'chain, of train.optimizers, and chain.transformations = [...]',
}
_GIN_OWN = ('macro', 'gin.macro', 'singleton', 'gin.singleton', 'gin.constant', 'constant')


def is_within(name: str, packages: Iterable[str]) -> bool:
    """Whether a module or a name belongs to one of the packages."""
    return any(name == p or name.startswith(f'{p}.') for p in packages)


def listed_names() -> set[str]:
    """The full names that gin files may use."""
    registered = {selector for selector, _ in gin_internals._REGISTRY.items()}
    return (registered - set(_GIN_OWN)) | {
        f'{module}.{name}' for module, names in BY_MODULE.items() for name in names
    }


def refusal(statement: Statement, what: str, name: str) -> ConfigError:
    """The error for a statement that uses a name that is not on the list."""
    package = name.split('.')[0]
    if package in _T5X_IMPORTS:
        return ConfigError(
            f"{statement.place}: {what} is refused: T5X's names are in train.t5x. Write "
            f'{_T5X_IMPORTS[package]}; configs/t5x/MIGRATION.md lists every name'
        )
    hint = f'{nearest(name, BY_MODULE)} If you trust it, add --gin_allow={package}'
    return ConfigError(
        f'{statement.place}: {what} is refused: gin files run code, and {name} is not on the list '
        f'of what they may use.{hint}'
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
    head, _, rest = selector.partition('.')
    matches = gin_internals._REGISTRY.matching_selectors(selector)
    # A flag belongs to no file, so registered names come before the names that the files import.
    if modules is None or (statement.from_flag and (matches or head not in modules)):
        return _registered(selector, matches, statement)
    if head not in modules:
        raise ConfigError(
            f'{statement.place}: {head!r} is not imported: a file with dynamic registration must '
            f'import every module that it names.{nearest(head, modules)}'
        )
    module, name = modules[head], f'{modules[head]}.{rest}'
    if name in _RENAMED:
        raise ConfigError(f'{statement.place}: {selector!r} differs here: write {_RENAMED[name]}')
    if name in gin_internals._REGISTRY:
        return gin_internals._REGISTRY[name].wrapped
    listed = listed_names()
    if name in listed:
        home = max((m for m in BY_MODULE if is_within(name, [m])), key=len)
        return attrgetter(name.removeprefix(f'{home}.'))(importlib.import_module(home))
    if is_within(name, allow):
        return _allowed(name, statement, allow)
    names = [other.removeprefix(f'{module}.') for other in listed if is_within(other, [module])]
    if hint := nearest(rest, names):
        raise ConfigError(f'{statement.place}: {selector!r} does not exist in {module}.{hint}')
    raise refusal(statement, repr(selector), name)


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


def _allowed(name: str, statement: Statement, allow: Sequence[str]) -> Any:
    """The function or class of an allowed package with this name, or a registered one."""
    parts, found = name.split('.'), None
    for split in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            found = importlib.import_module('.'.join(parts[:split]))
            break
    for part in parts[split:]:
        # Only modules and classes of the package are searched: other objects may have any members.
        home = found.__name__ if isinstance(found, ModuleType) else getattr(found, '__module__', '')
        inside = isinstance(found, ModuleType | type) and is_within(home, allow)
        found = getattr(found, part, None) if inside else None
    if isinstance(found, ModuleType) or not callable(found):
        raise ConfigError(f'{statement.place}: {name!r} is not a function or class')
    if inspect.getattr_static(type(found), '__getattr__', None) is not None:
        raise ConfigError(f'{statement.place}: {name!r} is an object with arbitrary attributes')
    origin = getattr(found, '__module__', None) or type(found).__module__
    if not is_within(origin, allow) and gin_internals._inverse_lookup(found) is None:
        raise refusal(statement, f'{name!r}, which belongs to {origin!r},', origin)
    return found


def _known() -> set[str]:
    """Returns the names of configurables as people write them: their last parts."""
    return {
        '.'.join(selector.split('.')[-n:])
        for selector, _ in gin_internals._REGISTRY.items()
        for n in (1, 2, 9)
    }
