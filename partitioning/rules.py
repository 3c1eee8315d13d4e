"""Logical axis names -> PartitionSpec, with the reason for every dimension.

One resolution for every caller, T5X's and linen's: rules are tried in order, the first that
matches a dimension wins, a mesh axis is used once per array, and a rule that names several mesh
axes is skipped whole when one of them is taken.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

MeshAxes = str | tuple[str, ...] | None
LogicalAxisRules = Sequence[tuple[str, MeshAxes]]
OnUnmatched = Literal['error', 'replicate']
OnIndivisible = Literal['error', 'replicate']

_BATCH_AXES = ('replica', 'data', 'fsdp', 'expert')
# The axes that standard_logical_axis_rules knows.
STANDARD_MESH_AXES = (*_BATCH_AXES, 'sequence', 'stage', 'model')


class AxisNames(tuple):
    """The logical axis names of one array, one name (or None) a dimension.

    A class of its own so that jax takes it for one leaf of a pytree, not for a node.
    """

    __slots__ = ()

    def __new__(cls, *names: str | None) -> AxisNames:
        return tuple.__new__(cls, names)

    def __getnewargs__(self) -> tuple:
        return tuple(self)

    def __repr__(self) -> str:
        return f'AxisNames{super().__repr__()}'


@dataclasses.dataclass(frozen=True)
class ResolvedDimension:
    """Why one dimension of an array is laid out as it is.

    Attributes:
      name: its logical axis name; None for a dimension without one.
      mesh_axes: the mesh axes it is sharded over; None: not sharded.
      rule: the rule that decided, if one did.
      lost: the rules for this name that did not apply, each with the reason.
      reason: one phrase that says why `mesh_axes` is what it is.
    """

    name: str | None
    mesh_axes: MeshAxes
    rule: tuple[str, MeshAxes] | None
    lost: tuple[tuple[tuple[str, MeshAxes], str], ...]
    reason: str


def as_tuple(mesh_axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """Mesh axes of one dimension as a tuple, empty for None."""
    if mesh_axes is None:
        return ()
    return (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)


def replicate_none(specs: Any) -> Any:
    """A pytree of PartitionSpecs with every None in it made the spec that replicates."""
    return jax.tree.map(
        lambda spec: PartitionSpec() if spec is None else spec,
        specs,
        is_leaf=lambda spec: spec is None or isinstance(spec, PartitionSpec),
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint: ` Did you mean 'x'?` for the known name nearest to `name`, or nothing."""
    found = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f' Did you mean {found[0]!r}?' if found else ''


def describe_axes(axis_sizes: Mapping[str, int]) -> str:
    """Mesh axes in words: `data 4 x model 2`."""
    return ' x '.join(f'{name} {size}' for name, size in axis_sizes.items())


def check_rules(rules: Iterable[Any]) -> tuple[tuple[str, MeshAxes], ...]:
    """Rules as pairs, with lists of mesh axes (as configuration files write them) made tuples.

    Raises:
      ValueError: a rule that is no pair of a name and a mesh axis, several, or None.
    """
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ValueError(f"{rules!r} are no rules: write [('logical axis', 'mesh axis'), ...]")
    checked: list[tuple[str, MeshAxes]] = []
    for rule in rules:
        match rule:
            case (str(name), None | str() as axes):
                checked.append((name, axes))
            case (str(name), [*several]) if all(isinstance(a, str) for a in several):
                checked.append((name, tuple(several)))
            case _:
                raise ValueError(
                    f"{rule!r} is no rule: write ('logical axis', 'mesh axis'), ('logical axis', "
                    "('one', 'another')), or ('logical axis', None)"
                )
    return tuple(checked)


def resolve_axes(
    names: Sequence[str | None],
    rules: LogicalAxisRules,
    *,
    axis_sizes: Mapping[str, int] | None = None,
    shape: Sequence[int] | None = None,
    on_unmatched: OnUnmatched = 'error',
    on_indivisible: OnIndivisible = 'error',
) -> tuple[ResolvedDimension, ...]:
    """Resolves the logical axes of one array, with the reason for each dimension.

    Args:
      names: one logical name a dimension; None for a dimension that is never sharded.
      rules: (logical axis, mesh axis or axes or None) pairs in order of priority.
      axis_sizes: size of each mesh axis (`mesh.shape`). With it, a rule to an axis that the mesh
        lacks is an error.
      shape: the array's global shape. With `axis_sizes`, a dimension that its mesh axes do not
        divide is found here.
      on_unmatched: for a name without a rule: 'error', or 'replicate' the dimension.
      on_indivisible: for a size that its mesh axes do not divide: 'error', or 'replicate' it.

    Raises:
      ValueError: an unmatched name, a name used twice, a mesh axis that does not exist, names and
        shape of different length, or an indivisible dimension; each with the way out.
    """
    _check_arguments(rules, on_unmatched, on_indivisible)
    _check_names(names, shape)
    candidates = sorted(
        (priority, dim)
        for dim, name in enumerate(names)
        for priority, rule in enumerate(rules)
        if isinstance(name, str) and rule[0] == name
    )
    taken: dict[str, str] = {}
    won: dict[int, tuple[str, MeshAxes]] = {}
    lost: dict[int, list[tuple[tuple[str, MeshAxes], str]]] = {}
    for priority, dim in candidates:
        rule = rules[priority]
        axes = as_tuple(rule[1])
        if axis_sizes is not None:
            _check_axes_exist(rule, axis_sizes)
        clash = next((a for a in axes if a in taken), None)
        if dim in won:
            lost.setdefault(dim, []).append((rule, 'shadowed by an earlier rule'))
        elif clash is not None:
            why = f'mesh axis {clash!r} is taken by {taken[clash]!r}'
            lost.setdefault(dim, []).append((rule, why))
        else:
            won[dim] = rule
            taken.update(dict.fromkeys(axes, str(names[dim])))
    matched = {rules[priority][0] for priority, _ in candidates}
    resolved = []
    for dim, name in enumerate(names):
        if not isinstance(name, str):
            resolved.append(ResolvedDimension(name, name, None, (), 'no logical name'))
            continue
        if name not in matched and on_unmatched == 'error':
            hint = nearest(name, {r[0] for r in rules})
            raise ValueError(
                f'no rule for logical axis {name!r} of {tuple(names)}.{hint} Add ({name!r}, None) '
                f"to the rules to replicate it, or ({name!r}, '<mesh axis>') to shard it."
            )
        resolved.append(_explain(name, won.get(dim), tuple(lost.get(dim, ())), axis_sizes or {}))
    if axis_sizes is None or shape is None:
        return tuple(resolved)
    return tuple(
        _check_divides(r, dim, shape, axis_sizes, on_indivisible) for dim, r in enumerate(resolved)
    )


def logical_to_mesh_axes(
    names: Sequence[str | None] | None,
    rules: LogicalAxisRules,
    *,
    axis_sizes: Mapping[str, int] | None = None,
    shape: Sequence[int] | None = None,
    on_unmatched: OnUnmatched = 'error',
    on_indivisible: OnIndivisible = 'error',
) -> PartitionSpec | None:
    """The PartitionSpec of an array with these logical axes; None for `names=None`.

    Arguments and errors are those of `resolve_axes`.
    """
    if names is None:
        return None
    resolved = resolve_axes(
        names,
        rules,
        axis_sizes=axis_sizes,
        shape=shape,
        on_unmatched=on_unmatched,
        on_indivisible=on_indivisible,
    )
    return PartitionSpec(*(r.mesh_axes for r in resolved))


def standard_logical_axis_rules(
    activation_partitioning_dims: int = 1,
    parameter_partitioning_dims: int = 1,
    additional_rules: LogicalAxisRules | None = None,
    *,
    mesh_axes: Sequence[str] = ('data', 'model'),
) -> LogicalAxisRules:
    """T5X's rules for transformers, for the axes that the mesh has.

    Args:
      activation_partitioning_dims: 2 also shards the 'embed' dimension of activations over 'model'.
      parameter_partitioning_dims: 2 also shards the 'embed' dimension of parameters over 'data'
        (fully sharded data parallelism).
      additional_rules: appended last, so they decide only names that have no rule yet.
      mesh_axes: axes of the mesh. The batch goes over all of 'replica', 'data', 'fsdp' and
        'expert' that are there; 'fsdp' shards the 'embed' of parameters, 'sequence' the 'length',
        'stage' the 'stage', and 'expert' brings T5X's rules for mixtures of experts.

    Raises:
      ValueError: dims other than 1 or 2; a mesh axis that none of these rules would use.
    """
    dims = (activation_partitioning_dims, parameter_partitioning_dims)
    if not set(dims) <= {1, 2}:
        raise ValueError(
            f'activation_partitioning_dims={dims[0]!r}, parameter_partitioning_dims={dims[1]!r} is '
            'not supported: each is 1 or 2'
        )
    if isinstance(mesh_axes, str) or not isinstance(mesh_axes, Sequence):
        raise ValueError(f'mesh_axes={mesh_axes!r} must be axis names, such as mesh.axis_names')
    added = check_rules(() if additional_rules is None else additional_rules)
    _check_all_used(mesh_axes, added)
    batch = tuple(axis for axis in _BATCH_AXES if axis in mesh_axes)
    model, data = (axis if axis in mesh_axes else None for axis in ('model', 'data'))
    for setting, dim, axis in (('activation', dims[0], 'model'), ('parameter', dims[1], 'data')):
        if dim == 2 and axis not in mesh_axes:
            raise ValueError(
                f'{setting}_partitioning_dims=2 shards over {axis!r}, which the mesh axes '
                f'{tuple(mesh_axes)} lack'
            )
    embed: list[MeshAxes] = ['fsdp'] if 'fsdp' in mesh_axes else []
    embed += [model] if dims[0] == 2 else []
    embed += [data] if dims[1] == 2 else []
    rules: list[tuple[str, MeshAxes]] = [
        ('batch', batch[0] if len(batch) == 1 else batch or None),
        ('vocab', model),
        ('mlp', model),
        ('heads', model),
        ('kv', None),
        ('joined_kv', model),
        *(('embed', axis) for axis in embed or [None]),
        ('relpos_buckets', None),
        ('abspos_buckets', None),
        ('length', 'sequence' if 'sequence' in mesh_axes else None),
        ('layers', None),
        ('stack', None),
        ('mlp_activations', None),
    ]
    if 'expert' in mesh_axes:
        rules += [
            ('expert', 'expert'),
            ('expert_mlp', model),
            ('expert_group', None),
            ('expert_replicas', data),
            ('unmodeled', None),
        ]
    if 'stage' in mesh_axes:
        rules += [('stage', 'stage')]
    return [*rules, *added]


def _check_all_used(mesh_axes: Sequence[str], added: LogicalAxisRules) -> None:
    used = {*STANDARD_MESH_AXES, *(axis for _, axes in added for axis in as_tuple(axes))}
    for axis in mesh_axes:
        if axis not in used:
            raise ValueError(
                f'no standard rule uses the mesh axis {axis!r}, so everything would be replicated '
                f"over it; add one, for example ('mlp', {axis!r}), or call it one of "
                f'{", ".join(STANDARD_MESH_AXES)}.{nearest(axis, STANDARD_MESH_AXES)}'
            )


def _check_arguments(rules: LogicalAxisRules, on_unmatched: str, on_indivisible: str) -> None:
    if not isinstance(rules, Sequence):
        raise ValueError(f'rules must be a list or a tuple of pairs, not {type(rules).__name__}')
    for name, policy in (('on_unmatched', on_unmatched), ('on_indivisible', on_indivisible)):
        if policy not in ('error', 'replicate'):
            raise ValueError(f"{name} must be 'error' or 'replicate', not {policy!r}")


def _check_names(names: Sequence[str | None], shape: Sequence[int] | None) -> None:
    text = [n for n in names if isinstance(n, str)]
    twice = sorted({n for n in text if text.count(n) > 1})
    if twice:
        raise ValueError(
            f'logical axis {twice[0]!r} names two dimensions of {tuple(names)}: one mesh axis '
            'cannot shard both; give one of them another name or None'
        )
    if shape is not None and len(shape) != len(names):
        raise ValueError(
            f'{len(names)} logical axes {tuple(names)} for an array of {len(shape)} dimensions '
            f'{tuple(shape)}'
        )


def _check_axes_exist(rule: tuple[str, MeshAxes], axis_sizes: Mapping[str, int]) -> None:
    for axis in as_tuple(rule[1]):
        if axis not in axis_sizes:
            raise ValueError(
                f'rule {rule!r} names mesh axis {axis!r}, but the mesh is '
                f'{describe_axes(axis_sizes)}.{nearest(axis, axis_sizes)}'
            )


def _explain(
    name: str,
    rule: tuple[str, MeshAxes] | None,
    lost: tuple[tuple[tuple[str, MeshAxes], str], ...],
    axis_sizes: Mapping[str, int],
) -> ResolvedDimension:
    if rule is not None:
        axes = as_tuple(rule[1])
        reason = 'a rule says so' if axes else 'a rule replicates it'
        if axes and all(axis_sizes.get(a) == 1 for a in axes):
            reason = f'a rule says so, but an axis of size 1 splits nothing: {", ".join(axes)}'
        return ResolvedDimension(name, rule[1], rule, lost, reason)
    reason = lost[0][1] if lost else 'no rule'
    return ResolvedDimension(name, None, None, lost, reason)


def _check_divides(
    resolved: ResolvedDimension,
    dim: int,
    shape: Sequence[int],
    axis_sizes: Mapping[str, int],
    policy: OnIndivisible,
) -> ResolvedDimension:
    axes = resolved.mesh_axes
    if not isinstance(axes, str | tuple):  # None, or PartitionSpec.UNCONSTRAINED
        return resolved
    ways = math.prod(axis_sizes[a] for a in as_tuple(axes))
    size = shape[dim]
    if size % ways == 0:
        return resolved
    why = f'size {size} does not divide by {ways}'
    if policy == 'replicate':
        rule = resolved.rule or (str(resolved.name), axes)
        return dataclasses.replace(
            resolved, mesh_axes=None, rule=None, lost=(*resolved.lost, (rule, why)), reason=why
        )
    above = -(-size // ways) * ways
    sizes = f'{above - ways} or {above}' if above > ways else f'{above}'
    raise ValueError(
        f'dimension {dim} ({resolved.name!r}) of shape {tuple(shape)}: {size} does not divide by '
        f'{ways}, the size of mesh {"axes" if isinstance(axes, tuple) else "axis"} {axes!r}. Use '
        f'{sizes}, another mesh, or the rule ({resolved.name!r}, None).'
    )
