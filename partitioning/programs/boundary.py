"""The boundary of a partitioned function: its arguments and results, with their layouts.

What `partition` accepts is checked here, before the function is called. Donated arguments, whose
buffers exist until the call and are reused by its result, are checked by the first call.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from partitioning.hardware import OptionValue
from partitioning.programs.inner_layouts import inner_spec, is_resource
from partitioning.programs.trace_log import Arguments, OnRecompile, positions
from partitioning.rules import (
    LogicalAxisRules,
    PaddedSpec,
    as_tuple,
    boundary_spec,
    check_definite,
    check_spec,
    logical_to_mesh_axes,
    sharding_axes,
    spec_str,
)
from partitioning.state import path_str
from partitioning.state.structures import KeyPath, TreeMismatchError, pair_leaves
from partitioning.values import value_str


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionSettings:
    """The arguments of `BasePjitPartitioner.partition`."""

    fn: Callable[..., Any]
    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] = ()
    donate_argnums: int | Sequence[int] = ()
    on_recompile: OnRecompile = 'allow'
    compiler_options: Mapping[str, OptionValue] | None = None

    def on_any_mesh(self) -> PartitionSettings:
        """The settings with the specs of shardings in place of the shardings; all must have one."""
        return dataclasses.replace(
            self,
            in_shardings=_without_mesh(self.in_shardings),
            out_shardings=_without_mesh(self.out_shardings),
        )


@dataclasses.dataclass(frozen=True)
class Boundary:
    """The arguments and the result of a partitioned function, with their layouts on its mesh.

    `in_shardings` is a tuple with one entry per argument that is not static, or one sharding for
    all. None is the layout that an argument has. `static` and `donated` are positions of arguments.
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
    """One argument of a call, with its entry in in_shardings."""

    position: int
    name: str
    value: Any
    entry: Any

    def pairs(self, *, static_fields: bool = False) -> Iterator[tuple[KeyPath, Any, Any]]:
        """The path of each array in the argument, its sharding, and the array.

        By default, static fields may differ, because partitioned functions adapt them.

        Structures that differ are a TreeMismatchError.
        """
        return pair_leaves(self.entry, self.value, prefix=True, static_fields=static_fields)


def find_boundary(
    settings: PartitionSettings, mesh: Mesh, rules: LogicalAxisRules = ()
) -> Boundary:
    """The boundary on a mesh that settings describe; they must fit the function and the mesh."""
    arguments = Arguments(settings.fn)
    static = arguments.check_indices(settings.static_argnums, 'static_argnums')
    donated = arguments.check_indices(settings.donate_argnums, 'donate_argnums')
    for i in donated:
        if i in static:
            raise ValueError(
                f'{arguments.function}: {arguments.name(i)} is in both static_argnums and '
                'donate_argnums, but a constant has no buffer to donate: remove one'
            )
    _check_entries(arguments, settings.in_shardings, static)
    dynamic = [i for i in range(len(arguments.positional)) if i not in static]
    function = arguments.function

    def of_argument(path: KeyPath) -> str:
        if not path:
            return f'{function}: in_shardings'
        entry: int = path[0].idx
        argument = arguments.name(dynamic[entry] if entry < len(dynamic) else entry)
        return f'{function}: in_shardings[{entry}] ({argument}){_below(path[1:])}'

    def of_result(path: KeyPath) -> str:
        return f'{function}: out_shardings{_below(path)}'

    return Boundary(
        arguments=arguments,
        mesh=mesh,
        in_shardings=to_shardings(
            settings.in_shardings, mesh, allow_unconstrained=True, rules=rules, name=of_argument
        ),
        out_shardings=to_shardings(
            settings.out_shardings, mesh, allow_unconstrained=True, rules=rules, name=of_result
        ),
        static=static,
        donated=donated,
    )


def to_shardings(
    resources: Any,
    mesh: Mesh,
    *,
    allow_unconstrained: bool = False,
    rules: LogicalAxisRules = (),
    name: Callable[[KeyPath], str] | None = None,
) -> Any:
    """The shardings on `mesh` of a pytree of PartitionSpecs, Shardings or None, which replicates.

    With `allow_unconstrained`, a spec may have UNCONSTRAINED dimensions. It becomes None: jax.jit
    then keeps or chooses the layout, and `lay_out_inside` applies the rest of the spec. `name` is
    the name of a leaf in messages, and `rules` tell logical axes from axes of the mesh.

    Raises:
      ValueError: if a leaf is anything else, or if the mesh cannot have a spec.
    """

    def convert(path: Any, leaf: Any) -> Sharding | None:
        if isinstance(leaf, Sharding) and inner_spec(leaf) is None:
            return leaf
        spec = leaf.spec if isinstance(leaf, NamedSharding) else boundary_spec(leaf)
        spec = PartitionSpec() if leaf is None else spec
        where = (path_str(path) or 'axis resource') if name is None else name(path)
        if not isinstance(spec, PartitionSpec):
            raise ValueError(
                f'{where} must be a PartitionSpec, a Sharding or None, not {value_str(leaf)}'
                f'{_as_spec(leaf, mesh)}'
            )
        try:
            check_spec(spec, mesh, where)
        except ValueError as error:
            if by_rules := _of_rules(spec, rules, mesh):
                raise ValueError(f'{error}'.partition(' Write ')[0] + by_rules) from None
            raise
        if not allow_unconstrained:
            check_definite(spec, where)
        elif isinstance(inner_spec(leaf), PartitionSpec):
            return None
        if isinstance(leaf, PaddedSpec):
            check_spec(leaf.inside, mesh, where)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(
        convert, resources, is_leaf=lambda x: is_resource(x) or (x is not resources and _is_bare(x))
    )


def _below(path: KeyPath) -> str:
    return f' at {path_str(path)}' if path else ''


def _is_bare(x: Any) -> bool:
    """Whether a node is the entries of a spec without P, such as ('data', None)."""
    bare = isinstance(x, tuple | list) and any(isinstance(entry, str) for entry in x)
    return bare and all(sharding_axes(entry) or entry is None for entry in x)


def _as_spec(x: Any, mesh: Mesh) -> str:
    """What to write instead of something that is no PartitionSpec."""
    if isinstance(x, str) or _is_bare(x):
        spec = PartitionSpec(*as_tuple(x))
        if all(axis in mesh.shape for entry in as_tuple(x) for axis in sharding_axes(entry)):
            return f': write {spec_str(spec)}'
        return '; plan.specs has the PartitionSpecs of a state with logical axes'
    return ': write its .specs' if hasattr(x, 'specs') else ''


def _of_rules(spec: PartitionSpec, rules: LogicalAxisRules, mesh: Mesh) -> str:
    """What to write if a spec has logical axes of the rules for axes of the mesh, or ''."""
    entries = tuple(getattr(spec, 'partitions', spec))
    names = [axis for entry in entries for axis in sharding_axes(entry) if axis not in mesh.shape]
    if not names or not {*names} <= {rule[0] for rule in rules}:
        return ''
    try:
        shown = spec_str(boundary_spec(logical_to_mesh_axes(entries, rules, mesh=mesh)))
    except ValueError:  # of some mesh axis among the names
        return ''
    return f' {names[0]!r} is a logical axis, which constrain takes; by the rules, write {shown}'


def _check_entries(arguments: Arguments, in_resources: Any, static: Sequence[int]) -> None:
    """Checks that `in_shardings` has no entry without an argument that is not static.

    Entries may be missing: those arguments are passed by name, in the layout that they have.
    """
    if is_resource(in_resources):
        return
    if type(in_resources) is not tuple:
        axis = isinstance(in_resources, str)
        entry = spec_str(PartitionSpec(in_resources)) if axis else 'specs'
        raise ValueError(
            f'{arguments.function}: in_shardings must be a tuple with one entry per '
            f'argument, not a {type(in_resources).__name__}; for one argument write ({entry},)'
        )
    dynamic = [name for i, name in enumerate(arguments.positional) if i not in static]
    count = len(in_resources)
    if arguments.unlimited or count <= len(dynamic):
        return
    listed = f' ({", ".join(dynamic)})' if dynamic else ''
    text = f'{arguments.function}: in_shardings has {count} entries, but there are '
    text += f'{len(dynamic)} positional arguments for them{listed}'
    if static:
        constants = ', '.join(arguments.name(i) for i in static)
        raise ValueError(f'{text}: a static argument ({constants}) has no entry; remove it')
    raise ValueError(f'{text}: remove {count - len(dynamic)}')


def is_numeric(x: Any) -> bool:
    """Whether jax may take a value: numpy has arrays of strings, objects and dates, too."""
    return not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in 'OSUMm'


def _without_mesh(resources: Any) -> Any:
    def spec(resource: Any) -> Any:
        if isinstance(resource, NamedSharding):
            return resource.spec
        if isinstance(resource, Sharding):
            raise ValueError(
                f'{resource!r} has no PartitionSpec, so the function cannot be moved to another '
                'mesh: give specs or NamedShardings to partition'
            )
        return resource

    return jax.tree.map(spec, resources, is_leaf=is_resource)


def check_donation(boundary: Boundary, args: Sequence[Any]) -> None:
    """Raises ValueError if a donated array was deleted, or if an array appears twice.

    Some versions of XLA crash on both.
    """
    if not boundary.donated:
        return
    for i in boundary.donated:
        if i < len(args):
            name = boundary.arguments.name(i)
            for problem in deletion_problems(boundary, name, i, args[i]):
                raise ValueError(f'{boundary.arguments.function}: {problem}')
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
                raise ValueError(
                    f'{boundary.arguments.function}: {first} and {where} are the same array, but '
                    'it can be donated only once: copy one of them with jnp.copy'
                )


def check_divisible(boundary: Boundary, args: Sequence[Any]) -> None:
    """Raises ValueError if a sharding does not divide an argument.

    jax would raise it too, but some of its versions print a line first.
    """
    for argument in boundary.dynamic(args):
        _check_pairs(argument.pairs())


def check_result_divides(boundary: Boundary, result: Any) -> None:
    """Raises ValueError if a sharding does not divide the result, as `check_divisible` does."""
    _check_pairs(pair_leaves(boundary.out_shardings, result, prefix=True, static_fields=False))


def _check_pairs(pairs: Iterator[tuple[KeyPath, Any, Any]]) -> None:
    with contextlib.suppress(TreeMismatchError):  # jax says so
        for _, sharding, leaf in pairs:
            if sharding is not None:
                sharding.shard_shape(np.shape(leaf))


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
