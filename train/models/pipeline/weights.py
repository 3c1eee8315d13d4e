"""The weights of each stage, gathered once per step.

Shards of parameters are gathered over the axes of the batch before the first microbatch, not in
every microbatch, and their gradients are summed over these axes after the last one. In between,
each device has its own copy, along a first dimension that is sharded over the axes of the batch:
gradients of copies are not summed, so the loop over the microbatches sends activations only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import spmd
from jax.sharding import PartitionSpec

from partitioning.rules import (
    as_tuple,
    from_tuple,
    logical_to_mesh_axes,
    sharding_axes,
    spec_str,
)
from train.errors import ConfigError
from train.models.pipeline.stages import Stages


def gather_weights(stages: Stages, params: Any, names: Any, cast: Callable[[Any], Any]) -> Any:
    """Gives each stage the weights of its layers.

    The parameters are arrays [layers, ...] with their logical axes. `cast` casts them to the dtypes
    in which they are sent and used. Returns a tree of pairs, each [copies, layers, ...]. The copies
    are sharded over the axes of the batch, and the layers over the stages. The first array has the
    weights, in the order in which the stages run the layers. The second one is read by nothing:
    `choose_weights` sends it the gradients, in the dtype of the parameters. It is None if the
    weights have this dtype.
    """
    leaves, structure = jax.tree.flatten(params)
    named = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple))
    specs = [_find_spec(stages, *pair) for pair in zip(leaves, named, strict=True)]
    wanted = jax.tree.leaves(jax.eval_shape(cast, params))
    equal = [x.dtype == y.dtype for x, y in zip(leaves, wanted, strict=True)]

    def gather(leaves: list[jax.Array]) -> list[Any]:
        used = jax.tree.leaves(cast(jax.tree.unflatten(structure, leaves)))
        gathered = []
        for x, weights, spec, is_equal in zip(leaves, used, specs, equal, strict=True):
            weights = weights if is_equal else jax.lax.stop_gradient(weights)
            anchor = None if is_equal else _gather(stages, x, spec)
            gathered.append((_gather(stages, weights, spec), anchor))
        return gathered

    out_specs = [
        PartitionSpec(
            from_tuple(stages.data_axes), *(from_tuple(_kept(stages, axes)) for axes in spec)
        )
        for spec in specs
    ]
    gathered = jax.shard_map(
        gather,
        in_specs=(specs,),
        out_specs=[
            (spec, None if is_equal else spec)
            for spec, is_equal in zip(out_specs, equal, strict=True)
        ],
    )(leaves)
    return jax.tree.unflatten(structure, gathered)


def choose_weights(weights: Any, repeat: jax.Array) -> Any:
    """Returns the weights that a stage uses in one repeat, a tree of arrays [layers, ...].

    `weights` are the pairs of `gather_weights` on one device, each [repeats, layers, ...].
    """

    def choose(pair: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        x = pair[0] if pair[1] is None else _use(*pair)
        # Without a choice, all visits use the same array, and the backward pass keeps it only once.
        return x[0] if len(x) == 1 else jax.lax.dynamic_index_in_dim(x, repeat, keepdims=False)

    return jax.tree.map(choose, weights, is_leaf=lambda x: isinstance(x, tuple))


@jax.custom_vjp
def _use(weights: jax.Array, anchor: jax.Array) -> jax.Array:
    """Returns `weights`, whose gradient goes to `anchor` in the dtype of that array.

    A loop adds up the gradients of its microbatches in the dtype of what it closes over. That
    should not be the dtype of the computation.
    """
    del anchor
    return weights


def _use_forward(weights: jax.Array, anchor: jax.Array) -> tuple[jax.Array, jax.Array]:
    return weights, jnp.zeros((), anchor.dtype)


def _use_backward(residual: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros_like(gradient), gradient.astype(residual.dtype)


_use.defvjp(_use_forward, _use_backward)


def _find_spec(stages: Stages, x: jax.Array, names: tuple[Any, ...]) -> PartitionSpec:
    """Returns the layout of a parameter, which must be sharded over the stages first."""
    mesh, rules = jax.sharding.get_abstract_mesh(), spmd.get_logical_axis_rules()
    spec = logical_to_mesh_axes(names, rules, mesh=mesh, shape=x.shape)
    spec = getattr(spec, 'inside', spec)
    if sharding_axes(spec[0]) != (stages.axis,):
        raise ConfigError(
            f'the rules lay out a parameter with the logical axes {names} as {spec_str(spec)}: put '
            f"('layers', {stages.axis!r}) before the rules of its other axes"
        )
    for axes in spec:
        kept = _kept(stages, axes)
        if as_tuple(axes)[: len(kept)] != kept:
            raise ConfigError(
                f'the rules lay out a parameter with the logical axes {names} as {spec_str(spec)}: '
                f'in a pipeline, the axes of the batch {stages.data_axes} come last'
            )
    return spec


def _kept(stages: Stages, axes: Any) -> tuple[str, ...]:
    return tuple(axis for axis in as_tuple(axes) if axis not in stages.data_axes)


def _gather(stages: Stages, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns this device's copy of the weights of its stage, [1, layers, ...]."""
    if stages.pipeline.repeats > 1:
        x = _reorder(stages, x)
    for dimension, axes in enumerate(spec):
        gathered = tuple(axis for axis in as_tuple(axes) if axis in stages.data_axes)
        if gathered:
            x = jax.lax.all_gather(x, gathered, axis=dimension, tiled=True)
    used = {axis for axes in spec for axis in as_tuple(axes)}
    equal = tuple(axis for axis in stages.data_axes if axis not in used)
    return (jax.lax.pcast(x, equal, to='varying') if equal else x)[None]


def _reorder(stages: Stages, x: jax.Array) -> jax.Array:
    """Moves groups of layers from the stages that hold them to the stages that run them.

    Stage s holds the groups s * repeats, ... in order, and runs the groups s, s + stages, ... In
    each of `repeats` rounds, every stage sends one group and receives one.
    """
    count, repeats = stages.count, stages.pipeline.repeats
    groups = np.arange(count * repeats)
    # Each round has one group of every `repeats` consecutive ones, and one of each remainder.
    rounds = (groups + groups // math.lcm(count, repeats)) % repeats
    stage = jax.lax.axis_index(stages.axis)
    x = x.reshape(repeats, stages.layers, *x.shape[1:])
    received, places = [], []
    for number in range(repeats):
        sent = groups[rounds == number]  # by the stage that sends it
        to = sent % count
        moved = x[jnp.asarray(sent % repeats)[stage]]
        received.append(
            jax.lax.ppermute(moved, stages.axis, [(s, int(d)) for s, d in enumerate(to)])
        )
        places.append((sent // count)[np.argsort(to)])  # by the stage that receives it
    order = jnp.argsort(jnp.asarray(places)[:, stage])
    return jnp.stack(received)[order].reshape(-1, *x.shape[2:])
