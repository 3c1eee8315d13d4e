"""The abstract state of an init function, traced inside a mesh if the function needs one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from partitioning.mesh import MeshConfig
from partitioning.programs.contexts import in_context
from partitioning.programs.trace_log import check_init
from partitioning.rules import MeshLike, is_count
from partitioning.suggestion.notes import rules_of


def as_mesh(mesh: Any) -> MeshLike | None:
    """The mesh of a setting: a mesh, the sizes of its axes, or what builds a mesh.

    Raises:
      ValueError: if it is none of these.
    """
    if mesh is None:
        return None
    if isinstance(mesh, MeshConfig):
        return mesh.build()
    if isinstance(mesh, Mapping) and -1 in mesh.values():
        return MeshConfig(axes=mesh).build()
    is_sizes = isinstance(mesh, Mapping) and all(map(is_count, mesh.values()))
    if not (isinstance(mesh, Mesh | AbstractMesh) or is_sizes):
        raise ValueError(
            f'mesh={_short(mesh)} must be a mesh or the size of each axis, such as '
            "{'data': 4, 'model': 2}; the arguments of an init function follow it: "
            'suggest_rules(init, mesh, key)'
        )
    return mesh


def is_init(x: Any) -> bool:
    """Whether `x` is a function and not a state; modules of Equinox and nnx are both callable."""
    nnx = sys.modules.get('flax.nnx')
    if nnx is not None and isinstance(x, nnx.Module):
        return False
    return callable(x) and jax.tree_util.all_leaves([x])


def trace_state(init: Callable[..., Any], mesh: MeshLike | None, args: tuple[Any, ...]) -> Any:
    """The state that `init(*args)` makes, with ShapeDtypeStructs for arrays and no other leaves.

    Raises:
      ValueError: if `init` takes other arguments.
    """
    name = getattr(init, '__name__', 'init')
    check_init(init, args, 'suggest_rules({}, mesh, {})')

    @functools.wraps(init)
    def arrays(*args: Any) -> Any:
        return jax.tree.map(lambda x: x if _is_array(x) else None, init(*args))

    if mesh is None:
        try:
            return jax.eval_shape(arrays, *args)
        except Exception as error:
            error.add_note(f'suggest_rules({name}, None) traced it without a mesh: pass the mesh')
            raise
    if not isinstance(mesh, Mesh | AbstractMesh):
        mesh = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    auto: Any = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return jax.eval_shape(in_context(arrays, auto, rules_of(mesh)), *args)


def _is_array(x: Any) -> bool:
    return hasattr(x, 'dtype') or isinstance(x, bool | int | float | complex)


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 60 and '\n' not in text else f'a {type(x).__name__}'
