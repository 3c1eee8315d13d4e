"""The layouts of `configs/partitioning` as values: the mesh and the rules of a partitioner.

A user of gin includes a file; a search and the advice of a forecast change a partitioner. A test
compares both.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

from partitioning import (
    AxisRules,
    BasePartitioner,
    MeshConfig,
    PjitPartitioner,
    fsdp_logical_axis_rules,
)
from partitioning.rules import MeshAxes, as_tuple
from train.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Layout:
    """A file of configs/partitioning with the sizes of its mesh.

    Attributes:
      preset: the name of the file, or '' for the layout that the run has.
      sizes: the macros of the file that decide its mesh, with their values.
    """

    preset: str
    sizes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        if not self.preset:
            return "the run's"
        return ' '.join([self.preset, *(str(size) for _, size in self.sizes)])


def _rules(
    *,
    layers: MeshAxes = None,
    batch: MeshAxes = 'data',
    model: MeshAxes = 'model',
    kv_heads: MeshAxes = 'model',
    embed: MeshAxes = None,
    second_embed: MeshAxes = None,
    length: MeshAxes = None,
    residual_length: MeshAxes = None,
    projection_length: MeshAxes = None,
) -> list[tuple[str, MeshAxes]]:
    """The rules of `configs/partitioning/rules.gin`, for the mesh axes of each kind of dimension.

    `model` has heads, MLP and vocabulary. `second_embed` is for arrays in which another dimension
    takes `embed`.
    """
    return [
        ('layers', layers),
        ('batch', batch),
        ('projection_length', projection_length),  # before 'heads', which have the rest
        ('vocab', model),
        ('heads', model),
        ('kv_heads', kv_heads),
        ('mlp', model),
        ('expert', None),
        ('expert_mlp', model),
        ('embed', embed),
        ('embed', second_embed),
        ('joined_kv', model),
        ('relpos_buckets', None),
        ('kv', None),
        ('length', length),
        ('residual_length', residual_length),
    ]


_RULES: dict[str, list[tuple[str, MeshAxes]]] = {
    'fsdp': _rules(batch=('data', 'model'), model=None, kv_heads=None, embed=('data', 'model')),
    'zero': _rules(),
    'three_d': _rules(batch=('data', 'fsdp'), embed='fsdp'),
    'fsdp_tensor': _rules(embed='data', residual_length='model', projection_length='model'),
    'few_kv_heads': _rules(
        model=('model', 'group'),
        embed=('data', 'group'),
        second_embed='data',
        residual_length=('model', 'group'),
    ),
    'context': _rules(
        embed=('data', 'context'),
        length='context',
        residual_length=('context', 'model'),
        projection_length='context',
    ),
    'pipeline': _rules(
        layers='stage',
        batch=('stage', 'data'),
        embed=('stage', 'data'),
        second_embed='data',
        residual_length='model',
    ),
}
# The mesh axes between 'data' and the end, each with the macro that has its size. The other presets
# have the axes of T5X: 'data' and 'model'.
_AXES = {
    'three_d': {'fsdp': 'FSDP_PARTITIONS', 'model': 'NUM_PARTITIONS'},
    'few_kv_heads': {'model': 'NUM_PARTITIONS', 'group': 'HEAD_GROUPS'},
    'context': {'context': 'CONTEXT_PARTITIONS', 'model': 'NUM_PARTITIONS'},
    'pipeline': {'stage': 'STAGES', 'model': 'NUM_PARTITIONS'},
}
# The axis over slices, of presets that say which one it is.
_SLICE_AXES = {'three_d': None, 'few_kv_heads': 'replica', 'context': 'replica'}


def count_shards(layout: Layout, num_devices: int) -> dict[str, int] | None:
    """Returns into how many shards a preset divides each logical axis, the batch axis included.

    `num_devices` is the number of devices of a slice, which `data` divides among the other axes.
    Returns the number by logical axis, or None if the axes do not divide the devices.
    """
    macros, sizes = _AXES.get(layout.preset, {'model': 'NUM_PARTITIONS'}), dict(layout.sizes)
    axes = {axis: sizes.get(macro, 1) for axis, macro in macros.items()}
    axes['data'], rest = divmod(num_devices, math.prod(axes.values()))
    counts: dict[str, int] = {}
    for name, entry in _RULES[layout.preset]:
        counts.setdefault(name, math.prod(axes[axis] for axis in as_tuple(entry)))
    return None if rest else counts


def lay_out(partitioner: BasePartitioner, layout: Layout) -> PjitPartitioner:
    """Returns a partitioner with the mesh and the rules of a preset, and the policies of another.

    Raises a ConfigError if the partitioner has no rules that could be replaced.
    """
    if not isinstance(partitioner, PjitPartitioner):
        raise ConfigError(
            f'the layout of a {type(partitioner).__name__} cannot be changed: use a PjitPartitioner'
        )
    given, rules = partitioner.logical_axis_rules, _RULES[layout.preset]
    sizes, source = dict(layout.sizes), cast(Any, partitioner.mesh_source)
    mesh: MeshConfig | int = sizes.get('NUM_PARTITIONS', 1)
    if axes := _AXES.get(layout.preset):
        if layout.preset in _SLICE_AXES:
            slice_axis = _SLICE_AXES[layout.preset]
        else:  # the axis of a run with the same axes
            same = isinstance(source, MeshConfig) and {*source.axes} == {'data', *axes}
            slice_axis = source.slice_axis if same else None
        mesh_axes = {'data': -1} | {axis: sizes[macro] for axis, macro in axes.items()}
        mesh = MeshConfig(axes=mesh_axes, slice_axis=slice_axis)
    return PjitPartitioner(
        mesh,
        AxisRules(
            rules,
            on_unmatched=given.on_unmatched,
            on_indivisible=given.on_indivisible,
            names=given.names,
            optimizer=fsdp_logical_axis_rules(rules) if layout.preset == 'zero' else None,
        ),
    )
