"""Translates the names of another system, such as T5X, in gin files to the names used here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from train.gin.parsing import Statement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aliases:
    """The names of another system. The command that reads gin files decides which system that is.

    Attributes:
      packages: the packages of the system. Importing one of their modules imports nothing here.
      names: the modules of the system, each with the module here that has its names, and single
        functions and classes of the system, each with its name here.
      scripts: the functions that files configure as `__main__.<function>`, each with its module
        here. `__main__` is the script that the system runs, so the name decides which one it is.
      gone: for the full name of a configurable here, the parameters that the files bind although
        the system no longer has them, each with the reason why the setting changes nothing.
      scopes: the scopes of the files. A run may leave some of them unused.
      adjust: changes the configuration after all statements, which it receives.
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
        """Whether names of a module of the system have an equivalent here."""
        return any(f'{name}.'.startswith(f'{module}.') for name in self.names)

    def translate(self, name: str) -> str:
        """Returns our full name of a name of the system, such as `t5x.utils.DatasetConfig`.

        A name of another package, or without an equivalent, is returned unchanged.
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
