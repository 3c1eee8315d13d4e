"""The settings and the stages of a pipeline: its mesh axes, and every check of sizes."""

from __future__ import annotations

import dataclasses
import math

import jax
from flax.core import spmd
from jax.sharding import AbstractMesh

from partitioning.rules import LogicalAxisRules, describe_axes, resolve_axes, sharding_axes
from train.errors import ConfigError, check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Runs scanned layers in stages, over the mesh axis that the rules give to 'layers'.

    A stage runs on the devices of one index of this axis and holds the parameters of its layers.
    The batch is divided into microbatches, which pass from stage to stage. Out of
    num_microbatches * repeats + stages - 1 steps of a stage, stages - 1 are idle.

    Attributes:
      num_microbatches: the number of microbatches, a multiple of the number of stages.
      repeats: how often a microbatch passes through all stages. The layers are divided into
        stages * repeats groups, and group n belongs to stage n % stages. More repeats leave stages
        idle for a smaller part of the time, and send activations and parameters more often. They
        need `remat`.
      recompute_stages: whether the backward pass first recomputes a stage from its input. A device
        then keeps one activation per microbatch instead of one per microbatch and layer, and
        computes the forward pass once more.
    """

    num_microbatches: int
    repeats: int = 1
    recompute_stages: bool = False

    def __post_init__(self) -> None:
        check_fields(Pipeline, self, 'Pipeline.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """Where a pipeline runs.

    Attributes:
      axis: the mesh axis of the stages.
      row_axes: the mesh axes of the rows of a batch, in order, with `axis`. Each stage keeps its
        share of the rows before the first layer and after the last one.
      data: the number of shards of a microbatch.
      layers: the number of layers that a stage runs without a break.
    """

    axis: str
    count: int
    row_axes: tuple[str, ...]
    data: int
    pipeline: Pipeline
    layers: int

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes of the rows of a microbatch."""
        return tuple(axis for axis in self.row_axes if axis != self.axis)

    @property
    def groups(self) -> int:
        """The number of microbatches whose rows a stage keeps."""
        return self.pipeline.num_microbatches // self.count

    @property
    def visits(self) -> int:
        """The number of groups of layers that a stage runs, over all microbatches."""
        return self.pipeline.num_microbatches * self.pipeline.repeats


def find_stages(pipeline: Pipeline | None, num_layers: int, block: int) -> Stages | None:
    """Returns where a pipeline runs, from the mesh and the rules of the context.

    Returns the stages, or None if there is only one. Raises a ConfigError if the settings and the
    rules disagree, or if sizes do not divide.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), spmd.get_logical_axis_rules()
    if mesh.empty or not rules:
        return None
    axes = _axes_of('layers', rules, mesh)
    if pipeline is None:
        shards = math.prod(dict(mesh.shape)[axis] for axis in axes)
        if shards > 1:
            raise ConfigError(
                f"the rules shard 'layers' over {axes}, so every device would gather all "
                f'{num_layers} layers: set TransformerConfig.pipeline = @Pipeline() to run them as '
                f"{shards} stages, or write ('layers', None)"
            )
        return None
    if len(axes) != 1:
        raise ConfigError(
            f"TransformerConfig.pipeline is set, and the rules lay out 'layers' over {axes or None}"
            f' of the mesh {describe_axes(mesh)}: it must be one axis. Put ('
            "'layers', 'stage') first in the rules and add the axis 'stage' to the mesh, or set "
            'TransformerConfig.pipeline = None'
        )
    (axis,), sizes = axes, dict(mesh.shape)
    rows = tuple(a for a in _axes_of('batch', rules, mesh) if sizes[a] > 1)
    count, repeats = sizes[axis], pipeline.repeats
    if count == 1:
        return None
    if num_layers % (count * repeats):
        raise ConfigError(
            f'{num_layers} layers cannot be divided into {count} stages of {axis!r} x {repeats} '
            'repeats: change num_layers, the mesh or Pipeline.repeats'
        )
    if pipeline.num_microbatches % count:
        raise ConfigError(
            f'Pipeline.num_microbatches is {pipeline.num_microbatches}: use a multiple of the '
            f'{count} stages of {axis!r}'
        )
    layers = num_layers // (count * repeats)
    if layers % block:
        raise ConfigError(
            f'a stage runs {layers} layers without a break, which is not a multiple of the {block} '
            'layers of TransformerConfig.scan_unroll or remat: change these, or the number of '
            'stages or repeats'
        )
    return Stages(
        axis=axis,
        count=count,
        row_axes=(*rows, *(() if axis in rows else axes)),
        data=math.prod(sizes[a] for a in rows if a != axis),
        pipeline=pipeline,
        layers=layers,
    )


def _axes_of(name: str, rules: LogicalAxisRules, mesh: AbstractMesh) -> tuple[str, ...]:
    """The mesh axes of a logical axis; none if it has no rule."""
    if name not in {rule[0] for rule in rules}:
        return ()
    return sharding_axes(resolve_axes((name,), rules, mesh=mesh)[0].mesh_axes)
