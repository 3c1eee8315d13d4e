"""The one resolution of logical axis rules, in the order of T5X and linen.

Rules are tried in order, the first that matches a dimension wins, a mesh axis is used once per
array, and a rule that names several mesh axes is skipped entirely if one of them is taken. Then a
policy decides about sizes that their mesh axes do not divide.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from partitioning.rules.axis_rules import AxisRules
from partitioning.rules.checks import (
    MeshAxes,
    MeshLike,
    Problem,
    as_tuple,
    axis_problems,
    axis_sizes,
    from_tuple,
    indivisible,
    names_rank_problem,
    nearest,
    num_shards,
    sharding_axes,
    sizes_that_fit,
)
from partitioning.rules.names import (
    LogicalAxisRules,
    OnIndivisible,
    OnUnmatched,
    ResolvedDimension,
    Rule,
    to_spec,
)


def resolve_axes(
    names: Sequence[Any],
    rules: LogicalAxisRules,
    *,
    mesh: MeshLike | None = None,
    shape: Sequence[int] | None = None,
    on_unmatched: OnUnmatched | None = None,
    on_indivisible: OnIndivisible | None = None,
    axes_as_names: bool = False,
) -> tuple[ResolvedDimension, ...]:
    """Resolves the logical axes of one array, with the reason for each dimension.

    Args:
      names: one entry per dimension: a logical name; None for a dimension that is never sharded;
        or a tuple of mesh axes for a dimension that is sharded over exactly these.
      rules: (logical axis, mesh axis or axes or None) pairs in order of priority.
      mesh: a mesh, abstract or not, or the size of each of its axes. With it, a rule for an axis
        that the mesh lacks is an error.
      shape: the global shape of the array. If `mesh` is given too, sizes are
        checked: each must be divisible by its number of shards.
      on_unmatched: the policy for a name without a rule: 'error', or 'replicate' the dimension.
        By default it is the policy of `rules`, which is 'error' unless AxisRules say otherwise.
      on_indivisible: the policy for a size that its mesh axes do not divide: 'error'; 'replicate'
        the dimension; 'drop_axis', which keeps the axes that divide it into the most shards; or
        'pad', which keeps the dimension whole in the state and shards it, padded, inside
        partitioned functions. By default it is the policy of `rules`.
      axes_as_names: whether a name without a rule may be a mesh axis, as in
        `flax.linen.Partitioned`.

    Raises:
      ValueError: if a name has no rule or is used twice, if a mesh axis does not exist, if `names`
        and `shape` differ in length, or if a size is not divisible. The message says what to write.
    """
    if not isinstance(rules, Sequence):
        raise ValueError(f'rules must be a list or a tuple of pairs, not {type(rules).__name__}')
    if on_indivisible not in (None, 'error') and (mesh is None or shape is None):
        raise ValueError(f'on_indivisible={on_indivisible!r} needs a mesh and a shape: pass both')
    if on_unmatched is not None or on_indivisible is not None or not isinstance(rules, AxisRules):
        rules = AxisRules(rules, on_unmatched, on_indivisible)
    resolved, problems = try_resolve(
        names, rules, mesh=mesh, shape=shape, axes_as_names=axes_as_names
    )
    for problem in problems:
        raise ValueError(problem.message)
    return resolved


def logical_to_mesh_axes(
    names: Sequence[Any] | None, rules: LogicalAxisRules, **settings: Any
) -> Any:
    """The PartitionSpec of an array with these logical axes, or None if `names` is None.

    It takes the keyword arguments of `resolve_axes`, and raises its errors. Under the policy 'pad'
    an array that needs padding gets a PaddedSpec.
    """
    return None if names is None else to_spec(resolve_axes(names, rules, **settings))


def try_resolve(
    names: Sequence[Any],
    rules: AxisRules,
    *,
    mesh: MeshLike | None = None,
    shape: Sequence[int] | None = None,
    axes_as_names: bool = False,
) -> tuple[tuple[ResolvedDimension, ...], tuple[Problem, ...]]:
    """Like `resolve_axes`, but returns all problems next to the dimensions and raises none.

    Raises:
      ValueError: if `names` is not a sequence of names.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(
            f'logical axes {names!r} must be a tuple with one name or None per dimension'
        )
    names = tuple(names)
    sizes = None if mesh is None else axis_sizes(mesh)
    known = {rule[0] for rule in rules}
    # The names that stand for mesh axes.
    given = {
        dim: name
        for dim, name in enumerate(names)
        if isinstance(name, tuple)
        or (axes_as_names and isinstance(name, str) and name in (sizes or ()) and name not in known)
    }
    problems = [*_name_problems(names, shape), *_axis_problems(names, rules, given, sizes)]
    resolved = _match(names, rules, given, sizes or {})
    for dim, one in enumerate(resolved):
        if not isinstance(one.name, str) or dim in given or one.name in known:
            continue
        if rules.on_unmatched == 'error':
            hint = nearest(one.name, {*known, *(sizes or ())} if axes_as_names else known)
            message = (
                f'no rule for logical axis {one.name!r} of {names}.{hint} Add ({one.name!r}, None) '
                f"to the rules to replicate it, or ({one.name!r}, '<mesh axis>') to shard it"
            )
            problems.append(Problem('unmatched', message))
        else:
            resolved[dim] = dataclasses.replace(one, policy='replicate')
    if sizes is not None and shape is not None and len(shape) == len(names):
        problems += apply_policies(resolved, shape, sizes, rules.on_indivisible)
    return tuple(resolved), tuple(problems)


def _match(
    names: tuple[Any, ...],
    rules: AxisRules,
    given: Mapping[int, Any],
    sizes: Mapping[str, int],
) -> list[ResolvedDimension]:
    """For each dimension the rule that wins, and the reason why each other rule lost."""
    dims = {name: dim for dim, name in enumerate(names) if isinstance(name, str)}
    taken = {axis: f'dimension {dim}' for dim, axes in given.items() for axis in as_tuple(axes)}
    won: dict[int, Rule] = {}
    lost: dict[int, list[tuple[Rule, str]]] = {}
    for rule in rules:
        dim = dims.get(rule[0])
        if dim is None or dim in given:
            continue
        axes = as_tuple(rule[1])
        clash = next((a for a in axes if a in taken), None)
        if dim in won:
            lost.setdefault(dim, []).append((rule, 'shadowed by an earlier rule'))
        elif clash is not None:
            why = f'mesh axis {clash!r} is taken by {taken[clash]}'
            lost.setdefault(dim, []).append((rule, why))
        else:
            won[dim] = rule
            taken.update(dict.fromkeys(axes, repr(names[dim])))
    return [
        _explain(name, given.get(dim), won.get(dim), tuple(lost.get(dim, ())), sizes)
        for dim, name in enumerate(names)
    ]


def _explain(
    name: Any,
    given: Any,
    rule: Rule | None,
    lost: tuple[tuple[Rule, str], ...],
    sizes: Mapping[str, int],
) -> ResolvedDimension:
    axes: MeshAxes
    if given is not None:
        axes = given
        reason = 'the name is a mesh axis' if isinstance(name, str) else 'the mesh axes are given'
    elif not isinstance(name, str):  # None, or PartitionSpec.UNCONSTRAINED
        axes, reason = name, 'no logical name'
    elif rule is not None:
        axes, reason = rule[1], 'a rule shards it' if as_tuple(rule[1]) else 'a rule replicates it'
    else:
        axes, reason = None, lost[0][1] if lost else 'no rule'
    split = sharding_axes(axes)
    if split and all(sizes.get(a) == 1 for a in split):
        reason += f', but only over mesh axes of size 1: {", ".join(split)}'
    return ResolvedDimension(name, axes, rule, lost, reason, wanted=axes)


def _name_problems(names: tuple[Any, ...], shape: Sequence[int] | None) -> Iterator[Problem]:
    kinds = (str, tuple, type(None), type(PartitionSpec.UNCONSTRAINED))
    for name in names:
        if not isinstance(name, kinds):
            yield Problem(
                'names',
                f'{name!r} in logical axes {names!r} must be a name, a tuple of mesh axes or None',
            )
            break
    text = [n for n in names if isinstance(n, str)]
    for twice in sorted({n for n in text if text.count(n) > 1}):
        yield Problem(
            'repeated name',
            f'logical axis {twice!r} names two dimensions of {names}, but a mesh axis can shard '
            'only one of them; give one of them another name or None',
        )
    if shape is not None and len(shape) != len(names):
        yield names_rank_problem(names, shape)


def _axis_problems(
    names: tuple[Any, ...],
    rules: AxisRules,
    given: Mapping[int, Any],
    sizes: Mapping[str, int] | None,
) -> Iterator[Problem]:
    """Mesh axes in rules and names that the mesh lacks or that appear twice."""
    for rule in rules if sizes is not None else ():
        if rule[0] in names:
            for problem in axis_problems(as_tuple(rule[1]), sizes or {}):
                yield problem._replace(message=f'rule {tuple(rule)!r}: {problem.message}')
    direct = [axis for axes in given.values() for axis in as_tuple(axes)]
    for problem in axis_problems(direct, dict.fromkeys(direct, 1) if sizes is None else sizes):
        yield problem._replace(message=f'logical axes {names}: {problem.message}')


def apply_policies(
    resolved: list[ResolvedDimension],
    shape: Sequence[int],
    mesh: MeshLike,
    policy: OnIndivisible,
) -> Iterator[Problem]:
    """Applies a policy, in place, to the dimensions of an array whose size is not divisible.

    Under 'error', each such size is a problem. Axes that the mesh lacks are another problem, so
    they are ignored.
    """
    sizes = axis_sizes(mesh)
    for dim, one in enumerate(resolved):
        axes = [axis for axis in sharding_axes(one.mesh_axes) if axis in sizes]
        if shape[dim] % num_shards(axes, sizes) == 0:
            continue
        if policy == 'error':
            name = one.name if isinstance(one.name, str) else None
            policies = ('replicate', 'drop_axis', 'pad')
            yield indivisible(dim, shape, axes, sizes, name=name, policies=policies)
        else:
            resolved[dim] = apply_policy(one, shape[dim], sizes, policy)


def apply_policy(
    resolved: ResolvedDimension, size: int, mesh: MeshLike, policy: OnIndivisible
) -> ResolvedDimension:
    """Applies a policy, not 'error', to a dimension whose size its shards do not divide."""
    wanted = sharding_axes(resolved.mesh_axes)
    shards = num_shards(wanted, mesh)
    kept = largest_divisor(size, wanted, mesh) if policy == 'drop_axis' else ()
    fits = sizes_that_fit(size, shards)
    why = f'size {size} is not divisible by {shards}'
    dropped = ', '.join(axis for axis in wanted if axis not in kept)
    reason = {
        'replicate': f'{why}, so it is replicated',
        'drop_axis': f'{why}, so it is not sharded over {dropped}',
        'pad': f'{why}, so it is whole here and padded to {fits[-1]} inside partitioned functions',
    }[policy]
    decides = bool(kept) or policy == 'pad'
    rule = resolved.rule or (str(resolved.name), resolved.mesh_axes)
    return dataclasses.replace(
        resolved,
        mesh_axes=from_tuple(kept),
        rule=resolved.rule if decides else None,
        lost=resolved.lost if decides else (*resolved.lost, (rule, why)),
        reason=reason,
        policy=policy,
        fits=fits,
    )


def largest_divisor(size: int, axes: tuple[str, ...], mesh: MeshLike) -> tuple[str, ...]:
    """The subset of the axes that divides a size into the most shards.

    Among equals, the largest subset wins, and then the first.
    """
    subsets = (c for n in range(len(axes), -1, -1) for c in itertools.combinations(axes, n))
    dividing = (subset for subset in subsets if size % num_shards(subset, mesh) == 0)
    return max(dividing, key=lambda subset: num_shards(subset, mesh))


def free_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes of a mesh that no surrounding `jax.shard_map` has made Manual, in its order."""
    return tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes)


def drop_axes(spec: PartitionSpec, dropped: Set[str]) -> PartitionSpec:
    """A spec without some mesh axes."""
    return PartitionSpec(*(_without(entry, dropped) for entry in spec))


def drop_axes_of_names(
    names: Sequence[Any], rules: LogicalAxisRules, mesh: MeshLike, dropped: Set[str]
) -> tuple[tuple[Any, ...], AxisRules]:
    """Names and rules that resolve to what the given ones resolve to, without some mesh axes.

    The given rules are resolved with all axes of the mesh, because a Manual axis is still taken:
    the same rules win inside a shard_map and outside. The result has the names without the dropped
    axes, and one rule per logical name, with the same policies. It raises what `resolve_axes`
    raises.
    """
    resolved = resolve_axes(names, rules, mesh=mesh)
    left = [(d.name, _without(d.mesh_axes, dropped)) for d in resolved if isinstance(d.name, str)]
    kept = tuple(_without(name, dropped) if isinstance(name, tuple) else name for name in names)
    return kept, AxisRules(rules).with_rules(left)


def _without(entry: Any, dropped: Set[str]) -> Any:
    """One entry of a spec without some mesh axes; None and UNCONSTRAINED stay."""
    if not dropped & {*sharding_axes(entry)}:
        return entry
    return from_tuple([axis for axis in as_tuple(entry) if axis not in dropped])
