"""What `partition` accepts: the layouts of arguments and results, and which arguments are special.

Everything here is checked when a function is partitioned, before it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from partitioning.programs.arguments import Arguments
from partitioning.programs.inner_layouts import inner_spec, is_resource
from partitioning.rules import PaddedSpec, boundary_spec, check_definite, check_spec
from partitioning.state import path_str


def to_shardings(resources: Any, mesh: Mesh, *, allow_unconstrained: bool = False) -> Any:
    """The shardings on `mesh` of a pytree of PartitionSpecs, Shardings or None, which replicates.

    Args:
      resources: the pytree.
      mesh: the mesh.
      allow_unconstrained: whether a spec may have UNCONSTRAINED dimensions. It becomes None, with
        which jax.jit keeps or chooses the layout; `lay_out_inside` applies the rest of the spec.

    Raises:
      ValueError: if a leaf is anything else, or if the mesh cannot have a spec.
    """

    def convert(path: Any, leaf: Any) -> Sharding | None:
        if isinstance(leaf, Sharding) and inner_spec(leaf) is None:
            return leaf
        spec = leaf.spec if isinstance(leaf, NamedSharding) else boundary_spec(leaf)
        spec = PartitionSpec() if leaf is None else spec
        where = path_str(path) or 'axis resource'
        if not isinstance(spec, PartitionSpec):
            raise ValueError(
                f'{where}: a resource must be a PartitionSpec, a Sharding or None, not {leaf!r}; '
                'plan.specs has the PartitionSpecs of a state with logical axes'
            )
        check_spec(spec, mesh, where)
        if not allow_unconstrained:
            check_definite(spec, where)
        elif isinstance(inner_spec(leaf), PartitionSpec):
            return None
        if isinstance(leaf, PaddedSpec):
            check_spec(leaf.inside, mesh, where)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(convert, resources, is_leaf=is_resource)


def check_entries(arguments: Arguments, in_resources: Any, static: Sequence[int]) -> None:
    """Checks that `in_axis_resources` has an entry for each argument that is not static.

    Entries may be missing: those arguments are passed by name, in the layout that they have.

    Raises:
      ValueError: if there are more entries than arguments, or a tree where a tuple must be.
    """
    if is_resource(in_resources):
        return
    if type(in_resources) is not tuple:
        raise ValueError(
            f'{arguments.function}: in_axis_resources must be a tuple with one entry per '
            f'argument, not a {type(in_resources).__name__}; for one argument write (specs,)'
        )
    names = arguments.positional
    dynamic = [name for i, name in enumerate(names) if i not in static]
    count = len(in_resources)
    if arguments.unlimited or count <= len(dynamic):
        return
    listed = f' ({", ".join(dynamic)})' if dynamic else ''
    text = f'{arguments.function}: in_axis_resources has {count} entries, but there are '
    text += f'{len(dynamic)} positional arguments for them{listed}'
    if static:
        constants = ', '.join(arguments.name(i) for i in static)
        raise ValueError(f'{text}: a static argument ({constants}) has no entry; remove it')
    raise ValueError(f'{text}: remove {count - len(dynamic)}')


def check_not_both(arguments: Arguments, static: Sequence[int], donated: Sequence[int]) -> None:
    """Raises ValueError if an argument is both static and donated."""
    for i in donated:
        if i in static:
            raise ValueError(
                f'{arguments.function}: {arguments.name(i)} is in both static_argnums and '
                'donate_argnums, but a constant has no buffer to donate: remove one'
            )
