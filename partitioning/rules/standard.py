"""Rule sets: T5X's table for transformers, and fully sharded data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from partitioning.rules.names import (
    AxisRules,
    LogicalAxisRules,
    MeshAxes,
    as_tuple,
    check_rules,
    nearest,
)

_BATCH_AXES = ('replica', 'data', 'fsdp', 'expert')
# The axes that standard_logical_axis_rules knows.
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


def fsdp_logical_axis_rules(
    rules: LogicalAxisRules,
    axes: str | Sequence[str] = 'data',
    *,
    names: Sequence[str] = ('embed',),
) -> LogicalAxisRules:
    """`rules`, with arrays sharded over the data axes too.

    As `logical_axis_rules` of a partitioner they make fully sharded data parallelism (FSDP, ZeRO
    stage 3); as its `optimizer_axis_rules`, with the parameters left to `rules`, ZeRO stage 1.
    Arrays with none of `names` stay as `rules` say.

    Args:
      rules: in order of priority. Policies that they have are kept.
      axes: the data axes of the mesh.
      names: the logical axes that go over them, the first of an array's in this order. Activations
        keep theirs: their 'batch' takes the data axes first.

    Raises:
      ValueError: rules that are none, or no names and axes to add.
    """
    given, added = check_rules(rules), check_rules((name, axes) for name in names)
    if isinstance(names, str) or not added or not as_tuple(added[0][1]):
        raise ValueError(f'names={names!r} over axes={axes!r}: give one or more of each, in a list')
    known = {name for name, _ in given}
    for name in names:
        if name not in known:
            raise ValueError(f'no rule for {name!r} to add axes to.{nearest(name, known)}')
    first = [rule for rule in given if set(as_tuple(rule[1])) & set(as_tuple(axes))]
    first = [rule for rule in first if rule[0] not in names]
    made = [*first, *added, *(rule for rule in given if rule not in first)]
    return rules.with_rules(made) if isinstance(rules, AxisRules) else made


def _check_all_used(mesh_axes: Sequence[str], added: LogicalAxisRules) -> None:
    used = {*STANDARD_MESH_AXES, *(axis for _, axes in added for axis in as_tuple(axes))}
    for axis in mesh_axes:
        if axis not in used:
            raise ValueError(
                f'no standard rule uses the mesh axis {axis!r}, so everything would be replicated '
                f"over it; add one, for example ('mlp', {axis!r}), or call it one of "
                f'{", ".join(STANDARD_MESH_AXES)}.{nearest(axis, STANDARD_MESH_AXES)}'
            )
