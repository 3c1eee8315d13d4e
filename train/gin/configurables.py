"""The names that gin files may use, and gin's registry of what they stand for.

names.ini lists the names as text. Each is registered with gin, and its module imported, when a gin
file names it.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gin import config as gin_internals, config_parser

from train.gin.parsing import is_within

if TYPE_CHECKING:
    from partitioning import Plan


def _read(section: str) -> dict[str, list[str]]:
    parser = configparser.ConfigParser(delimiters=('=',))
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keeps upper case
    parser.read_string(Path(__file__).with_name('names.ini').read_text())
    return {module: names.split() for module, names in parser[section].items()}


REGISTERED = _read('registered')
BY_MODULE = REGISTERED | _read('by module')
# The modules of the registered names by the last part of the names, in the order of the list.
_HOMES: dict[str, list[tuple[str, str]]] = {}
for _module, _names in REGISTERED.items():
    for _name in _names:
        _HOMES.setdefault(_name.rpartition('.')[2], []).append((_module, _name))

GIN_OWN = ('macro', 'gin.macro', 'singleton', 'gin.singleton', 'gin.constant', 'constant')
# Configurables that a gin file has named by an import. A name without a module never stands for
# one of them, so the files of one run cannot make a name of another run ambiguous. If one
# run allows a package, the next run still refuses its configurables.
_BY_IMPORT: set[str] = set()


def load_plan(path: str) -> Plan:
    """Reads the plan file at `path`, for `PjitPartitioner.layout`."""
    from partitioning import Plan

    return Plan.load(path)


def register_all() -> None:
    """Registers all names of the first section of names.ini with gin."""
    for last in _HOMES:
        _register_named(last)


@functools.cache
def _register_named(last: str) -> None:
    """Registers the names of the first section of names.ini that end with `last`, once."""
    for module, name in _HOMES.get(last, ()):
        _register(module, name)


def _register(module: str, name: str) -> None:
    """Registers a function or class, unless gin has this name or the library does not have it.

    Users may have registered it under another name before. Several libraries have the same
    function under the same name: the first one counts. Unlike `gin.external_configurable`, this
    notes the module from which the written configuration of a run imports the name. The module
    where it is defined may be private.
    """
    try:
        found = attrgetter(name)(importlib.import_module(module))
    except AttributeError:
        return
    known = gin_internals._inverse_lookup(found)
    if known is None or (known.module, known.name) not in _HOMES[name.rpartition('.')[2]]:
        source = _import_of(module)
        with gin_internals.unlock_config():  # All files may have been read.
            gin_internals._make_configurable(
                found, name, module, avoid_class_mutation=True, import_source=(source, name)
            )


def _import_of(module: str) -> config_parser.ImportStatement:
    location = config_parser.Location(None, 0, None, '')
    return config_parser.ImportStatement(module, '.' in module, None, location)


def parameters_of(configurable: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a configurable; none if it is not written in Python."""
    try:
        return inspect.signature(configurable.wrapped).parameters
    except (TypeError, ValueError):
        return {}


def listed_names() -> set[str]:
    """The full names that gin files may use."""
    registered = {selector for selector, _ in gin_internals._REGISTRY.items()}
    return (registered - set(GIN_OWN) - _BY_IMPORT) | {
        f'{module}.{name}' for module, names in BY_MODULE.items() for name in names
    }


def written_names(names: Iterable[str]) -> set[str]:
    """Returns names of configurables as people write them: their last parts."""
    return {'.'.join(name.split('.')[-n:]) for name in names for n in (1, 2, 9)}


def registered_names() -> set[str]:
    """The full names of what gin files may name without importing its module.

    It does not matter which of them are registered already.
    """
    listed = {f'{module}.{name}' for module, names in REGISTERED.items() for name in names}
    return listed | {name for name, _ in gin_internals._REGISTRY.items() if name not in _BY_IMPORT}


def matches(selector: str) -> list[str]:
    """The full names of the registered configurables that a selector without imports may mean."""
    _register_named(selector.rpartition('.')[2])
    found = gin_internals._REGISTRY.matching_selectors(selector)
    return [name for name in found if name not in _BY_IMPORT or name == selector]


def register(name: str) -> Any:
    """Returns gin's record of a configurable, which it registers if gin does not know it yet.

    `name` is the full name of a listed or allowed function, class or method.
    """
    _register_named(name.rpartition('.')[2])
    if name in gin_internals._REGISTRY:
        return gin_internals._REGISTRY[name]
    home, path = _split(name)
    statement = _import_of(home)
    before = {selector for selector, _ in gin_internals._REGISTRY.items()}
    with gin_internals._parse_scope() as context:
        context._enable_dynamic_registration()
        context.process_import(statement)
        found = context.get_configurable(f'{statement.bound_name()}.{path}')
    _BY_IMPORT.update({selector for selector, _ in gin_internals._REGISTRY.items()} - before)
    return found


def _split(name: str) -> tuple[str, str]:
    """Splits a full name into its module and the path of attributes in it."""
    homes = [m for m, names in BY_MODULE.items() if name.removeprefix(f'{m}.') in names]
    if homes:
        home = max(homes, key=len)
        return home, name.removeprefix(f'{home}.')
    parts = name.split('.')
    for split in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ImportError):
            importlib.import_module(home := '.'.join(parts[:split]))
            return home, '.'.join(parts[split:])
    raise LookupError('is not in a module')


def find_allowed(name: str, allow: Sequence[str]) -> Any:
    """The function or class of an allowed package with this name.

    Raises:
      LookupError: if the name does not exist. The message continues a sentence about the name.
    """
    home, path = _split(name)
    found: Any = importlib.import_module(home)
    for part in path.split('.'):
        # Only modules and classes of the package are searched: other objects may have any members.
        origin = found.__name__ if isinstance(found, ModuleType) else found.__module__
        inside = isinstance(found, ModuleType | type) and is_within(origin, allow)
        found = getattr(found, part, None) if inside else None
        if found is None:
            break
    if isinstance(found, ModuleType) or not callable(found):
        raise LookupError('is not a function or class')
    if inspect.getattr_static(type(found), '__getattr__', None) is not None:
        raise LookupError('is an object with arbitrary attributes')
    return found


def foreign_origin(found: Any, allow: Sequence[str]) -> str | None:
    """The module of an object that is outside the allowed packages and unknown to gin."""
    register_all()
    origin = getattr(found, '__module__', None) or type(found).__module__
    foreign = not is_within(origin, allow) and gin_internals._inverse_lookup(found) is None
    return origin if foreign else None
