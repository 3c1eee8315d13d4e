"""What a name in a gin file stands for, and whether a gin file may use it.

gin files are code: they import modules and call what they name. They may only use names on a list:
names.ini, and what modules of the user register. A name is compared with the list as text, so
no module outside the list is imported, and no attribute outside it is read. Names of another system
are translated to ours before the comparison.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gin import config_parser

from partitioning.spelling import nearest
from train.errors import ConfigError
from train.gin import configurables
from train.gin.configurables import BY_MODULE
from train.gin.parsing import Statement, is_within


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aliases:
    """The names of another system. The command that reads gin files decides which system that is.

    Attributes:
      packages: the packages of the system. A gin file that imports their modules imports nothing.
      names: for a module of the system, the module here that replaces it; for a function or class
        of the system, its full name here.
      scripts: for each function that files configure as `__main__.<function>`, its module here.
        `__main__` is the script that runs, so the function decides which module is meant.
      gone: for the full name of a configurable here, parameters that old files set and the system
        no longer has, each with the reason why the setting changes nothing.
      scopes: the scopes of the files. A run may leave some of them unused.
      adjust: a function of all statements that changes the configuration after they are applied.
    """

    packages: Sequence[str] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scripts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gone: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    scopes: Sequence[str] = ()
    adjust: Callable[[Sequence[Statement]], None] | None = None

    def covers(self, module: str) -> bool:
        """Whether a module belongs to one of the packages of the system."""
        return module.split('.')[0] in self.packages

    def provides(self, module: str) -> bool:
        """Whether any name of a module of the system has an equivalent here."""
        return any(f'{name}.'.startswith(f'{module}.') for name in self.names)

    def translate(self, name: str) -> str:
        """Returns the full name here for a name of the system, such as `t5x.utils.DatasetConfig`.

        A name that has no equivalent here, or is of another package, is returned unchanged.
        """
        head, _, rest = name.partition('.')
        if head == '__main__':
            script = self.scripts.get(rest.split('.')[0])
            return f'{script}.{rest}' if script else name
        parts = name.split('.')
        for length in range(len(parts), 0, -1):
            if ours := self.names.get('.'.join(parts[:length])):
                return '.'.join([ours, *parts[length:]])
        return name


NO_ALIASES = Aliases()


# Names that differ here -> what to write instead.
_RENAMED = {
    'partitioning.ModelBasedPjitPartitioner': 'partitioning.PjitPartitioner',
    'optax.chain': 'chain, of train.optimizers, and chain.transformations = [...]',
    'optax.named_chain': 'chain, of train.optimizers, and chain.transformations = [...]',
}


def refusal(statement: Statement, what: str, name: str) -> ConfigError:
    """The error for a statement that uses a name that is not on the list."""
    package = name.split('.')[0]
    hint = f'{nearest(name, BY_MODULE)} If you trust it, add --gin_allow={package}'
    return ConfigError(
        f'{statement.place}: {what} is refused: gin files run code, and {name} is not on the list '
        f'of what they may use.{hint}'
    )


class Resolver:
    """Finds the configurable that each name stands for, in the order of the statements.

    In a file with dynamic registration, the first part of a name is an import of the file. All
    other names are registered configurables, or end the full name of a configurable that
    an earlier file has named, or begin with a name that an earlier file has imported.
    """

    def __init__(
        self,
        statements: Sequence[Statement],
        allow: Sequence[str] = (),
        aliases: Aliases = NO_ALIASES,
    ) -> None:
        self.allow, self.aliases = allow, aliases
        self._dynamic = {s.file for s in statements if s.is_dynamic}
        self._imports: dict[str, dict[str, str]] = {}  # file -> name in the file -> module
        self._named: dict[str, Any] = {}  # full name as imported -> configurable
        self._found: dict[tuple[int, str], Any] = {}

    def add_import(self, statement: Statement) -> None:
        """Notes the name that an import binds.

        Raises a ConfigError if the file uses the name for another module.
        """
        parsed, names = statement.parsed, self._imports.setdefault(statement.file, {})
        whole = parsed.is_from or parsed.alias
        module = parsed.module if whole else parsed.module.split('.')[0]
        if (bound := parsed.bound_name()) == 'gin':
            raise ConfigError(f"{statement.place}: 'gin' is gin itself; import {module} as another")
        if names.setdefault(bound, module) != module:
            raise ConfigError(
                f'{statement.place}: {bound!r} already stands for {names[bound]}; import '
                f'{module} under another name'
            )

    def resolve(self, selector: str, statement: Statement) -> Any:
        """gin's record of the configurable that a selector names, or None for one of gin's own.

        Raises a ConfigError if no object or several have the name, or a gin file may not use it.
        """
        key = id(statement), selector
        if key not in self._found:
            if selector in configurables.GIN_OWN:
                self._found[key] = None
            elif statement.file in self._dynamic:
                self._found[key] = self._resolve_imported(selector, statement)
            else:
                self._found[key] = self._resolve_registered(selector, statement)
        return self._found[key]

    def _resolve_imported(self, selector: str, statement: Statement) -> Any:
        """The configurable that a name in a file with dynamic registration stands for."""
        head, _, rest = selector.partition('.')
        names = self._imports.get(statement.file, {})
        if head not in names:
            if head in self._everywhere():
                return self._resolve_registered(selector, statement)
            raise ConfigError(
                f'{statement.place}: {head!r} is not imported: a file with dynamic registration '
                f'must import every module that it names.{nearest(head, names)}'
            )
        return self._look_up(f'{names[head]}.{rest}', selector, statement)

    def _resolve_registered(self, selector: str, statement: Statement) -> Any:
        """The configurable that a name in another file, or in a flag, stands for."""
        matches = {n: c for n, c in self._named.items() if n.endswith(f'.{selector}')}
        if len({configurable.selector for configurable in matches.values()}) == 1:
            return next(iter(matches.values()))
        own = self._matches(selector)
        if len(matches) > 1 or len(own) > 1:
            raise ConfigError(
                f'{statement.place}: {selector!r} is ambiguous: write one of '
                f'{", ".join(sorted(matches or own))}'
            )
        if own:
            return self._registered(own[0])
        head, _, rest = selector.partition('.')
        names = [f'{module}.{rest}' for module in self._everywhere().get(head, ())]
        listed = configurables.listed_names()
        for name in sorted(names, key=lambda name: self.aliases.translate(name) not in listed):
            return self._look_up(name, selector, statement)
        known = configurables.written_names(configurables.registered_names())
        known |= self._everywhere().keys()
        raise ConfigError(
            f'{statement.place}: no configurable {selector!r}.{nearest(selector, known)}'
        )

    def _everywhere(self) -> dict[str, list[str]]:
        """The names that any file so far has imported -> the modules, the latest first."""
        modules: dict[str, list[str]] = {}
        for names in reversed(self._imports.values()):
            for name, module in names.items():
                modules.setdefault(name, []).append(module)
        return modules

    def _look_up(self, written: str, selector: str, statement: Statement) -> Any:
        """The configurable with a full name, in which modules of another system may occur."""
        name = self.aliases.translate(written)
        if name in _RENAMED:
            raise ConfigError(
                f'{statement.place}: {selector!r} differs here: write {_RENAMED[name]}'
            )
        if name not in configurables.listed_names():
            if not is_within(name, self.allow):
                raise self._unknown(written, selector, statement)
            try:
                allowed = configurables.find_allowed(name, self.allow)
            except LookupError as error:
                raise ConfigError(f'{statement.place}: {name!r} {error}') from error
            if origin := configurables.foreign_origin(allowed, self.allow):
                raise refusal(statement, f'{name!r}, which belongs to {origin!r},', origin)
        self._named[written] = self._registered(name)
        return self._named[written]

    def _matches(self, selector: str) -> list[str]:
        """The full names that a selector may stand for without an import."""
        return configurables.matches(selector)

    def _registered(self, name: str) -> Any:
        """gin's record of what a full name stands for."""
        return configurables.register(name)

    def _unknown(self, written: str, selector: str, statement: Statement) -> ConfigError:
        """The error for a name that is not on the list."""
        name = self.aliases.translate(written)
        home = written.rpartition('.')[0]
        names = _names_in(home, self.aliases.names)
        if not names:
            home = name.rpartition('.')[0]
            names = _names_in(home, configurables.listed_names())
        if hint := nearest(name.rpartition('.')[2], names):
            return ConfigError(f'{statement.place}: {selector!r} does not exist in {home}.{hint}')
        if self.aliases.covers(written) and not is_within(written, self.allow):
            has = f': {home} has {", ".join(sorted(names))}' if names else ''
            return ConfigError(
                f'{statement.place}: {selector!r} is {written}, which has no equivalent here{has}'
            )
        return refusal(statement, repr(selector), name)


class ListedNames(Resolver):
    """Resolves names by the list of names alone, and imports nothing.

    It finds what no list has. The record of a name has only its `selector`.
    """

    def _matches(self, selector: str) -> list[str]:
        names = configurables.registered_names()
        return [n for n in sorted(names) if f'.{n}'.endswith(f'.{selector}')][:1]

    def _registered(self, name: str) -> Any:
        return types.SimpleNamespace(selector=name)


def _names_in(module: str, names: Iterable[str]) -> list[str]:
    """The last parts of the names that belong to a module."""
    parts = [name.rpartition('.') for name in names]
    return [last for home, _, last in parts if home == module]


def is_import(statement: Statement) -> bool:
    """Whether a statement imports a module."""
    return isinstance(statement.parsed, config_parser.ImportStatement) and not statement.is_dynamic
