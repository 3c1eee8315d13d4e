"""Checks of gin statements before gin runs any of them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gin
from gin import config as gin_internals, config_parser

from partitioning.rules import nearest
from train.config.parse import Reference, Statement
from train.config.selectors import is_allowed, refusal, resolve
from train.errors import ConfigError

_DYNAMIC_REGISTRATION = '__gin__.dynamic_registration'


def check_imports(statements: Iterable[Statement], allow: Sequence[str] = ()) -> None:
    """Refuses imports from outside the allowed packages. This check itself imports nothing.

    Args:
      statements: the statements of all files and flags.
      allow: additional packages that the user allows.

    Raises:
      ConfigError: if an import is refused. The message names the flag that allows it.
    """
    for statement in statements:
        parsed = statement.parsed
        if not isinstance(parsed, config_parser.ImportStatement):
            continue
        if parsed.module == _DYNAMIC_REGISTRATION and parsed.is_from:
            continue
        if not is_allowed(parsed.module, allow):
            raise refusal(statement, f'import of {parsed.module!r}', parsed.module)


def import_modules(statements: Iterable[Statement]) -> None:
    """Imports the modules that checked statements name, which registers their configurables.

    Raises:
      ConfigError: if a module cannot be imported.
    """
    for statement in statements:
        parsed = statement.parsed
        if isinstance(parsed, config_parser.ImportStatement) and not parsed.module.startswith(
            '__gin__'
        ):
            try:
                importlib.import_module(parsed.module)
            except ImportError as error:
                raise ConfigError(
                    f'{statement.place}: cannot import {parsed.module!r}: {error}'
                ) from error


def check_names(statements: Sequence[Statement], allow: Sequence[str] = ()) -> None:
    """Checks that every name exists and that gin files may use it.

    Args:
      statements: the statements of all files and flags.
      allow: additional packages that the user allows.

    Raises:
      ConfigError: if a configurable, parameter, macro or scope is unknown, a macro has no value, or
        a name belongs to a module outside the allowed packages.
    """
    macros = {name for s in statements if (name := _bound_macro(s))}
    used = {r.name for s in statements for r in s.references if r.is_macro}
    modules = _dynamic_modules(statements)
    imported = {name: module for names in modules.values() for name, module in names.items()}
    for statement in statements:
        parsed = statement.parsed
        names = imported if statement.from_flag else modules.get(statement.file)
        if macro := _bound_macro(statement):
            if statement.from_flag and macro not in used:
                raise ConfigError(
                    f'{statement.place}: no gin file uses the macro {macro!r}.'
                    f'{nearest(macro, used)}'
                )
        elif isinstance(parsed, config_parser.BindingStatement):
            target = resolve(parsed.selector, names, statement, allow)
            _check_parameter(target, parsed, statement)
        elif isinstance(parsed, config_parser.BlockDeclaration):
            resolve(parsed.selector, names, statement, allow)
        for reference in statement.references:
            _check_reference(reference, names, statement, macros, allow)
    _check_scopes(statements, own_code=bool(allow))
    _check_required({m: s for s in statements if (m := _bound_macro(s))}, used)


def check_complete(configurable: Callable[..., Any]) -> None:
    """Checks that the configuration has a value for every required parameter of a configurable.

    Raises:
      ConfigError: if a required parameter has no value.
    """
    parameters = inspect.signature(configurable).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    bound = gin.get_bindings(configurable, resolve_references=False)
    missing = [name for name in required if name not in bound]
    if missing:
        names = ', '.join(f'{configurable.__name__}.{name}' for name in missing)
        raise ConfigError(
            f'no value for {names}: include a gin file that sets it, such as those in configs/'
        )


def dynamic_imports(statements: Iterable[Statement]) -> dict[str, Statement]:
    """Returns the imports of files with dynamic registration, by the name that each binds."""
    imports = [s for s in statements if isinstance(s.parsed, config_parser.ImportStatement)]
    dynamic = {s.file for s in imports if s.parsed.module == _DYNAMIC_REGISTRATION}
    return {
        s.parsed.bound_name(): s
        for s in imports
        if s.file in dynamic and s.parsed.module != _DYNAMIC_REGISTRATION
    }


def _dynamic_modules(statements: Iterable[Statement]) -> dict[str, dict[str, str]]:
    """For each file with dynamic registration, a mapping from names in the file to modules.

    Raises:
      ConfigError: if a file uses one name for two modules.
    """
    dynamic: set[str] = set()
    modules: dict[str, dict[str, str]] = {}
    for statement in statements:
        parsed = statement.parsed
        if isinstance(parsed, config_parser.ImportStatement):
            if parsed.module == _DYNAMIC_REGISTRATION:
                dynamic.add(statement.file)
            else:
                names, bound = modules.setdefault(statement.file, {}), parsed.bound_name()
                whole = parsed.is_from or parsed.alias
                module = parsed.module if whole else parsed.module.split('.')[0]
                if names.setdefault(bound, module) != module:
                    raise ConfigError(
                        f'{statement.place}: {bound!r} already stands for {names[bound]}; import '
                        f'{module} under another name'
                    )
    return {file: modules.get(file, {}) for file in dynamic}


def _bound_macro(statement: Statement) -> str | None:
    """The macro to which a statement gives a value: `NAME = 1`, or `NAME/macro.value = 1`."""
    parsed = statement.parsed
    if not isinstance(parsed, config_parser.BindingStatement):
        return None
    if parsed.selector in ('macro', 'gin.macro'):
        return parsed.scope
    if parsed.arg_name:
        return None
    return f'{parsed.scope}/{parsed.selector}' if parsed.scope else parsed.selector


def _check_scopes(statements: Sequence[Statement], own_code: bool) -> None:
    """Checks that a reference enters the scope of every binding; other bindings have no effect.

    A scope stays active in everything that is called inside it. The scope of a reference and its
    enclosing scopes may therefore contain bindings of any configurable.

    Args:
      statements: the statements of all files and flags.
      own_code: whether the user's own modules are imported. They may enter scopes too, so an unused
        scope is then an error only if its name is close to one that is used.
    """
    entered = {
        '/'.join(parts[:n])
        for statement in statements
        for reference in statement.references
        # The value of a macro is called in a scope with the name of the macro.
        for parts in [reference.name.split('/')[: None if reference.is_macro else -1]]
        for n in range(1, len(parts) + 1)
    }
    for statement in statements:
        parsed = statement.parsed
        scope = getattr(parsed, 'scope', None)
        if not scope or scope in entered or _bound_macro(statement):
            continue
        hint = nearest(scope, entered)
        if hint or not own_code:
            raise ConfigError(
                f'{statement.place}: scope {scope!r} is never used.{hint} To use it, write a value '
                f'as @{scope}/{parsed.selector}()'
            )


def _check_required(last: Mapping[str, Statement], used: Iterable[str]) -> None:
    """Checks that no macro in use still has the value `%gin.REQUIRED`.

    Args:
      last: the last statement that gives each macro a value.
      used: the macros that are referenced.
    """
    for macro, statement in last.items():
        if macro in used and any(r.name == 'gin.REQUIRED' for r in statement.references):
            raise ConfigError(
                f'{statement.place}: {macro} needs a value: add --gin.{macro}=... or a later line '
                f'{macro} = ...'
            )


def _check_parameter(
    target: Any, parsed: config_parser.BindingStatement, statement: Statement
) -> None:
    """Checks that a configurable has the parameter that a binding sets."""
    if target is None or gin_internals._might_have_parameter(target, parsed.arg_name):
        return
    known = list(inspect.signature(target).parameters)
    raise ConfigError(
        f'{statement.place}: {parsed.selector!r} has no parameter {parsed.arg_name!r}.'
        f'{nearest(parsed.arg_name, known) or " It has " + ", ".join(known)}'
    )


def _check_reference(
    reference: Reference,
    modules: dict[str, str] | None,
    statement: Statement,
    macros: set[str],
    allow: Sequence[str],
) -> None:
    """Checks that a reference names an allowed configurable or a macro with a value."""
    if not reference.is_macro:
        resolve(reference.selector, modules, statement, allow)
        return
    name = reference.name
    if name in macros or gin_internals._CONSTANTS.matching_selectors(name):
        return
    raise ConfigError(
        f'{statement.place}: %{name} has no value.{nearest(name, macros)} Add --gin.{name}=... or '
        f'a line {name} = ... to a gin file'
    )
