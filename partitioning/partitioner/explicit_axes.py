"""Functions over Explicit mesh axes whose layers do not say how their results are sharded.

Over Explicit axes, jax asks an operation for an `out_sharding` if its inputs leave several layouts
open, as in an Embed whose table and tokens are both sharded. Most layers of flax pass none. Such a
function is traced over Auto axes, where XLA chooses these layouts. Its arguments and results keep
their Explicit types.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from partitioning.partitioner.trace_errors import needs_explicit_axes, place_of
from partitioning.rules import as_tuple

_LOGGER = logging.getLogger(__name__)


def auto_where_needed(
    fn: Callable[..., Any], mesh: Mesh, out_shardings: Any, static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """`fn`, traced over Auto axes if it cannot be traced over the Explicit axes of the mesh.

    Args:
      fn: a function that is traced inside the mesh.
      mesh: the mesh. If it has no Explicit axes, the result is `fn`.
      out_shardings: the shardings of the result of `fn`, or a prefix of them.
      static_argnums: the positions of arguments that are not arrays.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return fn

    @functools.wraps(fn)
    def traced(*args: Any) -> Any:
        try:
            # In a jaxpr of its own, a failed attempt leaves no operations behind.
            return jax.jit(fn, static_argnums=static_argnums, inline=True)(*args)
        except Exception as error:  # jax's class of this error is not public
            if not _lacks_sharding(error):
                raise
            reason = error
        why = _explain(fn, reason)
        static = {i: args[i] for i in static_argnums if i < len(args)}
        arrays = [x for i, x in enumerate(args) if i not in static]

        def with_static(*given: Any) -> Any:
            rest = iter(given)
            return fn(*(static[i] if i in static else next(rest) for i in range(len(args))))

        over_auto = jax.sharding.auto_axes(with_static, out_sharding=_explicit_specs(out_shardings))
        try:
            result = over_auto(*arrays)
        except ValueError as error:
            if not needs_explicit_axes(error):
                raise
            raise ValueError(
                f'{why} there. The function cannot be traced over Auto axes instead, because it '
                f'gives an out_sharding elsewhere{place_of(error)}'
            ).with_traceback(reason.__traceback__) from None
        _LOGGER.warning(
            '%s there to keep Explicit types. Until then, the function is traced over Auto axes',
            why,
        )
        return result

    return traced


def _lacks_sharding(error: Exception) -> bool:
    """Whether jax or flax refuses an operation only because the axes are Explicit."""
    return type(error).__name__ == 'ShardingTypeError' or 'acts as an assert' in str(error)


def _explicit_specs(shardings: Any) -> Any:
    """The specs of shardings, without their Auto axes."""

    def convert(sharding: Any) -> PartitionSpec:
        if not isinstance(sharding, NamedSharding):
            return PartitionSpec()
        auto = {*sharding.mesh.abstract_mesh.auto_axes}
        entries = (as_tuple(e) for e in sharding.spec)
        return PartitionSpec(*(tuple(a for a in e if a not in auto) or None for e in entries))

    return jax.tree.map(convert, shardings)


def _explain(fn: Callable[..., Any], error: Exception) -> str:
    """Which operation needs an out_sharding, and what jax says about it."""
    name = getattr(fn, '__name__', 'the function')
    said = ' '.join(str(error).split())
    said = said if len(said) < 400 else f'{said[:400]} ...'
    return (
        f'{name}: over the Explicit axes of the mesh, an operation{place_of(error)} needs an '
        f'out_sharding. jax says: {said.rstrip(".")}. Pass out_sharding='
    )
