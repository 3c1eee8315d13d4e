"""The entries of a plan: whose arrays they are for, and what each comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from partitioning.compat.pytorch.sharder import Sharder
from partitioning.compat.pytorch.trees import (
    Places,
    arrays_by_path,
    buffers,
    is_variables,
    other_names,
    parameters,
    replace_subtree,
    subtree,
)
from partitioning.plan.resolved import ResolvedPlan
from partitioning.plan.rows import PlannedArray, logical_only, planned_array, reason_of
from partitioning.plan.rule_set import SMALL
from partitioning.rules import (
    AxisRules,
    OnUnmatched,
    PaddedSpec,
    check_spec,
    describe_axes,
    dimension_axes,
    to_spec,
    try_resolve,
)
from partitioning.state import Path, Role, nbytes, shape_of
from partitioning.state.boxes import array_of, carried_names, is_carrier


class Planned(NamedTuple):
    """A model after the Sharders of a plan, and what the plan says of its arrays.

    Attributes:
      module: the model, with what the Sharders have returned in it.
      entries: by path, the entry of each array, and whose it is.
    """

    module: Any
    entries: Mapping[Path, tuple[Any, str]]

    def resolve(self, mesh: Mesh, policies: AxisRules) -> ResolvedPlan:
        """What that comes to, array by array; see `ShardingPlan.resolve`."""
        of_roles: dict[Role, dict[Path, Any]] = {
            'parameters': parameters(self.module),
            'other': buffers(self.module),
        }
        rows = (
            _row(path, leaf, self.entries.get(path), policies, mesh, role)
            for role, leaves in of_roles.items()
            for path, leaf in leaves.items()
        )
        return ResolvedPlan(mesh.shape, tuple(rows))


def apply_entries(given: Mapping[str, Any], module: Any, mesh: Mesh) -> Planned:
    """The model with the Sharders of a plan applied; an nnx module is changed in place.

    Raises:
      TypeError: an entry that is no layout.
      ValueError: a path that does not exist; entries for the same array.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f'a plan has entries by path, {{"fc1/kernel": P(...)}}, not {given!r}')
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f'mesh={mesh!r} must be a jax.sharding.Mesh, as create_mesh makes it')
    for name, entry in given.items():
        _check_entry(name, entry)
    found = _find(given, module)
    others = Places(buffers(module))
    entries: dict[Path, tuple[Any, str]] = {}
    for path, name in found.items():
        entry = given[name]
        if not isinstance(entry, Sharder):
            entries[path] = (entry, 'the plan')
            continue
        place = ('params', *path) if is_variables(module) and path not in others else path
        made = entry.shard(subtree(module, place), mesh)
        if made is None:
            raise TypeError(
                f'{type(entry).__name__}.shard of {name!r} has returned None: it must return what '
                'takes the place of the module'
            )
        module = replace_subtree(module, place, made)
        for below, leaf in arrays_by_path(made):
            sharding = getattr(array_of(leaf), 'sharding', None)
            if isinstance(sharding, NamedSharding):
                entries[*path, *below] = (sharding, type(entry).__name__)
    return Planned(module, entries)


def are_names(entry: Any) -> bool:
    """Whether an entry has a logical name, mesh axes or None for each dimension."""
    return isinstance(entry, tuple | list) and all(
        name is None or isinstance(name, str | tuple) for name in entry
    )


def _check_entry(name: Any, entry: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no path: write the keys with '/' between, 'fc1/kernel'")
    layout = isinstance(entry, PartitionSpec | NamedSharding | Sharder) or are_names(entry)
    if not layout and not hasattr(entry, 'to_partition_spec'):
        raise TypeError(
            f'Only a PartitionSpec, logical names, a NamedSharding or a Sharder is supported to '
            f'shard {name!r}, not {type(entry).__name__} {entry!r}'
        )
    if not name:
        raise ValueError(
            "'' is no path: a Sharder is for a module or parameter below the top, such as 'decoder'"
        )


def _find(given: Mapping[str, Any], module: Any) -> dict[Path, str]:
    """The path of each entry, of which none is for an array of another.

    Raises:
      ValueError: a path that does not exist, a layout for a module, two for one array.
    """
    known = {**buffers(module), **parameters(module)}
    again = other_names(module, known)
    places = Places([*known, *again])
    found: dict[Path, str] = {}
    above: dict[Path, str] = {}  # the modules around what is found
    for name, entry in given.items():
        path = places.find(name)
        path = again.get(path, path)
        if path not in known and not isinstance(entry, Sharder):
            below = ', '.join('/'.join(p) for p in known if p[: len(path)] == path)
            raise ValueError(f'{name!r} is a module; a layout is for one parameter of it: {below}')
        around = [path[:n] for n in range(1, len(path))]
        other = next((found[p] for p in [path, *around] if p in found), above.get(path))
        if other is not None:
            both = 'both are the same array' if path in found else 'one is within the other'
            raise ValueError(
                f'the plan has {other!r} and {name!r}, of which only one can be: {both}'
            )
        found[path] = name
        above |= dict.fromkeys(around, name)
    return found


def _row(
    path: Path,
    leaf: Any,
    entry: tuple[Any, str] | None,
    policies: AxisRules,
    mesh: Mesh,
    role: Role,
) -> PlannedArray:
    """The row of one array, laid out by its entry, by the names it carries, or not at all."""
    name, array = '/'.join(path), array_of(leaf)
    shape = shape_of(array)
    carried = carried_names(leaf) if entry is None and is_carrier(leaf) else None
    by_rules = carried is not None and (policies or carried.rules or carried.axes_as_names)
    if carried is not None and carried.names is not None and by_rules:
        entry = (carried.names, 'the parameter')
        policies = policies.with_rules((*carried.rules, *policies))
    if entry is None:
        _check_small(name, array, mesh, policies.on_unmatched)
        names, reason = (None,) * len(shape), 'not in the plan, so replicated'
    else:
        names, reason = _names(name, entry[0], shape, mesh), f'{entry[1]} says so'
    dimensions, problems = try_resolve(names, policies, mesh=mesh, shape=shape, axes_as_names=True)
    if problems:
        raise ValueError(f'{name}: {problems[0].message}')
    if any(d.policy or isinstance(d.name, str) for d in dimensions):
        reason = reason_of(dimensions)
    spec = to_spec(dimensions)
    if isinstance(spec, PaddedSpec) and AxisType.Explicit in mesh.axis_types:
        raise ValueError(f"{name}: on_indivisible='pad' needs Auto mesh axes, not Explicit ones")
    kept = logical_only(names)
    return planned_array(name, array, spec, mesh, logical_axes=kept, category=role, reason=reason)


def _names(path: str, entry: Any, shape: Sequence[int], mesh: Mesh) -> tuple[Any, ...]:
    """What an entry says of each dimension: a name, a tuple of mesh axes, or None."""
    if isinstance(entry, NamedSharding):
        if entry.mesh.shape != mesh.shape:
            raise ValueError(
                f'{path}: its NamedSharding is for the mesh {describe_axes(entry.mesh.shape)}, but '
                f'this one is {describe_axes(mesh.shape)}'
            )
        _check_devices(path, entry, mesh)
        entry = entry.spec
    elif hasattr(entry, 'to_partition_spec'):
        entry = _converted(path, entry, shape, mesh)
    if not isinstance(entry, PartitionSpec):
        return tuple(entry)
    if PartitionSpec.UNCONSTRAINED in tuple(entry):
        raise ValueError(f'{path}: {entry} decides nothing for some dimension: write None or axes')
    check_spec(entry, mesh, path, shape)
    return dimension_axes(entry, len(shape))


def _check_devices(path: str, sharding: NamedSharding, mesh: Mesh) -> None:
    """Raises ValueError for what a spec on this mesh would not say."""
    own = sharding.mesh
    if isinstance(own, Mesh) and isinstance(mesh, Mesh):
        if own.devices.tolist() != mesh.devices.tolist():
            raise ValueError(
                f'{path}: its NamedSharding is for other devices than this mesh has, or for these '
                'in another order: make both of one mesh'
            )
        usual = NamedSharding(mesh, PartitionSpec()).memory_kind
        if sharding.memory_kind not in (None, usual):
            raise ValueError(
                f'{path}: its NamedSharding is for {sharding.memory_kind!r} memory, but a plan '
                f'lays out over that of the devices, {usual!r}'
            )


def _converted(path: str, entry: Any, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    try:
        spec = entry.to_partition_spec(mesh, shape)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from error
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f'{path}: {type(entry).__name__}.to_partition_spec has returned {spec!r}, which is no '
            'PartitionSpec'
        )
    return spec


def _check_small(name: str, array: Any, mesh: Mesh, on_unmatched: OnUnmatched) -> None:
    """Nothing of size is replicated without a word."""
    if nbytes(array) > SMALL and on_unmatched == 'error':
        shape = shape_of(array)
        raise ValueError(
            f'{name} of shape {shape} is not in the plan, so all of its {nbytes(array):,} bytes '
            f'would be on each of the {mesh.size} devices ({describe_axes(mesh.shape)}). Add '
            f"'{name}': P(...), with P() to mean it, or on_unmatched='replicate'"
        )
