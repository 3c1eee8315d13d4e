"""Rule sets: T5X's table for transformers, and fully sharded data parallelism."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from partitioning.rules.axis_rules import AxisRules, check_rules
from partitioning.rules.checks import MeshAxes, as_tuple, from_tuple, nearest
from partitioning.rules.names import LogicalAxisRules

_BATCH_AXES = ('replica', 'data', 'fsdp', 'expert')
# The mesh axes that shard the batch if no rule does. EasyLM, FJFormer and Levanter use them.
USUAL_BATCH_AXES = ('replica', 'data', 'fsdp', 'dp', 'batch', 'expert')
# The mesh axes that standard_logical_axis_rules can use.
STANDARD_MESH_AXES = (*_BATCH_AXES, 'sequence', 'stage', 'model')


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
      additional_rules: further rules. They come last, so they decide only names without a rule.
      mesh_axes: the axes of the mesh. The batch is sharded over 'replica', 'data', 'fsdp' and
        'expert', as far as the mesh has them. 'fsdp' also shards the 'embed' dimension of
        parameters, 'sequence' shards 'length', 'stage' shards 'stage', and 'expert' adds T5X's
        rules for mixtures of experts.

    Raises:
      ValueError: if dims are neither 1 nor 2, or if no rule would use one of the mesh axes.
    """
    if isinstance(mesh_axes, str) or not isinstance(mesh_axes, Sequence):
        raise ValueError(f'mesh_axes={mesh_axes!r} must be axis names, such as mesh.axis_names')
    dims = (activation_partitioning_dims, parameter_partitioning_dims)
    added = () if additional_rules is None else check_rules(additional_rules)
    return list(_standard_rules(dims, added, tuple(mesh_axes)))


@functools.lru_cache(maxsize=128)
def _standard_rules(
    dims: tuple[int, int], added: LogicalAxisRules, mesh_axes: tuple[str, ...]
) -> tuple[tuple[str, MeshAxes], ...]:
    if not set(dims) <= {1, 2}:
        raise ValueError(
            f'activation_partitioning_dims={dims[0]!r} and parameter_partitioning_dims={dims[1]!r} '
            'must each be 1 or 2'
        )
    used = {*STANDARD_MESH_AXES, *(axis for _, axes in added for axis in as_tuple(axes))}
    for axis in mesh_axes:
        if axis not in used:
            usual = tuple(a for a in mesh_axes if a in USUAL_BATCH_AXES)
            others = tuple(a for a in mesh_axes if a != axis)
            example = [('batch', from_tuple(usual or others[:1] or mesh_axes)), ('mlp', axis)]
            raise ValueError(
                f'no standard rule uses mesh axis {axis!r}, so every array would be replicated '
                f'over it. Write the rules for your names, as in layout={example!r}, '
                f'or rename the axis to one of {", ".join(STANDARD_MESH_AXES)}.'
                f'{nearest(axis, STANDARD_MESH_AXES)}'
            )
    batch = tuple(axis for axis in _BATCH_AXES if axis in mesh_axes)
    model, data = (axis if axis in mesh_axes else None for axis in ('model', 'data'))
    for setting, dim, axis in (('activation', dims[0], 'model'), ('parameter', dims[1], 'data')):
        if dim == 2 and axis not in mesh_axes:
            raise ValueError(
                f'{setting}_partitioning_dims=2 shards over mesh axis {axis!r}, but the mesh axes '
                f'are {mesh_axes}: use 1, or add the axis'
            )
    embed: list[MeshAxes] = ['fsdp'] if 'fsdp' in mesh_axes else []
    embed += [model] if dims[0] == 2 else []
    embed += [data] if dims[1] == 2 else []
    rules: list[tuple[str, MeshAxes]] = [('batch', from_tuple(batch))]
    if 'expert' in mesh_axes:
        # Like 'batch', it comes before 'embed', which may name the same axes.
        rules += [('expert_replicas', from_tuple(tuple(a for a in batch if a != 'expert')))]
    rules += [
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
            ('unmodeled', None),
        ]
    if 'stage' in mesh_axes:
        rules += [('stage', 'stage')]
    return (*rules, *added)


def fsdp_logical_axis_rules(
    rules: LogicalAxisRules,
    axes: str | Sequence[str] = 'data',
    *,
    names: Sequence[str] = ('embed',),
) -> LogicalAxisRules:
    """`rules`, changed so that arrays are also sharded over the data axes.

    As the layout of a partitioner they give fully sharded data parallelism (FSDP, ZeRO stage 3).
    As `AxisRules(rules, optimizer=...)`, next to the original rules for the parameters, they give
    ZeRO stage 1. Arrays that have none of `names` are laid out as before.

    Args:
      rules: rules in order of priority. Their policies are kept.
      axes: the data axes of the mesh.
      names: the logical axes to shard over the data axes; the first of them that an array has is
        sharded. Activations do not change, because their 'batch' takes the data axes first.

    Raises:
      ValueError: if a rule is malformed, if `names` or `axes` is empty, or if a name has no rule.
    """
    given, added = check_rules(rules), check_rules((name, axes) for name in names)
    if isinstance(names, str) or not added or not as_tuple(added[0][1]):
        raise ValueError(
            f'names={names!r} and axes={axes!r} must each hold at least one entry, and names must '
            "be a list, such as ['embed']"
        )
    known = {name for name, _ in given}
    for name in names:
        if name not in known:
            raise ValueError(
                f'names={tuple(names)} has {name!r}, which has no rule.{nearest(name, known)}'
            )
    first = [rule for rule in given if set(as_tuple(rule[1])) & set(as_tuple(axes))]
    first = [rule for rule in first if rule[0] not in names]
    made = [*first, *added, *(rule for rule in given if rule not in first)]
    return rules.with_rules(made) if isinstance(rules, AxisRules) else made
