"""Classes whose `help` fits on two screens."""

import abc
import functools
import inspect


class ShortHelp(abc.ABCMeta):
    """Leaves attributes and Python's protocols out of the `help` of a class.

    The docstring of the class describes its attributes. Only `dir` of the class itself is shorter:
    `dir` of an instance is complete, and every name works.
    """

    def __dir__(cls) -> list[str]:
        fields = getattr(cls, '__dataclass_fields__', ())
        return [
            name
            for name in super().__dir__()
            if not name.startswith('__')
            and name not in fields
            and not isinstance(
                inspect.getattr_static(cls, name), property | functools.cached_property
            )
        ]
