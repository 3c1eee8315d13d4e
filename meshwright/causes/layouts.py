"""The layout of the arguments of a function, and the layout that the rules give to any value.

Under the rules

    [('batch', 'data'), ('embed', None), ('mlp', 'model')]

on a mesh of 4 by 2 devices, `KnownLayouts` says:

    wanted((('batch', ...), ('length', ...), ('mlp', ...)), shape)  ->  (('data',), (), ('model',))
    is_unusual('mlp')  ->  False: the standard rules also shard it over 'model'
    is_unusual('embed')  ->  False: the standard rules leave it whole

With ('mlp', 'data') instead, 'mlp' is unusual, and `to_standard('mlp')` is the change that gives
'mlp' its standard axes.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.calls.held import row_of_array
from meshwright.causes.cause import RuleChange
from meshwright.jaxpr.linked_dimensions import LinkedDimensions
from meshwright.jaxpr.values import Axes, Dim
from partitioning.plan.rows import PlanRow
from partitioning.rules import (
    STANDARD_MESH_AXES,
    AxisRules,
    LogicalAxisRules,
    as_tuple,
    from_tuple,
    sharding_axes,
    standard_logical_axis_rules,
)
from partitioning.rules.resolve import try_resolve
from partitioning.state import Role

# Words in the path of an argument that belongs to an optimizer.
_OPTIMIZER = ('opt_state', 'optimizer', 'momentum', 'mu', 'nu', 'param_states')


def describe_arguments(
    traced: jax.stages.Traced, compiled: jax.stages.Compiled, known: Sequence[PlanRow] = ()
) -> tuple[PlanRow | None, ...]:
    """Returns the layout of each argument of a compiled function, for `explain_program`.

    The function may be any `jax.jit`, with or without a partitioner.

    Args:
      traced: the trace.
      compiled: the program.
      known: rows of a plan, which give names and reasons to arguments of the same path and shape.

    Returns:
      A row per array, in the order of `jax.tree.leaves`; None for an array that the program does
      not use. All are None if no array has a NamedSharding.
    """
    # Arguments that the program does not use have None in place of a sharding.
    tree: Any = compiled.in_tree
    shardings = tree.flatten_up_to(compiled.input_shardings)
    avals = traced.jaxpr.in_avals
    names = getattr(traced.jaxpr.jaxpr.debug_info, 'arg_names', None) or ()
    # The path of state.params['w'] is state/params/w.
    paths = ['/'.join(re.findall(r'[\w\-]+', name)) or 'argument' for name in names]
    paths += [f'argument_{n}' for n in range(len(paths), len(avals))]
    mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
    if mesh is None or len(shardings) != len(avals):
        return (None,) * len(avals)
    donated = [x.donated for x in jax.tree.leaves(compiled.args_info)]
    rows: list[PlanRow | None] = []
    for path, aval, sharding, is_state in zip(paths, avals, shardings, donated, strict=True):
        if sharding is None:
            rows.append(None)
            continue
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        same = [r for r in known if f'/{path}'.endswith(f'/{r.path}') and r.shape == aval.shape]
        row = same[0] if same else None
        role, why = _role(path, aval, is_state), 'the layout of the argument'
        rows.append(row_of_array(row.path if row else path, aval, spec, mesh, why, row, role))
    return tuple(rows)


def axes_of_row(row: PlanRow) -> tuple[Axes, ...]:
    """Returns the mesh axes of each dimension of an argument."""
    return tuple(sharding_axes(d.mesh_axes) for d in row.dimensions)


def sharding_of_row(row: PlanRow) -> frozenset[str]:
    """Returns the mesh axes that shard any dimension of an argument."""
    return frozenset(axis for axes in axes_of_row(row) for axis in axes)


def names_by_axes(rules: LogicalAxisRules) -> dict[Axes, str]:
    """Maps the mesh axes of each 'batch' rule to 'batch', to name dimensions by their axes."""
    found = [as_tuple(axes) for name, axes in rules if name == 'batch']
    return {axes: 'batch' for axes in found if axes}


class KnownLayouts:
    """Answers questions about layouts from the rules, the mesh and the layout of the arguments.

    Args:
      rules: the logical axis rules.
      sizes: the size of each mesh axis.
      rows: the layout of each argument, or None where it is not known.
      links: which dimensions of arguments belong together, and the constraints on them.
    """

    def __init__(
        self,
        rules: LogicalAxisRules,
        sizes: Mapping[str, int],
        rows: Sequence[PlanRow | None],
        links: LinkedDimensions | None = None,
    ):
        self.rules, self.sizes = AxisRules(rules), dict(sizes)
        self._links = links or LinkedDimensions()
        self.rows = {row.path: row for row in rows if row is not None}
        self._resolved: dict[tuple[Any, ...], tuple[Axes, ...]] = {}

    @functools.cached_property
    def batch_axes(self) -> Axes:
        """The mesh axes over which the rows of the batch are sharded, or should be."""
        axes = [as_tuple(rule[1]) for rule in self.rules if rule[0] == 'batch']
        if not any(axes):
            rows = [r for r in self.rows.values() if r.role == 'other' and r.dimensions]
            # The batch may be laid out wrongly, so constraints on values made from it come first.
            axes = [self._links.axes_of(row.path, 1)[0] for row in rows]
            if not any(axes):
                axes = [axes_of_row(row)[0] for row in rows]
        found = tuple(dict.fromkeys(a for one in axes for a in one if self.sizes.get(a, 1) > 1))
        return found or self.standard.get('batch', ())

    @functools.cached_property
    def standard(self) -> dict[str, Axes]:
        """The mesh axes that the standard rules give to each name, where the mesh has them."""
        known = [a for a in self.sizes if a in STANDARD_MESH_AXES]
        if not known:
            return {}
        found: dict[str, Axes] = {}
        for name, axes in standard_logical_axis_rules(mesh_axes=known):
            split = tuple(a for a in as_tuple(axes) if self.sizes[a] > 1)
            if name not in found or not found[name]:
                found[name] = split
        return found

    def resolve(self, names: Sequence[str | None], shape: Sequence[int]) -> tuple[Axes, ...]:
        """The mesh axes that the rules give to an array whose dimensions have these names."""
        key = tuple(names), tuple(shape)
        if key not in self._resolved:
            self._resolved[key] = self._resolve(names, shape)
        return self._resolved[key]

    def _resolve(self, names: Sequence[str | None], shape: Sequence[int]) -> tuple[Axes, ...]:
        rules = AxisRules(self.rules, 'replicate', 'drop_axis')
        kept = [n if names.index(n) == i else None for i, n in enumerate(names)]
        resolved, _ = try_resolve(kept, rules, mesh=self.sizes, shape=shape)
        return tuple(sharding_axes(d.mesh_axes) for d in resolved)

    def wanted(self, dims: Sequence[Dim | None], shape: Sequence[int]) -> tuple[Axes, ...]:
        """The mesh axes that the rules give to each dimension of a value, by its name.

        A dimension without a name keeps the mesh axes that it has in an argument, if they are free.
        """
        resolved = self.resolve([d.name if d else None for d in dims], shape)
        found = [tuple(a for a in axes if self.sizes.get(a, 1) > 1) for axes in resolved]
        taken = {axis for axes in found for axis in axes}
        for number, dim in enumerate(dims):
            if dim is None or dim.name is not None or taken & set(dim.axes):
                continue
            if dim.axes and self.divides(dim.axes, shape[number]):
                found[number] = dim.axes
                taken |= set(dim.axes)
        return tuple(found)

    def rule_for(self, name: str | None) -> str:
        """The rule that decides a name, as text; '' for None, and in programs without rules."""
        if name is None or not list(self.rules):
            return ''
        rules = [tuple(rule) for rule in self.rules if rule[0] == name]
        used = [rule for rule in rules if rule[1]] or rules
        return repr(used[0]) if used else f'no rule for {name!r}'

    def axes_of(self, name: str) -> Axes:
        """The mesh axes of all rules of a name."""
        axes = [a for rule in self.rules if rule[0] == name for a in as_tuple(rule[1])]
        return tuple(dict.fromkeys(a for a in axes if self.sizes.get(a, 1) > 1))

    def is_unusual(self, name: str | None) -> bool:
        """Whether a name has other mesh axes than the standard rules would give it.

        Dimensions that the standard rules leave whole may be sharded over the axes of the batch, as
        in fully sharded data parallelism.
        """
        if name is None or name not in self.standard or not self.has_rule(name):
            return False
        mine, theirs = set(self.axes_of(name)), set(self.standard[name])
        if name == 'batch':
            others = {a for n, _ in self.rules if n != 'batch' for a in self.axes_of(n)}
            return not theirs <= mine or bool((mine - theirs) & others)
        # A name may be on the axes of the batch. If the rule of 'batch' is unusual, its standard
        # axes count instead.
        rows = set(self.standard['batch'] if self.is_unusual('batch') else self.batch_axes)
        if theirs:
            return not theirs <= mine and not theirs & rows
        return bool(mine - rows)

    def unusual_names(self) -> list[str]:
        """The names whose rule is unusual, or adds mesh axes to the axes of the standard rules.

        More axes than usual are often intended, so the change of such a name is only tried.
        """
        return [
            name
            for name in dict.fromkeys(rule[0] for rule in self.rules)
            if self.is_unusual(name)
            or set() < set(self.standard.get(name, ())) < set(self.axes_of(name))
        ]

    def fewer_axes(self, name: str) -> list[RuleChange]:
        """The changes that take one mesh axis, or all of them, away from a name."""
        mine = self.axes_of(name)
        kept = [tuple(a for a in mine if a != axis) for axis in mine]
        return [self.change({name: axes}) for axes in dict.fromkeys([*kept, ()]) if axes != mine]

    def to_standard(self, name: str) -> RuleChange:
        """The change that gives a name its standard axes. If another name has them, both swap."""
        wanted, mine = self.standard[name], self.axes_of(name)
        for other, theirs in self.standard.items() if name != 'batch' else ():
            if other in (name, 'batch') or not mine or not self.is_unusual(other):
                continue
            now = self.axes_of(other)
            if wanted and set(now) & set(wanted) and (set(theirs) == set(mine) or not theirs):
                return self.change({name: wanted, other: mine})
            if not wanted and theirs and set(theirs) == set(mine) and now:
                return self.change({name: now, other: mine})
        return self.change({name: wanted})

    def change(self, axes: Mapping[str, Axes]) -> RuleChange:
        """The change of the rules that gives mesh axes to names."""
        order = [rule[0] for rule in self.rules]
        names = sorted(axes, key=lambda name: order.index(name) if name in order else len(order))
        return RuleChange(
            before=tuple((n, from_tuple(self.axes_of(n))) for n in names if self.has_rule(n)),
            after=tuple((n, from_tuple(axes[n])) for n in names),
        )

    def has_rule(self, name: str) -> bool:
        """Whether any rule names a logical axis."""
        return any(rule[0] == name for rule in self.rules)

    def unused_axes(self, layout: Sequence[Sequence[str]]) -> Axes:
        """The mesh axes of more than one device over which a layout shards nothing."""
        used = {a for axes in layout for a in axes}
        return tuple(a for a, size in self.sizes.items() if size > 1 and a not in used)

    def unused_by(self, row: PlanRow | None) -> Axes:
        """The mesh axes over which an argument is not sharded."""
        return () if row is None else self.unused_axes(axes_of_row(row))

    def divides(self, axes: Sequence[str], size: int) -> bool:
        """Whether mesh axes divide the size of a dimension."""
        return size % math.prod(self.sizes[a] for a in axes) == 0


def _role(path: str, aval: Any, donated: bool) -> Role:
    """The role of an argument without a plan: donated arrays of floats are parameters."""
    if any(word in path.split('/') for word in _OPTIMIZER):
        return 'optimizer'
    is_float = jnp.issubdtype(aval.dtype, jnp.floating)
    return 'parameters' if donated and is_float else 'other'
