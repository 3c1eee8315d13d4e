"""A call of a jitted function that no partitioner knows, and the same call on another mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshwright.calls.held import ON_HOST, ArgumentRole, HeldArray, named_role, row_of_array
from meshwright.calls.keras_models import state_paths
from meshwright.calls.moved_jaxpr import Move, in_place_of_callers
from meshwright.calls.other_meshes import finest_mesh, on_one_mesh, spec_on
from meshwright.calls.roles import find_roles
from meshwright.jax_private import TracedCall, read_trace, trace_again, trace_while
from partitioning.rules import LogicalAxisRules, MeshLike, as_tuple, describe_axes, spec_str
from partitioning.state import key_names

_PART_OF_NAME = re.compile(r'(?P<dot>\.?)(?P<name>[A-Za-z_]\w*|\d+)')
# Attributes between an array and its owner that say nothing: of variables, and of states.
_VALUES = {'value', 'raw_value'}
_STATES = {'states', 'flat_states'}


@dataclasses.dataclass(frozen=True)
class PlainCall:
    """A call of a jitted function: a `Call` that is laid out as its arguments are.

    Attributes:
      fn: the function, or its trace.
      args: its arguments, abstract or not; none for a trace.
      moved_to: the mesh in place of the function's own mesh.

    Raises:
      ValueError: if the function is not jitted, or names no mesh.
    """

    fn: Any
    args: tuple[Any, ...]
    moved_to: Mesh | None = None

    def __post_init__(self) -> None:
        if isinstance(self.fn, jax.stages.Traced):
            if self.args:
                raise ValueError('a traced function has its arguments already: pass no others')
        elif not hasattr(self.fn, 'trace') and not hasattr(self.fn, 'lower'):
            name = getattr(self.fn, '__name__', repr(self.fn))
            raise ValueError(
                f'{name} is not jitted: pass jax.jit({name}), or what nnx.jit, eqx.filter_jit or '
                'partitioner.partition returned'
            )

    @property
    def name(self) -> str:
        """The name of the function."""
        return self._traced.name

    @property
    def mesh(self) -> Mesh:
        """The mesh that it runs on."""
        return self.moved_to or self.mesh_source

    @functools.cached_property
    def mesh_source(self) -> Any:
        """The mesh of the function and its arguments: the largest and finest that they name."""
        meshes = self._traced.meshes
        if not meshes:
            raise ValueError(
                f'{self.name} has no mesh: neither the function nor its arguments have a '
                'NamedSharding. Give the arguments shardings, such as '
                "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P('data')))"
            )
        return finest_mesh(meshes)

    @property
    def rules(self) -> LogicalAxisRules:
        """A plain function has no rules."""
        return ()

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes of the first dimension of the batch."""
        roles = find_roles(self._traced.jaxpr, self._paths)
        for role, sharding in zip(roles, self._traced.arguments, strict=True):
            if isinstance(sharding, NamedSharding) and role == 'batch':
                return as_tuple(sharding.spec[0]) if len(sharding.spec) else ()
        return ()

    def argument_name(self, index: int) -> str:
        """The name of an argument."""
        names = _parameter_names(self.fn, len(self.args))
        return names[index]

    @functools.cached_property
    def _traced(self) -> TracedCall:
        """The trace of the function on its own mesh."""
        if isinstance(self.fn, jax.stages.Traced):
            return read_trace(self.fn)
        if hasattr(self.fn, 'trace'):
            traced = self.fn.trace(*self.args)
            if isinstance(traced, jax.stages.Traced):
                return on_one_mesh(read_trace(traced))
        with _structs_as_arrays():
            return on_one_mesh(trace_while(lambda: self.fn.lower(*self.args)))

    def trace(self) -> TracedCall:
        """Traces the function."""
        return self._traced if self.moved_to is None else self._moved

    @functools.cached_property
    def _moved(self) -> TracedCall:
        assert self.moved_to is not None
        move = Move(self.moved_to)
        with in_place_of_callers(self.moved_to):
            return trace_again(self._traced, move.function(self._traced.jaxpr), move.placed)

    def held(self, traced: TracedCall) -> tuple[HeldArray, ...]:
        """The arrays of the arguments."""
        return list_held(traced, self.mesh, self._paths)

    @functools.cached_property
    def _paths(self) -> list[tuple[str, ...]]:
        paths = user_paths(self.fn, self.args, self._traced) or jax_paths(self._traced)
        trainer = getattr(inspect.unwrap(self.fn), '__self__', None)
        return state_paths(trainer, paths, self._traced) or paths

    def with_args(self, args: tuple[Any, ...]) -> Self:
        """The call with other arguments."""
        return dataclasses.replace(self, args=args)

    def on(self, mesh: Mesh, *, with_options: bool = True) -> Self:
        """The call on another mesh with the same axes, in place of the function's own.

        Raises:
          ValueError: if the mesh has other axes, or if the function depends on their sizes.
        """
        own = self.mesh_source
        if own.axis_names != mesh.axis_names:
            raise ValueError(
                f'{self.name} uses the mesh axes {own.axis_names}, not {mesh.axis_names}'
            )
        return dataclasses.replace(self, moved_to=mesh)


def list_held(
    traced: TracedCall, mesh: MeshLike, paths: Sequence[tuple[str, ...]] | None = None
) -> tuple[HeldArray, ...]:
    """The arrays of the arguments of a traced function that no partitioner knows.

    Args:
      traced: the function.
      mesh: the mesh.
      paths: the path of each array, by default from the names that jax gives them.
    """
    paths = jax_paths(traced) if paths is None else paths
    roles = find_roles(traced.jaxpr, paths)
    found = zip(paths, traced.jaxpr.in_avals, traced.arguments, roles, strict=True)
    return tuple(hold(path, aval, sharding, mesh, role) for path, aval, sharding, role in found)


def hold(
    path: tuple[str, ...],
    aval: Any,
    sharding: Any,
    mesh: MeshLike,
    role: ArgumentRole | None = None,
    noun: str = 'argument',
) -> HeldArray:
    """An array of an argument or a result, from its type and its sharding.

    Args:
      path: its path.
      aval: its type.
      sharding: its sharding, or None.
      mesh: the mesh.
      role: what it is for, by default by the names in its path.
      noun: 'argument' or 'result', for its reasons.
    """
    role = role or named_role(path, aval)
    stated = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    spec = spec_on(sharding, mesh) if isinstance(sharding, NamedSharding) else stated
    why = 'nothing lays it out'
    if isinstance(sharding, Sharding):
        why = 'its PartitionSpec has no axis'
        if any(stated):
            why = f'the {noun} is laid out by {spec_str(stated)}'
    if spec is None:
        why += f' on {describe_axes(sharding.mesh)}'
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    planned = role if role in ('parameters', 'optimizer') else 'other'
    path_str = '/'.join(path)
    row = row_of_array(path_str, struct, spec or PartitionSpec(), mesh, why, None, planned)
    if spec is None:
        row = row._replace(shard_shape=tuple(sharding.shard_shape(aval.shape)))
    on_host = getattr(sharding, 'memory_kind', None) in ON_HOST
    return HeldArray(row=row, role=role, nbytes=0 if on_host else row.bytes_per_device)


def user_paths(fn: Any, args: Sequence[Any], traced: TracedCall) -> list[tuple[str, ...]] | None:
    """The path of each array by the user's names; None if the order of the arrays is not theirs."""
    found = []
    names = _parameter_names(fn, len(args))
    for name, arg in zip(names, args, strict=True):
        for path, x in jax.tree_util.tree_flatten_with_path(arg)[0]:
            if isinstance(getattr(x, 'shape', None), tuple) and hasattr(x, 'dtype'):
                attributes = [isinstance(key, jax.tree_util.GetAttrKey) for key in path]
                parts = _own_parts([*zip(key_names(path), attributes, strict=True)])
                found.append(((name, *parts), tuple(x.shape), x.dtype))
    types = [(aval.shape, aval.dtype) for aval in traced.jaxpr.in_avals]
    same = [(shape, dtype) for _, shape, dtype in found] == types
    return [path for path, *_ in found] if same else None


def jax_paths(traced: TracedCall) -> list[tuple[str, ...]]:
    """The path of each array by the name that jax gives it: "state.params['w']"."""
    return [parts_of_name(name) for name in traced.argument_names]


def parts_of_name(name: str) -> tuple[str, ...]:
    """The path in a name of jax: ('state', 'params', 'w') in "state.params['w']"."""
    return _own_parts([(part['name'], bool(part['dot'])) for part in _PART_OF_NAME.finditer(name)])


def _own_parts(parts: Sequence[tuple[str, bool]]) -> tuple[str, ...]:
    """The names of a path that the user chose: a key ['value'] stays, an attribute .value goes.

    Args:
      parts: each name, and whether it is the name of an attribute.
    """
    last = len(parts) - 1
    return tuple(
        name
        for i, (name, is_attribute) in enumerate(parts)
        if not is_attribute or (name not in _STATES and (name not in _VALUES or i < last))
    )


def _parameter_names(fn: Any, count: int) -> list[str]:
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else f'args[{i}]' for i in range(count)]


@contextlib.contextmanager
def _structs_as_arrays() -> Iterator[None]:
    """Lets `eqx.filter_jit` take ShapeDtypeStructs as arrays; does nothing without equinox.

    It makes a constant of everything that is no array, abstract arguments included.
    """
    module: Any = sys.modules.get('equinox._jit')
    is_array = getattr(module, 'is_array', None)
    if is_array is None:
        yield
        return
    module.is_array = lambda x: is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
    try:
        yield
    finally:
        module.is_array = is_array
