"""Checks of donated arguments, whose buffers exist until the call and are reused by its result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from partitioning.programs.boundary import Boundary


def check_donation(boundary: Boundary, args: Sequence[Any]) -> None:
    """Checks that donated arguments exist, and that none of their arrays appears twice.

    Some versions of XLA crash if they do not.

    Raises:
      ValueError: with the first array that was deleted or that appears twice.
    """
    if not boundary.donated:
        return
    for i in boundary.donated:
        if i < len(args):
            name = boundary.arguments.name(i)
            for problem in deletion_problems(boundary, name, i, args[i]):
                raise ValueError(f'{boundary.arguments.function}: {problem}')
    for problem in _alias_problems(boundary, args):
        raise ValueError(f'{boundary.arguments.function}: {problem}')


def deletion_problems(
    boundary: Boundary, name: str, index: int | None, value: Any
) -> Iterator[str]:
    """Arrays must still have their buffers."""
    function = boundary.arguments.function
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            continue
        if not leaf.is_deleted():
            continue
        where = f'{name}{jax.tree_util.keystr(path)}'
        if index in boundary.donated:
            yield (
                f'{where} was donated to an earlier call and no longer exists: use the {name} that '
                f'{function} returned, as in `{name}, ... = {function}({name}, ...)`'
            )
        else:
            yield (
                f'{where} was deleted, or donated to another function (donate_argnums), and no '
                'longer exists: use what that function returned'
            )


def _alias_problems(boundary: Boundary, args: Sequence[Any]) -> Iterator[str]:
    """No array may appear twice if one of the two is donated."""
    seen: dict[int, tuple[str, bool]] = {}
    for i, arg in enumerate(args):
        if i in boundary.static:
            continue
        donated = i in boundary.donated
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
                continue
            where = f'{boundary.arguments.name(i)}{jax.tree_util.keystr(path)}'
            first, first_donated = seen.setdefault(id(leaf), (where, donated))
            if first != where and (donated or first_donated):
                yield (
                    f'{first} and {where} are the same array, but it can be donated only once: '
                    'copy one of them with jnp.copy'
                )
