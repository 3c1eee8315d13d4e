"""Layouts that arrays have inside partitioned functions and cannot have at a jit boundary.

PaddedSpecs have such layouts, and so have PartitionSpecs with UNCONSTRAINED dimensions.

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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from partitioning.constraints import lay_out
from partitioning.programs.trace_log import positions
from partitioning.rules import PaddedSpec, as_tuple, padding_problems
from partitioning.state import path_str
from partitioning.state.structures import match_by_path


def is_resource(x: Any) -> bool:
    """Whether a node of in_shardings or out_shardings is one resource."""
    return x is None or isinstance(x, PartitionSpec | PaddedSpec | Sharding)


def lay_out_inside(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_resources: Any,
    out_resources: Any,
    static_argnums: Sequence[int],
) -> Callable[..., Any]:
    """Returns `fn`, inside which arrays get the layouts that jax.jit does not accept for them.

    An array with a PaddedSpec is sharded. XLA's partitioner pads sizes that its devices do not
    divide and slices results at the end of the program: with 7 columns over 2 devices, each device
    computes 4. An array with UNCONSTRAINED dimensions keeps their layout, and gets the mesh axes of
    its other dimensions. The arguments and the result keep their shapes.

    The resources are as in `partition`; static arguments have none. The result is `fn` itself if
    no resource needs another layout inside.

    Raises:
      ValueError: if the mesh has Explicit axes and a resource is a PaddedSpec, or all resources
        have UNCONSTRAINED dimensions.
    """
    resources = jax.tree.leaves((in_resources, out_resources), is_leaf=is_resource)
    if any(isinstance(r, PaddedSpec) for r in resources):
        for problem in padding_problems(mesh):
            raise ValueError(problem.message)
    if all(inner_spec(r) is None for r in resources):
        return fn
    only_inside = all(isinstance(inner_spec(r), PartitionSpec) for r in resources)
    if only_inside and AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            'every argument and result has UNCONSTRAINED dimensions, so over Explicit mesh axes '
            'jax.jit does not know the devices: write None or mesh axes for all dimensions of one'
        )

    @functools.wraps(fn)
    def laid_out(*args: Any, **kwargs: Any) -> Any:
        placed = list(args)
        static = positions(static_argnums, len(args))
        dynamic = [i for i in range(len(args)) if i not in static]
        of_each = (
            in_resources if isinstance(in_resources, tuple) else (in_resources,) * len(dynamic)
        )
        for i, resources in zip(dynamic, of_each, strict=False):
            placed[i] = _lay_out_all(placed[i], resources, mesh, f'argument {i}')
        return _lay_out_all(fn(*placed, **kwargs), out_resources, mesh, 'the result')

    return laid_out


def inner_spec(resource: Any) -> PartitionSpec | PaddedSpec | None:
    """The layout of a resource inside functions, or None if jax.jit can take the resource."""
    spec = resource.spec if isinstance(resource, NamedSharding) else resource
    if isinstance(spec, PartitionSpec):
        return spec if PartitionSpec.UNCONSTRAINED in tuple(spec) else None
    return spec if isinstance(spec, PaddedSpec) else None


def _lay_out_all(tree: Any, resources: Any, mesh: Mesh, where: str) -> Any:
    def place(path: Any, resource: Any, below: Any) -> Any:
        spec = inner_spec(resource)
        if spec is None:
            return below
        try:
            return jax.tree.map(lambda x: lay_out(x, spec, mesh), below)
        except ValueError as error:
            at = f'{where}, {path_str(path)}' if path else where
            raise ValueError(f'{at}: {error}') from None

    return jax.tree_util.tree_map_with_path(place, resources, tree, is_leaf=is_resource)


_LOGGER = logging.getLogger(__name__)


def auto_where_needed(
    fn: Callable[..., Any], mesh: Mesh, out_shardings: Any, static_argnums: Sequence[int] = ()
) -> Callable[..., Any]:
    """`fn`, traced over Auto axes if it cannot be traced over the Explicit axes of the mesh.

    Over Auto axes, a result without a sharding in `out_shardings` is replicated. If the mesh has no
    Explicit axes, the function is returned unchanged.
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
            auto = Mesh(mesh.devices, mesh.axis_names)
            with jax.sharding.use_abstract_mesh(auto.abstract_mesh):
                # Over Auto axes, the type of an array says nothing about its layout.
                whole = PartitionSpec()
                untyped = [x if i in static else _reshard(x, whole) for i, x in enumerate(args)]
                result = fn(*untyped)
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
        leaves, treedef = jax.tree.flatten(result)
        # If they do not fit the result, jax says so later.
        found = match_by_path(out_shardings, result) or [None] * len(leaves)
        typed = [_reshard(x, _explicit_part(s)) for x, s in zip(leaves, found, strict=True)]
        return jax.tree.unflatten(treedef, typed)

    return traced


def _reshard(tree: Any, spec: PartitionSpec) -> Any:
    return jax.tree.map(lambda x: jax.sharding.reshard(x, spec), tree)


def _explicit_part(sharding: Any) -> PartitionSpec:
    """The spec of a sharding, without its Auto axes."""
    if not isinstance(sharding, NamedSharding):
        return PartitionSpec()
    auto = {*sharding.mesh.abstract_mesh.auto_axes}
    entries = map(as_tuple, sharding.spec)
    return PartitionSpec(*(tuple(a for a in axes if a not in auto) or None for axes in entries))
