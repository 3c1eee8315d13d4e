"""Checks of gin statements before gin runs any of them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gin import config as gin_internals, config_parser

from partitioning.rules import nearest
from train.errors import ConfigError
from train.gin_config.parse import Reference, Statement
from train.gin_config.selectors import is_within, listed_names, refusal, resolve


def check_imports(statements: Iterable[Statement], allow: Sequence[str] = ()) -> None:
    """Refuses imports of modules without listed names. This check itself imports nothing.

    Args:
      statements: the statements of all files and flags.
      allow: additional packages that the user allows.

    Raises:
      ConfigError: if an import is refused. The message names the flag that allows it.
    """
    listed = listed_names()
    for statement in _imports(statements):
        module = statement.parsed.module
        if not is_within(module, allow) and not any(is_within(name, [module]) for name in listed):
            raise refusal(statement, f'import of {module!r}', module)


def import_modules(statements: Iterable[Statement]) -> None:
    """Imports the modules that checked statements name, which registers their configurables.

    Raises:
      ConfigError: if a module cannot be imported.
    """
    for statement in _imports(statements):
        module = statement.parsed.module
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f'{statement.place}: cannot import {module!r}: {error}') from error


def _imports(statements: Iterable[Statement]) -> list[Statement]:
    """The statements that import modules."""
    imports = [s for s in statements if isinstance(s.parsed, config_parser.ImportStatement)]
    return [s for s in imports if not s.is_dynamic]


def check_names(statements: Sequence[Statement], allow: Sequence[str] = ()) -> None:
    """Checks that every name exists and that gin files may use it.

    Args:
      statements: the statements of all files and flags.
      allow: additional packages that the user allows.

    Raises:
      ConfigError: if a configurable, parameter, macro or scope is unknown, a macro has no value, or
        a name is not on the list of names.
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
            _check_reference(reference, names, statement, macros, macros - used, allow)
    _check_scopes(statements, own_code=bool(allow))
    _check_required({m: s for s in statements if (m := _bound_macro(s))}, used)


def dynamic_imports(statements: Iterable[Statement]) -> dict[str, Statement]:
    """Returns the imports of files with dynamic registration, by the name that each binds."""
    files = {s.file for s in statements if s.is_dynamic}
    return {s.parsed.bound_name(): s for s in _imports(statements) if s.file in files}


def _dynamic_modules(statements: Iterable[Statement]) -> dict[str, dict[str, str]]:
    """For each file with dynamic registration, a mapping from names in the file to modules.

    Raises:
      ConfigError: if a file uses one name for two modules.
    """
    modules: dict[str, dict[str, str]] = {s.file: {} for s in statements if s.is_dynamic}
    for statement in _imports(statements):
        parsed, names = statement.parsed, modules.get(statement.file, {})
        whole = parsed.is_from or parsed.alias
        module = parsed.module if whole else parsed.module.split('.')[0]
        if names.setdefault(bound := parsed.bound_name(), module) != module:
            raise ConfigError(
                f'{statement.place}: {bound!r} already stands for {names[bound]}; import '
                f'{module} under another name'
            )
    return modules


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
    name, known = parsed.arg_name, list(inspect.signature(target).parameters)
    hint = nearest(name, known) or f' It has {", ".join(known)}'
    if known == ['config']:  # of train and evaluate, whose settings have moved
        macros = {'model': 'MODEL', 'partitioner': 'PARTITIONER'}
        hint = f' Write {macros.get(name, f"TrainConfig.{name}")} = ...'
    raise ConfigError(f'{statement.place}: {parsed.selector!r} has no parameter {name!r}.{hint}')


def _check_reference(
    reference: Reference,
    modules: dict[str, str] | None,
    statement: Statement,
    macros: set[str],
    unused: set[str],
    allow: Sequence[str],
) -> None:
    """Checks that a reference names an allowed configurable or a macro with a value.

    An unknown macro may be a misspelling of one that is `unused`, but not of one in use.
    """
    if not reference.is_macro:
        resolve(reference.selector, modules, statement, allow)
        return
    name = reference.name
    if name in macros or gin_internals._CONSTANTS.matching_selectors(name):
        return
    raise ConfigError(
        f'{statement.place}: %{name} has no value.{nearest(name, unused)} Add --gin.{name}=... or '
        f'a line {name} = ... to a gin file'
    )
