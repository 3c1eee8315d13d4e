"""Functions over Explicit mesh axes whose layers do not say how their results are sharded.

Over Explicit axes, jax asks an operation for an `out_sharding` if its inputs leave several layouts
open, as in an Embed whose table and tokens are both sharded. Most layers of flax pass none. Such a
function is traced over Auto axes, where XLA chooses these layouts. Its arguments and results keep
their Explicit types.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from partitioning.programs.arguments import positions
from partitioning.rules import as_tuple
from partitioning.state.structures import match_by_path

_LOGGER = logging.getLogger(__name__)


def auto_where_needed(
    fn: Callable[..., Any], mesh: Mesh, out_shardings: Any, static_argnums: Sequence[int] = ()
) -> Callable[..., Any]:
    """`fn`, traced over Auto axes if it cannot be traced over the Explicit axes of the mesh.

    Args:
      fn: a function that is traced inside the mesh.
      mesh: the mesh. If it has no Explicit axes, the result is `fn`.
      out_shardings: the shardings of the result of `fn`, or a prefix of them. Over Auto axes, a
        result without a sharding is replicated.
      static_argnums: the positions of arguments that are not arrays.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return fn

    @functools.wraps(fn)
    def traced(*args: Any) -> Any:
        static = positions(static_argnums, len(args))
        try:
            # In a jaxpr of its own, a failed attempt leaves no operations behind.
            return jax.jit(fn, static_argnums=tuple(static), inline=True)(*args)
        except Exception as error:  # jax's class of this error is not public
            from partitioning.programs.explaining import trace_errors as explaining

            if not explaining.lacks_out_sharding(error):
                raise
            reason = error
        why = explaining.explain_lack(getattr(fn, '__name__', 'the function'), reason)
        try:
            result = _over_auto_axes(fn, args, static, mesh)
        except ValueError as error:
            if not explaining.needs_explicit_axes(error):
                raise
            raise ValueError(
                f'{why} there. The function cannot be traced over Auto axes instead, because it '
                f'gives an out_sharding elsewhere{explaining.place_of(error)}'
            ).with_traceback(reason.__traceback__) from None
        _LOGGER.warning(
            '%s there to keep Explicit types. Until then, the function is traced over Auto axes',
            why,
        )
        return _over_explicit_axes(result, out_shardings)

    return traced


def _over_auto_axes(fn: Callable[..., Any], args: Any, static: set[int], mesh: Mesh) -> Any:
    """The result of `fn` inside a mesh like `mesh` with Auto axes only."""
    with jax.sharding.use_abstract_mesh(Mesh(mesh.devices, mesh.axis_names).abstract_mesh):
        # Over Auto axes, the type of an array says nothing about its layout.
        untyped = [x if i in static else _reshard(x, PartitionSpec()) for i, x in enumerate(args)]
        return fn(*untyped)


def _over_explicit_axes(result: Any, shardings: Any) -> Any:
    """A result of `_over_auto_axes` with types that have its shardings."""
    leaves, treedef = jax.tree.flatten(result)
    # If they do not fit the result, jax says so later.
    found = match_by_path(shardings, result) or [None] * len(leaves)
    typed = [_reshard(x, _explicit_part(s)) for x, s in zip(leaves, found, strict=True)]
    return jax.tree.unflatten(treedef, typed)


def _reshard(tree: Any, spec: PartitionSpec) -> Any:
    return jax.tree.map(lambda x: jax.sharding.reshard(x, spec), tree)


def _explicit_part(sharding: Any) -> PartitionSpec:
    """The spec of a sharding, without its Auto axes."""
    if not isinstance(sharding, NamedSharding):
        return PartitionSpec()
    auto = {*sharding.mesh.abstract_mesh.auto_axes}
    entries = map(as_tuple, sharding.spec)
    return PartitionSpec(*(tuple(a for a in axes if a not in auto) or None for axes in entries))
