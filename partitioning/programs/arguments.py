"""The arguments of a partitioned function, by the names that messages give them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from partitioning.rules import nearest

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def positions(indices: Sequence[int], count: int) -> set[int]:
    """Indices of arguments, some counted from the last one, as positions in a call with `count`.

    Arguments that the call leaves out have no position.
    """
    return {i + count if i < 0 else i for i in indices if -count <= i < count}


@dataclasses.dataclass(frozen=True)
class StaticValue:
    """A static argument in the record of a trace."""

    value: Any


class Arguments:
    """What a function accepts.

    Attributes:
      function: the name of the function.
      signature: its signature, or None if Python does not know it, as for some C functions.
      positional: the names of its positional parameters.
      unlimited: whether it takes any number of positional arguments.

    Raises:
      ValueError: if `fn` cannot be called.
    """

    def __init__(self, fn: Callable[..., Any]):
        if not callable(fn):
            raise ValueError(f'the first argument of partition must be a function, not {fn!r}')
        named = fn
        while isinstance(named, functools.partial):
            named = named.func
        self.function = getattr(named, '__name__', type(named).__name__)
        self.signature: inspect.Signature | None = None
        with contextlib.suppress(TypeError, ValueError):
            self.signature = inspect.signature(fn)
        parameters = [] if self.signature is None else list(self.signature.parameters.values())
        self.positional = tuple(p.name for p in parameters if p.kind in _POSITIONAL)
        variable = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
        self.unlimited = self.signature is None or bool(variable)
        self._rest = variable[0] if variable else 'args'

    def name(self, index: int) -> str:
        """The name of the positional argument at an index."""
        if index < len(self.positional):
            return self.positional[index]
        return f'{self._rest}[{index - len(self.positional)}]'

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""
        return {self.name(i): value for i, value in enumerate(args)} | dict(kwargs)

    def call_error(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TypeError | None:
        """The error of a call that does not fit the signature, or None if it fits."""
        if self.signature is None:
            return None
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            known = self.signature.parameters
            # Annotations can be long.
            bare = inspect.Signature([p.replace(annotation=p.empty) for p in known.values()])
            text, hint = str(error), ''
            unknown = [name for name in kwargs if name not in known]
            if unknown and all(p.kind is not p.VAR_KEYWORD for p in known.values()):
                text = f'got an unexpected keyword argument {unknown[0]!r}'
                hint = nearest(unknown[0], known)
            signature = f'{self.function}{bare}'
            return TypeError(f'{self.function}() {text}; its signature is {signature}.{hint}')
        return None

    def check_indices(self, indices: int | Sequence[int], setting: str) -> tuple[int, ...]:
        """The positions that a setting names, counted from the first argument.

        Args:
          indices: one position or several; negative ones count from the last argument.
          setting: the name of the setting, such as 'donate_argnums'.

        Raises:
          ValueError: if an index is not an integer, or if the function has no such argument.
        """
        count = len(self.positional)
        indices = (indices,) if isinstance(indices, int) else tuple(indices)
        for index in indices:
            if not isinstance(index, int) or isinstance(index, bool):
                raise ValueError(
                    f'{self.function}: {setting} must be the positions of arguments, such as 0, '
                    f'not {index!r}'
                )
            if not self.unlimited and not -count <= index < count:
                listed = ', '.join(f'{name} ({i})' for i, name in enumerate(self.positional))
                raise ValueError(
                    f'{self.function}: {setting}={index} is out of range: it has {count} '
                    f'positional arguments, {listed or "none"}'
                )
        if self.unlimited:
            return tuple(indices)
        return tuple(index % count for index in indices)
