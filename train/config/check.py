"""What gin files may do, checked before gin runs them.

gin files are code: they import modules and can call what those hold. Only modules below the
allowed packages may be imported, and only what is defined there may be named.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from gin import config as gin_internals
from gin import config_parser

from partitioning.rules import nearest
from train.config.errors import ConfigError
from train.config.parse import Reference, Statement

ALLOWED_PACKAGES = ('partitioning', 'train', 'jax', 'flax', 'optax')
_DYNAMIC_REGISTRATION = '__gin__.dynamic_registration'
_GIN_OWN = ('macro', 'gin.macro', 'singleton', 'gin.singleton', 'gin.constant', 'constant')


def check_imports(statements: Iterable[Statement], allow: Sequence[str] = ()) -> None:
    """Refuses imports of anything outside the allowed packages. Imports nothing.

    Args:
      statements: those of all files.
      allow: packages of the user's own.

    Raises:
      ConfigError: with the flag to add.
    """
    for statement in statements:
        parsed = statement.parsed
        if not isinstance(parsed, config_parser.ImportStatement):
            continue
        if parsed.module == _DYNAMIC_REGISTRATION and parsed.is_from:
            continue
        if not _allowed(parsed.module, allow):
            raise _refusal(statement, f'import of {parsed.module!r}', parsed.module)


def import_modules(statements: Iterable[Statement]) -> None:
    """Imports the modules that (checked) statements name, so that their configurables exist.

    Raises:
      ConfigError: a module that does not exist.
    """
    for statement in statements:
        parsed = statement.parsed
        if isinstance(parsed, config_parser.ImportStatement) and not parsed.module.startswith(
            '__gin__'
        ):
            try:
                importlib.import_module(parsed.module)
            except ImportError as error:
                if _attribute(parsed.module) is None:
                    raise ConfigError(
                        f'{statement.place}: cannot import {parsed.module!r}: {error}'
                    ) from error


def check_names(statements: Sequence[Statement], allow: Sequence[str] = ()) -> None:
    """Checks that every name means something, and something allowed.

    Raises:
      ConfigError: an unknown configurable, parameter or macro, with the nearest known one; a
        reference to something that an allowed module merely imports.
    """
    macros = {s.parsed.selector for s in statements if _is_macro_binding(s)}
    used = {r.selector for s in statements for r in s.references if r.is_macro}
    modules = _dynamic_modules(statements)
    for statement in statements:
        parsed, names = statement.parsed, modules.get(statement.file, {})
        if _is_macro_binding(statement):
            if statement.from_flag and parsed.selector not in used:
                raise ConfigError(
                    f'{statement.place}: no gin file uses a macro {parsed.selector!r}.'
                    f'{nearest(parsed.selector, used)}'
                )
        elif isinstance(parsed, config_parser.BindingStatement):
            target = _resolve(parsed.selector, names, statement, allow)
            _check_parameter(target, parsed, statement)
        elif isinstance(parsed, config_parser.BlockDeclaration):
            _resolve(parsed.selector, names, statement, allow)
        for reference in statement.references:
            _check_reference(reference, names, statement, macros, allow)


def _allowed(module: str, allow: Sequence[str]) -> bool:
    packages = (*ALLOWED_PACKAGES, *allow)
    return any(module == p or module.startswith(f'{p}.') for p in packages)


def _refusal(statement: Statement, what: str, module: str) -> ConfigError:
    package = module.split('.')[0]
    return ConfigError(
        f'{statement.place}: {what} is refused: gin files run code, and only modules under '
        f'{", ".join(ALLOWED_PACKAGES)} are allowed. If you trust it, add --gin_allow={package}'
    )


def _is_macro_binding(statement: Statement) -> bool:
    parsed = statement.parsed
    return isinstance(parsed, config_parser.BindingStatement) and not parsed.arg_name


def _dynamic_modules(statements: Iterable[Statement]) -> dict[str, dict[str, str]]:
    """For each file with dynamic registration: name in the file -> module."""
    dynamic: set[str] = set()
    modules: dict[str, dict[str, str]] = {}
    for statement in statements:
        parsed = statement.parsed
        if isinstance(parsed, config_parser.ImportStatement):
            if parsed.module == _DYNAMIC_REGISTRATION:
                dynamic.add(statement.file)
            else:
                names = modules.setdefault(statement.file, {})
                whole = parsed.is_from or parsed.alias
                names[parsed.bound_name()] = parsed.module if whole else parsed.module.split('.')[0]
    return {file: names for file, names in modules.items() if file in dynamic}


def _resolve(
    selector: str, modules: dict[str, str], statement: Statement, allow: Sequence[str]
) -> Any:
    """What a selector names: a registered configurable, or a member of an imported module."""
    if selector in _GIN_OWN:
        return None
    head, _, rest = selector.partition('.')
    if head in modules:
        found = _attribute(f'{modules[head]}.{rest}' if rest else modules[head])
        if found is None:
            raise ConfigError(f'{statement.place}: {selector!r} does not exist in {modules[head]}')
    else:
        matches = gin_internals._REGISTRY.matching_selectors(selector)
        if not matches:
            raise ConfigError(
                f'{statement.place}: no configurable {selector!r}.{nearest(selector, _known())}'
            )
        if len(matches) > 1:
            raise ConfigError(
                f'{statement.place}: {selector!r} may be any of {", ".join(sorted(matches))}; '
                'write more of the name'
            )
        found = gin_internals._REGISTRY[matches[0]].wrapped
    origin = getattr(found, '__module__', None) or type(found).__module__
    if not _allowed(origin, allow):
        raise _refusal(statement, f'{selector!r}, which belongs to {origin!r},', origin)
    return found


def _attribute(dotted: str) -> Any:
    """The object at a dotted path, importing as many of its modules as it takes; None if absent."""
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
    """Names of configurables as people write them: the last part, and the last two."""
    return {
        '.'.join(selector.split('.')[-n:])
        for selector, _ in gin_internals._REGISTRY.items()
        for n in (1, 2)
    }


def _check_parameter(
    target: Any, parsed: config_parser.BindingStatement, statement: Statement
) -> None:
    if target is None:
        return
    if gin_internals._might_have_parameter(target, parsed.arg_name):
        return
    known = list(inspect.signature(target).parameters)
    raise ConfigError(
        f'{statement.place}: {parsed.selector!r} has no parameter {parsed.arg_name!r}.'
        f'{nearest(parsed.arg_name, known) or " It has " + ", ".join(known)}'
    )


def _check_reference(
    reference: Reference,
    modules: dict[str, str],
    statement: Statement,
    macros: set[str],
    allow: Sequence[str],
) -> None:
    if not reference.is_macro:
        _resolve(reference.selector, modules, statement, allow)
        return
    name = reference.selector
    if name in macros or gin_internals._CONSTANTS.matching_selectors(name):
        return
    raise ConfigError(
        f'{statement.place}: %{name} has no value.{nearest(name, macros)} Add --gin.{name}=... or '
        f'a line {name} = ... to a gin file'
    )
