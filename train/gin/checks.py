"""Checks of gin statements before gin runs any of them."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Sequence
from typing import Any

from gin import config as gin_internals, config_parser

from partitioning.spelling import nearest
from train.errors import ConfigError
from train.gin import limits
from train.gin.configurables import listed_names, parameters_of
from train.gin.parsing import Reference, Statement, is_within
from train.gin.selectors import (
    NO_ALIASES,
    Aliases,
    ListedNames,
    Resolver,
    is_import,
    refusal,
)


def import_modules(
    statements: Sequence[Statement], allow: Sequence[str] = (), aliases: Aliases = NO_ALIASES
) -> None:
    """Imports the modules that statements name, which registers their configurables.

    If one of them has no listed names, nothing is imported. The modules of another system are not
    imported unless the user allows them. Raises a ConfigError if an import is refused, with the
    flag that allows it, or if a module cannot be imported.
    """
    _check_imports(statements, allow, aliases)
    for statement in filter(is_import, statements):
        module = statement.parsed.module
        if aliases.covers(module) and not is_within(module, allow):
            continue
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f'{statement.place}: cannot import {module!r}: {error}') from error


def _check_imports(statements: Sequence[Statement], allow: Sequence[str], aliases: Aliases) -> None:
    listed = listed_names()
    for statement in filter(is_import, statements):
        module = statement.parsed.module
        known = aliases.covers(module) or any(is_within(name, [module]) for name in listed)
        if not known and not is_within(module, allow):
            raise refusal(statement, f'import of {module!r}', module)


def check_listed(statements: Sequence[Statement], aliases: Aliases = NO_ALIASES) -> None:
    """Checks without importing anything that gin files name only what is on the list of names.

    Macros, circles and scopes are checked, too. Parameters are not, because only what is imported
    tells them. Raises a ConfigError as `import_modules` and `check_names` do.
    """
    _check_imports(statements, (), aliases)
    resolver = ListedNames(statements, (), aliases)
    _resolve_names(statements, resolver)
    _check_values(statements, resolver)


def check_names(
    statements: Sequence[Statement], allow: Sequence[str] = (), aliases: Aliases = NO_ALIASES
) -> Resolver:
    """Checks that gin files may use all names, and returns the configurables that they stand for.

    Raises a ConfigError if a configurable, parameter, macro or scope is unknown, a macro has no
    value, values need each other in a circle, or a name is not on the list of names.
    """
    resolver = Resolver(statements, allow, aliases)
    _resolve_names(statements, resolver)
    used = {r.name for s in statements for r in s.references if r.is_macro}
    defined = {s.macro for s in statements if s.macro and not s.from_flag}
    for statement in statements:
        parsed, macro = statement.parsed, statement.macro
        if macro and statement.from_flag and macro not in used | defined:
            parameters = _parameters_called(macro, statements, resolver)
            value = statement.place.partition('=')[2]
            hint = nearest(macro, used)
            if parameters:
                hint = f' Write {" or ".join(f"--gin.{name}={value}" for name in parameters)}'
            raise ConfigError(f'{statement.place}: no gin file uses the macro {macro!r}.{hint}')
        elif statement.is_binding:
            configurable = resolver.resolve(parsed.selector, statement)
            if configurable and not is_gone(configurable, parsed.arg_name, aliases):
                _check_parameter(configurable.wrapped, parsed, statement)
    _check_values(statements, resolver)
    return resolver


def _resolve_names(statements: Sequence[Statement], resolver: Resolver) -> None:
    """Finds what every name stands for. What a later entry replaces comes last."""
    for statement in statements:
        parsed = statement.parsed
        if is_import(statement):
            resolver.add_import(statement)
        elif statement.is_binding or isinstance(parsed, config_parser.BlockDeclaration):
            resolver.resolve(parsed.selector, statement)
        _resolve_references(statement.references, statement, resolver)
    for statement in statements:
        _resolve_references(statement.parsed_references, statement, resolver)


def _resolve_references(
    references: Sequence[Reference], statement: Statement, resolver: Resolver
) -> None:
    for reference in references:
        if not reference.is_macro:
            resolver.resolve(reference.selector, statement)


def _check_values(statements: Sequence[Statement], resolver: Resolver) -> None:
    """Checks that macros have values, that no value needs itself, and that scopes are entered."""
    allow, aliases = resolver.allow, resolver.aliases
    used = {r.name for s in statements for r in s.references if r.is_macro}
    last = _last_statements(statements, resolver)
    _check_macros(last, unused={s.macro for s in statements if s.macro} - used)
    _check_expansion(last, resolver)
    modules = [s.parsed.module for s in statements if is_import(s)]
    foreign = any(map(aliases.provides, modules))
    _check_scopes(statements, own_code=bool(allow), known=aliases.scopes if foreign else ())


def _parameters_called(name: str, statements: Sequence[Statement], resolver: Resolver) -> list[str]:
    """The parameters with a name, such as `TextFiles.holdout_percent`, of what a run configures.

    `name` may be in capitals, as macros are.
    """
    written = {r.selector: s for s in statements for r in s.references if not r.is_macro}
    written |= {s.parsed.selector: s for s in statements if s.is_binding}
    found = list[str]()
    for selector, statement in written.items():
        configurable = resolver.resolve(selector, statement)
        if configurable is None:
            continue
        known = parameters_of(configurable)
        found += [f'{selector}.{one}' for one in (name, name.lower()) if one in known][:1]
    return found


def is_gone(configurable: Any, parameter: str, aliases: Aliases) -> str | None:
    """Returns why a parameter that the other system no longer has changes nothing, or None."""
    return aliases.gone.get(configurable.selector, {}).get(parameter)


# The statements that no later one overrides, by (macro,) or by (scope, name, parameter).
_Last = dict[tuple[str, ...], Statement]


def _last_statements(statements: Sequence[Statement], resolver: Resolver) -> _Last:
    last: _Last = {}
    for statement in statements:
        if statement.macro:
            last[(statement.macro,)] = statement
        elif statement.is_binding:
            parsed = statement.parsed
            name = _name(parsed.selector, statement, resolver)
            last[parsed.scope, name, parsed.arg_name] = statement
    return last


def _name(selector: str, statement: Statement, resolver: Resolver) -> str:
    configurable = resolver.resolve(selector, statement)
    return configurable.selector if configurable else selector


def _check_expansion(last: _Last, resolver: Resolver) -> None:
    """Checks that no value needs itself, and what values become if calls are replaced as well."""
    expansion = limits.Expansion()
    for key, statement in last.items():
        node = f'%{key[0]}' if len(key) == 1 else '@' + '/'.join(filter(None, key[:2]))
        needs: list[str] = []
        for reference in statement.references:
            if reference.is_macro:
                needs.append(f'%{reference.name}')
            elif reference.evaluate:
                scope = reference.name.rpartition('/')[0]
                name = _name(reference.selector, statement, resolver)
                needs.append('@' + '/'.join(filter(None, (scope, name))))
        size = limits.count_values(statement.parsed.value)
        expansion.add(node, size, needs, statement.place)
    expansion.check()


def _check_macros(last: _Last, unused: set[str]) -> None:
    """Checks that every macro in use has a value. One error names all that lack one.

    `unused` are macros that no value contains. One of them may be a misspelling.
    """
    missing: dict[str, Statement] = {}
    for statement in last.values():
        for reference in statement.references:
            name = reference.name
            known = (name,) in last or gin_internals._CONSTANTS.matching_selectors(name)
            if reference.is_macro and not known:
                if hint := nearest(name, unused):
                    raise _no_value(name, statement, hint)
                missing.setdefault(name, statement)
        required = any(reference.name == 'gin.REQUIRED' for reference in statement.references)
        if required and statement.macro:
            missing[statement.macro] = statement
    if len(missing) > 1:
        flags = ' '.join(f'--gin.{name}=...' for name in missing)
        place = next(iter(missing.values())).place
        raise ConfigError(f'{place}: {len(missing)} settings need values: add {flags}')
    for name, statement in missing.items():
        if statement.macro != name:
            raise _no_value(name, statement)
        raise ConfigError(
            f'{statement.place}: {name} needs a value: add --gin.{name}=... or a later line '
            f'{name} = ...'
        )


def _no_value(name: str, statement: Statement, hint: str = '') -> ConfigError:
    return ConfigError(
        f'{statement.place}: %{name} has no value.{hint} Add --gin.{name}=... or a line '
        f'{name} = ... to a gin file'
    )


def _check_scopes(
    statements: Sequence[Statement], own_code: bool, known: Sequence[str] = ()
) -> None:
    """Checks that a reference enters the scope of every binding; other bindings have no effect.

    A scope stays active in everything that is called inside it. The scope of a reference and its
    enclosing scopes may therefore contain bindings of any configurable.

    Args:
      own_code: whether the user's own modules are imported. They may enter scopes too, so an unused
        scope is then an error only if its name is close to one that is used.
      known: scopes that need not be used.
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
        if not scope or scope in entered or scope in known or statement.macro:
            continue
        hint = nearest(scope, entered)
        if hint or not own_code:
            raise ConfigError(
                f'{statement.place}: scope {scope!r} is never used.{hint} To use it, write a value '
                f'as @{scope}/{parsed.selector}()'
            )


def _check_parameter(
    target: Any, parsed: config_parser.BindingStatement, statement: Statement
) -> None:
    """Checks that a configurable has the parameter that a binding sets."""
    name, parameters = parsed.arg_name, inspect.signature(target).parameters
    declared = _declared_keywords(target)
    known = [p.name for p in parameters.values() if not declared or p.kind is not p.VAR_KEYWORD]
    if name in (known := [*known, *declared]):
        return
    if not declared and gin_internals._might_have_parameter(target, name):
        return
    hint = nearest(name, known) or f' It has {", ".join(known)}'
    if known == ['config']:  # of train and evaluate, whose settings have moved
        macros = {'model': 'MODEL', 'partitioner': 'PARTITIONER'}
        hint = f' Write {macros.get(name, f"TrainConfig.{name}")} = ...'
    raise ConfigError(f'{statement.place}: {parsed.selector!r} has no parameter {name!r}.{hint}')


def _declared_keywords(target: Any) -> dict[str, Any]:
    """The keyword arguments that a signature takes as `**settings: Unpack[SomeTypedDict]`."""
    function: Any = vars(target).get('__init__') if isinstance(target, type) else target
    if function is None:
        return {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD and 'Unpack[' in str(parameter.annotation):
            hint = typing.get_type_hints(function)[parameter.name]
            return dict(typing.get_args(hint)[0].__annotations__)
    return {}
