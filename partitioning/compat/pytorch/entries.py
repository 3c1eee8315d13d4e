"""The entries of a plan: the array that each is for, and the layout or Sharder that it gives."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from partitioning.compat.pytorch.trees import (
    Places,
    arrays_by_path,
    buffers,
    is_pattern,
    is_variables,
    other_names,
    parameters,
    replace_subtree,
    subtree,
)
from partitioning.plan import Plan, PlanRow, make_row
from partitioning.plan.rows import SMALL, check_layout_of
from partitioning.rules import (
    AxisRules,
    check_definite,
    check_spec,
    describe_axes,
    dimension_axes,
    from_tuple,
    padding_problems,
    sharding_axes,
    try_resolve,
)
from partitioning.state import Path, Role, nbytes, path_str, shape_of
from partitioning.state.boxes import array_of, carried_names, is_carrier


class Sharder(abc.ABC):
    """Lays out all arrays of a module.

    Usage:
      class FirstRowsThenColumns(Sharder):
          def shard(self, module, mesh):
              specs = {'bag_0': P('model'), 'bag_1': P(None, 'model')}
              return {name: place(bag, mesh, specs[name]) for name, bag in module.items()}
    """

    @abc.abstractmethod
    def shard(self, module: Any, mesh: Mesh) -> Any:
        """Lays out a module.

        `module` is the subtree of parameters below the path, arrays or ShapeDtypeStructs; or the
        submodule of an nnx module.

        Returns:
          The replacement of `module`, possibly of another structure. `place` gives each array its
          NamedSharding. Arrays without one are treated as if the plan did not name them.
        """


def place(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Lays out all arrays of a tree by one spec; ShapeDtypeStructs get the sharding.

    Raises:
      ValueError: if the mesh or an array cannot have the spec; the message has the array's path.
    """
    if not isinstance(spec, PartitionSpec):
        raise ValueError(f'{spec!r} is not a PartitionSpec: write P({spec!r})')
    sharding = NamedSharding(mesh, spec)

    def one(path: Any, x: Any) -> Any:
        check_layout_of(path_str(path) or 'the array', shape_of(x), spec, mesh)
        return placed(x, sharding)

    return jax.tree_util.tree_map_with_path(one, tree)


def placed(x: Any, sharding: NamedSharding) -> Any:
    """An array moved to its shards, or a ShapeDtypeStruct with the sharding."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


def resolve_entries(
    plan: Mapping[str, Any], module: Any, mesh: Mesh, rules: AxisRules
) -> tuple[Any, Plan]:
    """Applies the Sharders of a plan, and resolves the layout of each array.

    It returns the module with the results of the Sharders (an nnx module is changed in place), and
    the plan; it raises what `ShardingPlan.resolve` does.
    """
    module, entries = _apply_sharders(plan, module, mesh)
    rest = None if plan else 'the plan is empty, so every array is replicated'
    rows: list[PlanRow] = []
    roles: dict[Role, Any] = {'parameters': parameters(module), 'other': buffers(module)}
    for role, arrays in roles.items():
        rows += [
            _row(path, x, entries.get(path), rules, mesh, role, rest) for path, x in arrays.items()
        ]
    return module, Plan(mesh, tuple(rows))


def _apply_sharders(
    plan: Mapping[str, Any], module: Any, mesh: Mesh
) -> tuple[Any, Mapping[Path, tuple[Any, str]]]:
    """The module with the results of the Sharders, and the entry of each array with its reason."""
    if not isinstance(plan, Mapping):
        raise TypeError(f'plan={plan!r} must map paths to layouts, {{"fc1/kernel": P(...)}}')
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f'mesh={mesh!r} must be a jax.sharding.Mesh, as create_mesh returns it')
    for name, entry in plan.items():
        if not isinstance(name, str):
            raise TypeError(
                f"{name!r} is not a path: write the keys with '/' between, 'fc1/kernel'"
            )
        known = is_layout(entry) or isinstance(entry, Sharder)
        if not known and not hasattr(entry, 'to_partition_spec'):
            raise TypeError(
                'Only a PartitionSpec, logical names, a NamedSharding or a Sharder is supported to '
                f'shard {name!r}, not {type(entry).__name__} {entry!r}'
            )
        if not name:
            raise ValueError(
                "'' is not a path: an entry is for a module or parameter, as 'decoder'"
            )
    found, others = _find(plan, module), Places(buffers(module))
    entries: dict[Path, tuple[Any, str]] = {}
    for path, name in found.items():
        entry = plan[name]
        if not isinstance(entry, Sharder):
            entries[path] = (entry, 'the plan says so')
            continue
        place = ('params', *path) if is_variables(module) and path not in others else path
        made = entry.shard(subtree(module, place), mesh)
        sharder = type(entry).__name__
        if made is None:
            raise TypeError(
                f'{sharder}.shard of {name!r} has returned None: it must return the replacement of '
                'the module'
            )
        module = replace_subtree(module, place, made)
        for below, leaf in arrays_by_path(made):
            sharding = getattr(array_of(leaf), 'sharding', None)
            if isinstance(sharding, NamedSharding):
                entries[*path, *below] = (sharding, f'{sharder} says so')
    return module, entries


def is_layout(entry: Any) -> bool:
    """Whether an entry is a spec, a NamedSharding, or names, mesh axes and None by dimension."""
    return isinstance(entry, PartitionSpec | NamedSharding) or (
        isinstance(entry, tuple | list)
        and all(name is None or isinstance(name, str | tuple) for name in entry)
    )


def _find(plan: Mapping[str, Any], module: Any) -> dict[Path, str]:
    """The name of each entry by the path of its array or module; see `apply_entries` for errors."""
    known = {**buffers(module), **parameters(module)}
    again = other_names(module, known)
    places = Places([*known, *again])
    found: dict[Path, str] = {}
    above: dict[Path, str] = {}  # the modules that contain what is found
    exact = {name: entry for name, entry in plan.items() if not is_pattern(name)}
    for name, entry in exact.items():
        path = places.find(name)
        path = again.get(path, path)
        if path not in known and not isinstance(entry, Sharder):
            below = ', '.join('/'.join(p) for p in known if p[: len(path)] == path)
            raise ValueError(
                f'{name!r} is a module, but a layout is for one parameter: choose from {below}'
            )
        if (other := _covering(path, found, above)) is not None:
            both = 'both are the same array' if path in found else 'one is within the other'
            raise ValueError(
                f'the plan has {other!r} and {name!r}, but {both}: keep only one of them'
            )
        found[path] = name
        above |= dict.fromkeys(_modules_around(path), name)
    for name in [name for name in plan if name not in exact]:
        for path in places.match(name, modules=isinstance(plan[name], Sharder)):
            path = again.get(path, path)
            if _covering(path, found, above) is None:
                found[path] = name
                above |= dict.fromkeys(_modules_around(path), name)
    return found


def _covering(path: Path, found: Mapping[Path, str], above: Mapping[Path, str]) -> str | None:
    """The name of the entry for this array or module, for one around it, or for one within it."""
    around = [path, *_modules_around(path)]
    return next((found[p] for p in around if p in found), above.get(path))


def _modules_around(path: Path) -> list[Path]:
    return [path[:n] for n in range(1, len(path))]


def _row(
    path: Path, leaf: Any, entry: Any, rules: AxisRules, mesh: Mesh, role: Role, rest: str | None
) -> PlanRow:
    """The row of one array, laid out by its entry, by the names it carries, or not at all.

    `rest` is the reason to replicate an array that has neither, if the plan has one.
    """
    name, array = '/'.join(path), array_of(leaf)
    shape = shape_of(array)
    carried = carried_names(leaf) if entry is None and is_carrier(leaf) else None
    by_rules = carried is not None and (rules or carried.rules or carried.axes_as_names)
    if carried is not None and carried.names is not None and by_rules:
        entry = (carried.names, 'the parameter says so')
        rules = rules.with_rules((*carried.rules, *rules))
    if entry is None:
        if rest is None and nbytes(array) > SMALL and rules.on_unmatched == 'error':
            raise ValueError(
                f'{name} of shape {shape} is not in the plan, so each of the {mesh.size} devices '
                f"({describe_axes(mesh)}) would hold all {nbytes(array):,} bytes. Add '{name}': "
                "P(...), or P() to replicate it, or set on_unmatched='replicate'"
            )
        entry = (PartitionSpec(), rest or 'not in the plan, so replicated')
    names = _names(name, entry[0], shape, mesh)
    dimensions, problems = try_resolve(names, rules, mesh=mesh, shape=shape, axes_as_names=True)
    if any(d.policy == 'pad' for d in dimensions):
        problems = (*problems, *padding_problems(mesh))
    for problem in problems:
        raise ValueError(f'{name}: {problem.message}')
    # The entry gives the reason, unless a rule or a policy decided.
    explained = [
        d
        if isinstance(d.name, str)
        else dataclasses.replace(
            d,
            name=None,
            mesh_axes=from_tuple(sharding_axes(d.mesh_axes)),
            wanted=from_tuple(sharding_axes(d.wanted)),
            lost=(),
            reason=d.reason if d.policy else entry[1],
        )
        for d in dimensions
    ]
    return make_row(name, array, mesh, explained, role)


def _names(path: str, entry: Any, shape: Sequence[int], mesh: Mesh) -> tuple[Any, ...]:
    """The layout of each dimension: a logical name, a tuple of mesh axes, or None."""
    if isinstance(entry, NamedSharding):
        check_mesh_of(entry, mesh, f'{path}: ')
        entry = entry.spec
    elif hasattr(entry, 'to_partition_spec'):
        try:
            entry = entry.to_partition_spec(mesh, shape)
        except ValueError as error:
            raise ValueError(f'{path}: {error}') from error
        if not isinstance(entry, PartitionSpec):
            raise TypeError(f'{path}: to_partition_spec must return a PartitionSpec, not {entry!r}')
    if not isinstance(entry, PartitionSpec):
        return tuple(entry)
    check_definite(entry, path)
    check_spec(entry, mesh, path, shape)
    return dimension_axes(entry, len(shape))


def check_mesh_of(sharding: NamedSharding, mesh: Mesh | AbstractMesh, where: str = '') -> None:
    """Raises ValueError for a sharding that a spec on this mesh cannot express."""
    own = sharding.mesh
    if own.shape != mesh.shape:
        raise ValueError(
            f'{where}its NamedSharding is for the mesh {describe_axes(own)}, but this mesh is '
            f'{describe_axes(mesh)}'
        )
    if not isinstance(own, Mesh) or not isinstance(mesh, Mesh):
        return
    if own.devices.tolist() != mesh.devices.tolist():
        raise ValueError(
            f'{where}the mesh of its NamedSharding has other devices than this mesh, or the same '
            'ones in another order: use the same mesh for both'
        )
    usual = NamedSharding(mesh, PartitionSpec()).memory_kind
    if sharding.memory_kind not in (None, usual):
        raise ValueError(
            f'{where}its NamedSharding is for {sharding.memory_kind!r} memory, but a plan uses '
            f'the memory of the devices, {usual!r}'
        )
