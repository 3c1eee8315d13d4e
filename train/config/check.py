"""What gin files may do, checked before gin runs them.

gin files are code: they import modules and can call what those hold. Only modules below the
allowed packages may be imported, and only what is defined there may be named.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gin
from gin import config as gin_internals
from gin import config_parser

from partitioning.rules import nearest
from train.config.parse import Reference, Statement
from train.errors import ConfigError

ALLOWED_PACKAGES = ('partitioning', 'train', 'jax', 'flax', 'optax')
# Within those packages, what loads pickles, evaluates text, or touches files and these checks.
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
# Packages of T5X's gin files -> what to import in their place.
_OF_T5X = {
    't5x': "'import partitioning', 'from train.t5x import configs as utils', trainer, ...",
    'seqio': "'from train.t5x import seqio'",
    '__main__': "'from train.t5x import train_script', or eval_script",
}
# Names of T5X's modules that have another one here.
_RENAMED = {'ModelBasedPjitPartitioner': 'PjitPartitioner'}
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
                raise ConfigError(
                    f'{statement.place}: cannot import {parsed.module!r}: {error}'
                ) from error


def check_names(statements: Sequence[Statement], allow: Sequence[str] = ()) -> None:
    """Checks that every name means something, and something allowed.

    Raises:
      ConfigError: an unknown configurable, parameter or macro, with the nearest known one; a
        reference to something that an allowed module merely imports.
    """
    macros = {name for s in statements if (name := _macro_bound(s))}
    used = {r.name for s in statements for r in s.references if r.is_macro}
    modules = _dynamic_modules(statements)
    imported = {name: module for names in modules.values() for name, module in names.items()}
    for statement in statements:
        parsed = statement.parsed
        names = imported if statement.from_flag else modules.get(statement.file)
        if macro := _macro_bound(statement):
            if statement.from_flag and macro not in used:
                raise ConfigError(
                    f'{statement.place}: no gin file uses a macro {macro!r}.{nearest(macro, used)}'
                )
        elif isinstance(parsed, config_parser.BindingStatement):
            target = _resolve(parsed.selector, names, statement, allow)
            _check_parameter(target, parsed, statement)
        elif isinstance(parsed, config_parser.BlockDeclaration):
            _resolve(parsed.selector, names, statement, allow)
        for reference in statement.references:
            _check_reference(reference, names, statement, macros, allow)
    _check_scopes(statements, own_code=bool(allow))
    _check_required({m: s for s in statements if (m := _macro_bound(s))}, used)


def check_complete(configurable: Callable[..., Any]) -> None:
    """Checks that every parameter of a configurable that needs a value has one.

    Raises:
      ConfigError: with the names of those that have none.
    """
    parameters = inspect.signature(configurable).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    bound = gin.get_bindings(configurable, resolve_references=False)
    missing = [name for name in needed if name not in bound]
    if missing:
        names = ', '.join(f'{configurable.__name__}.{name}' for name in missing)
        raise ConfigError(
            f'no value for {names}: include a gin file that sets it, as those of configs/ do'
        )


def _allowed(module: str, allow: Sequence[str]) -> bool:
    packages = (*ALLOWED_PACKAGES, *allow)
    return any(module == p or module.startswith(f'{p}.') for p in packages)


def _refusal(statement: Statement, what: str, module: str) -> ConfigError:
    package = module.split('.')[0]
    if package in _OF_T5X:
        return ConfigError(
            f"{statement.place}: {what} is refused: T5X's names are in train.t5x. Write "
            f'{_OF_T5X[package]}; configs/t5x/MIGRATION.md has every name'
        )
    return ConfigError(
        f'{statement.place}: {what} is refused: gin files run code, and only modules under '
        f'{", ".join(ALLOWED_PACKAGES)} are allowed. If you trust it, add --gin_allow={package}'
    )


def _macro_bound(statement: Statement) -> str | None:
    """The macro that a statement gives a value: `NAME = 1`, or `NAME/macro.value = 1`."""
    parsed = statement.parsed
    if not isinstance(parsed, config_parser.BindingStatement):
        return None
    if parsed.selector in ('macro', 'gin.macro'):
        return parsed.scope
    if parsed.arg_name:
        return None
    return f'{parsed.scope}/{parsed.selector}' if parsed.scope else parsed.selector


def _check_scopes(statements: Iterable[Statement], own_code: bool) -> None:
    """Every binding is in a scope that some reference enters: in another it would do nothing.

    gin keeps a scope in all that is called inside it, so the scope of a reference and those around
    it take bindings of anything.

    Args:
      statements: those of all files.
      own_code: modules of the user's own may enter scopes, too: only what is close to a scope of a
        reference is taken for an error then.
    """
    statements = list(statements)
    entered = {
        '/'.join(parts[:n])
        for statement in statements
        for reference in statement.references
        # What a macro stands for is called in a scope of the macro's name.
        for parts in [reference.name.split('/')[: None if reference.is_macro else -1]]
        for n in range(1, len(parts) + 1)
    }
    for statement in statements:
        parsed = statement.parsed
        scope = getattr(parsed, 'scope', None)
        if not scope or scope in entered or _macro_bound(statement):
            continue
        hint = nearest(scope, entered)
        if hint or not own_code:
            raise ConfigError(
                f'{statement.place}: no reference enters the scope {scope!r}, so nothing in it '
                f'would be used.{hint} A value @{scope}/{parsed.selector}() enters it'
            )


def _check_required(last: Mapping[str, Statement], used: Iterable[str]) -> None:
    """No macro that is used is left as `NAME = %gin.REQUIRED`.

    Args:
      last: the statement of each macro that wins.
      used: macros that have a reference.
    """
    for macro, statement in last.items():
        if macro in used and any(r.name == 'gin.REQUIRED' for r in statement.references):
            raise ConfigError(
                f'{statement.place}: {macro} needs a value: add --gin.{macro}=... or a line '
                f'{macro} = ... behind this one'
            )


def dynamic_imports(statements: Iterable[Statement]) -> dict[str, Statement]:
    """What files with dynamic registration import, by the names it has there."""
    imports = [s for s in statements if isinstance(s.parsed, config_parser.ImportStatement)]
    dynamic = {s.file for s in imports if s.parsed.module == _DYNAMIC_REGISTRATION}
    return {
        s.parsed.bound_name(): s
        for s in imports
        if s.file in dynamic and s.parsed.module != _DYNAMIC_REGISTRATION
    }


def _dynamic_modules(statements: Iterable[Statement]) -> dict[str, dict[str, str]]:
    """For each file with dynamic registration: name in the file -> module.

    Raises:
      ConfigError: a name that stands for two modules.
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


def _resolve(
    selector: str, modules: dict[str, str] | None, statement: Statement, allow: Sequence[str]
) -> Any:
    """What a selector names: a registered configurable, or (in a file with dynamic registration,
    which has `modules`) a member of an imported module."""
    if selector in _GIN_OWN:
        return None
    head, _, rest = selector.partition('.')
    registered = gin_internals._REGISTRY.matching_selectors(selector)
    # A flag stands in no file: what is registered comes before what the files import.
    by_registry = statement.from_flag and (registered or head not in (modules or {}))
    if modules is not None and not by_registry:
        if head not in modules:
            raise ConfigError(
                f'{statement.place}: {head!r} is not imported: with dynamic registration a file '
                f'names what it imports itself.{nearest(head, modules)}'
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
    else:
        matches = registered
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
    if _runs_code(found, origin):
        raise ConfigError(
            f'{statement.place}: {selector!r} of {origin} is refused: it can run code or change '
            'files that a configuration names'
        )
    return found


def _runs_code(found: Any, origin: str) -> bool:
    if any(origin == m or origin.startswith(f'{m}.') for m in REFUSED_MODULES):
        return True
    return origin.startswith(('jax.numpy', 'jax._src.numpy')) and (
        getattr(found, '__name__', None) in REFUSED_NAMES
    )


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
    modules: dict[str, str] | None,
    statement: Statement,
    macros: set[str],
    allow: Sequence[str],
) -> None:
    if not reference.is_macro:
        _resolve(reference.selector, modules, statement, allow)
        return
    name = reference.name
    if name in macros or gin_internals._CONSTANTS.matching_selectors(name):
        return
    raise ConfigError(
        f'{statement.place}: %{name} has no value.{nearest(name, macros)} Add --gin.{name}=... or '
        f'a line {name} = ... to a gin file'
    )
