"""The boundary of a partitioned function: its arguments and results, with their layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from partitioning.programs.arguments import Arguments, positions
from partitioning.programs.tree_matching import KeyPath, pair_leaves


@dataclasses.dataclass(frozen=True)
class Boundary:
    """The layouts of the arguments and the result of a partitioned function.

    Attributes:
      arguments: the arguments of the function.
      mesh: the mesh.
      in_shardings: a tuple with one entry per argument that is not static, or one sharding for all.
        None is the layout that an argument has.
      out_shardings: the shardings of the result.
      static: the positions of static arguments.
      donated: the positions of donated arguments.
    """

    arguments: Arguments
    mesh: Mesh
    in_shardings: Any
    out_shardings: Any
    static: tuple[int, ...]
    donated: tuple[int, ...]

    def dynamic_indices(self, count: int) -> list[int]:
        """The positions of the arguments that are not static, in a call with `count` arguments."""
        static = positions(self.static, count)
        return [i for i in range(count) if i not in static]

    def dynamic(self, args: Sequence[Any]) -> list[Argument]:
        """The arguments of a call that are not static, with their entries."""
        indices = self.dynamic_indices(len(args))
        entries = self.in_shardings
        if not isinstance(entries, tuple):
            entries = (entries,) * len(indices)
        return [
            Argument(i, self.arguments.name(i), args[i], entry)
            for i, entry in zip(indices, entries, strict=False)
        ]


class Argument(NamedTuple):
    """One argument of a call, with its entry in in_axis_resources."""

    position: int
    name: str
    value: Any
    entry: Any

    def pairs(self, *, static_fields: bool = False) -> Iterator[tuple[KeyPath, Any, Any]]:
        """The path of each array in the argument, its sharding, and the array.

        Args:
          static_fields: whether the static fields of the entry must be those of the argument. The
            methods of partitioned functions adapt them, so usually they do not count.

        Raises:
          TreeMismatchError: where the structures differ.
        """
        return pair_leaves(self.entry, self.value, prefix=True, static_fields=static_fields)
