"""Translates names of another system, such as T5X, in gin files to the names of this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from train.gin.parsing import Statement


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
