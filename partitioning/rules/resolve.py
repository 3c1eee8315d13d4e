"""The one resolution of logical axis rules, T5X's and linen's.

Rules are tried in order, the first that matches a dimension wins, a mesh axis is used once per
array, and a rule that names several mesh axes is skipped whole when one of them is taken. Then a
policy decides what becomes of a size that its mesh axes do not divide.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from partitioning.rules.divide import give_way, indivisible, sharded_over
from partitioning.rules.names import (
    AxisRules,
    LogicalAxisRules,
    MeshAxes,
    MeshLike,
    OnIndivisible,
    OnUnmatched,
    as_tuple,
    axis_sizes,
    describe_axes,
    nearest,
)
from partitioning.rules.outcome import Problem, ResolvedDimension, Rule, to_spec


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
      names: one logical name a dimension; None for a dimension that is never sharded; a tuple of
        mesh axes for one that is sharded over just these.
      rules: (logical axis, mesh axis or axes or None) pairs in order of priority.
      mesh: a mesh, abstract or not, or the size of each of its axes. With it, a rule to an axis
        that the mesh lacks is an error.
      shape: the array's global shape. With `mesh`, a dimension that its mesh axes do not divide
        is found here.
      on_unmatched: for a name without a rule: 'error', or 'replicate' the dimension. By default
        the policy of `rules`, which is 'error' unless they are AxisRules that say otherwise.
      on_indivisible: for a size that its mesh axes do not divide: 'error'; 'replicate' it;
        'drop_axis', which keeps those of its axes that split it the most; 'pad', which keeps it
        whole in the state and shards it, padded, inside partitioned functions. By default the
        policy of `rules`.
      axes_as_names: a name without a rule may be a mesh axis, as in `flax.linen.Partitioned`.

    Raises:
      ValueError: an unmatched name, a name used twice, a mesh axis that does not exist, names and
        shape of different length, or an indivisible dimension; each with the way out.
    """
    resolved, problems = try_resolve(
        names,
        rules,
        mesh=mesh,
        shape=shape,
        on_unmatched=on_unmatched,
        on_indivisible=on_indivisible,
        axes_as_names=axes_as_names,
    )
    for problem in problems:
        raise ValueError(problem.message)
    return resolved


def try_resolve(
    names: Sequence[Any],
    rules: LogicalAxisRules,
    *,
    mesh: MeshLike | None = None,
    shape: Sequence[int] | None = None,
    on_unmatched: OnUnmatched | None = None,
    on_indivisible: OnIndivisible | None = None,
    axes_as_names: bool = False,
) -> tuple[tuple[ResolvedDimension, ...], tuple[Problem, ...]]:
    """What `resolve_axes` gives, and every problem it would raise, in its order.

    Raises:
      ValueError: arguments that are none: rules without order, a string for the names, a policy
        that does not exist.
    """
    if not isinstance(rules, Sequence):
        raise ValueError(f'rules must be a list or a tuple of pairs, not {type(rules).__name__}')
    if not isinstance(rules, AxisRules) or (on_unmatched, on_indivisible) != (None, None):
        rules = AxisRules(rules, on_unmatched, on_indivisible)
    if on_indivisible not in (None, 'error') and (mesh is None or shape is None):
        raise ValueError(f'on_indivisible={on_indivisible!r} needs a mesh and a shape to act on')
    sizes = None if mesh is None else axis_sizes(mesh)
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(f'{names!r} are no logical axes: write a tuple, one name a dimension')
    names = tuple(names)
    problems = list(_problems_of_names(names, shape))
    given = {d: n for d, n in enumerate(names) if _names_mesh_axes(n, rules, sizes, axes_as_names)}
    problems += _problems_of_axes(names, rules, given, sizes)
    resolved = _match(names, rules, given, sizes or {})
    known = {rule[0] for rule in rules}
    for dim, one in enumerate(resolved):
        if isinstance(one.name, str) and dim not in given and one.name not in known:
            if rules.on_unmatched == 'error':
                hints = {*known, *(sizes or ())} if axes_as_names else known
                problems.append(_unmatched(one.name, names, hints))
            else:
                resolved[dim] = dataclasses.replace(one, policy='replicate')
    # A shape of another rank has been found; sizes without a mesh say nothing.
    if sizes is not None and shape is not None and len(shape) == len(names):
        for dim, one in enumerate(resolved):
            ways = math.prod(sizes.get(a, 1) for a in sharded_over(one.mesh_axes))
            if shape[dim] % ways == 0:
                continue
            if rules.on_indivisible == 'error':
                problems.append(indivisible(one, dim, shape, ways))
            else:
                resolved[dim] = give_way(one, shape[dim], ways, sizes, rules.on_indivisible)
    return tuple(resolved), tuple(problems)


def logical_to_mesh_axes(
    names: Sequence[Any] | None,
    rules: LogicalAxisRules,
    *,
    mesh: MeshLike | None = None,
    shape: Sequence[int] | None = None,
    on_unmatched: OnUnmatched | None = None,
    on_indivisible: OnIndivisible | None = None,
) -> Any:
    """The PartitionSpec of an array with these logical axes; None for `names=None`.

    Arguments and errors are those of `resolve_axes`. Under 'pad' an array that needs it gets a
    PaddedSpec.
    """
    if names is None:
        return None
    resolved = resolve_axes(
        names,
        rules,
        mesh=mesh,
        shape=shape,
        on_unmatched=on_unmatched,
        on_indivisible=on_indivisible,
    )
    return to_spec(resolved)


def _names_mesh_axes(
    name: Any, rules: LogicalAxisRules, sizes: Mapping[str, int] | None, axes_as_names: bool
) -> bool:
    if isinstance(name, tuple):
        return True
    if not axes_as_names or sizes is None or not isinstance(name, str) or name not in sizes:
        return False
    return not any(rule[0] == name for rule in rules)


def _match(
    names: tuple[Any, ...],
    rules: LogicalAxisRules,
    given: Mapping[int, Any],
    sizes: Mapping[str, int],
) -> list[ResolvedDimension]:
    """The rule that wins each dimension, and what the others lost to."""
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
        by_name = isinstance(name, str)
        axes, reason = given, 'the name is a mesh axis' if by_name else 'its mesh axes are given'
    elif not isinstance(name, str):  # None, or PartitionSpec.UNCONSTRAINED
        axes, reason = name, 'no logical name'
    elif rule is not None:
        axes, reason = rule[1], 'a rule says so' if as_tuple(rule[1]) else 'a rule replicates it'
    else:
        axes, reason = None, lost[0][1] if lost else 'no rule'
    split = sharded_over(axes)
    if split and all(sizes.get(a) == 1 for a in split):
        reason += f', but an axis of size 1 splits nothing: {", ".join(split)}'
    return ResolvedDimension(name, axes, rule, lost, reason, wanted=axes)


def _problems_of_names(names: tuple[Any, ...], shape: Sequence[int] | None) -> list[Problem]:
    problems = []
    kinds = (str, tuple, type(None), type(PartitionSpec.UNCONSTRAINED))
    if not all(isinstance(name, kinds) for name in names):
        message = f'{names!r} are no logical axes: write one name or None a dimension'
        problems.append(Problem('names', message))
    text = [n for n in names if isinstance(n, str)]
    for twice in sorted({n for n in text if text.count(n) > 1}):
        message = (
            f'logical axis {twice!r} names two dimensions of {names}: one mesh axis cannot shard '
            'both; give one of them another name or None'
        )
        problems.append(Problem('repeated name', message))
    if shape is not None and len(shape) != len(names):
        message = (
            f'{len(names)} logical axes {names} for an array of {len(shape)} dimensions '
            f'{tuple(shape)}'
        )
        problems.append(Problem('rank', message))
    return problems


def _problems_of_axes(
    names: tuple[Any, ...],
    rules: LogicalAxisRules,
    given: Mapping[int, Any],
    sizes: Mapping[str, int] | None,
) -> list[Problem]:
    """Mesh axes that the mesh lacks, and those that dimensions name twice."""
    problems = []
    uses = [(f'rule {tuple(rule)!r}', rule[1]) for rule in rules if rule[0] in names]
    uses += [(f'dimension {dim} of {names}', axes) for dim, axes in given.items()]
    for user, axes in uses:
        for axis in as_tuple(axes):
            if sizes is not None and axis not in sizes:
                message = (
                    f'{user} names mesh axis {axis!r}, but the mesh is {describe_axes(sizes)}.'
                    f'{nearest(axis, sizes)}'
                )
                problems.append(Problem('absent axis', message))
    direct = [axis for axes in given.values() for axis in as_tuple(axes)]
    for axis in sorted({a for a in direct if direct.count(a) > 1}):
        message = f'mesh axis {axis!r} is there twice in {names}: it can shard one dimension, once'
        problems.append(Problem('conflict', message))
    return problems


def _unmatched(name: str, names: tuple[Any, ...], known: set[str]) -> Problem:
    return Problem(
        'unmatched',
        f'no rule for logical axis {name!r} of {names}.{nearest(name, known)} Add ({name!r}, None) '
        f"to the rules to replicate it, or ({name!r}, '<mesh axis>') to shard it.",
    )
