"""The loop in which microbatches pass from stage to stage.

Suffixes of array names: B rows of a device, R rows of a device in one microbatch, G groups of
microbatches, S stages, L length, D embed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.rules import from_tuple
from train.errors import ConfigError
from train.models.pipeline.stages import Stages
from train.models.pipeline.weights import choose_weights, gather_weights

# Maps (weights of consecutive layers, their numbers, x_BLD, tree, key) to x_BLD.
ApplyLayers = Callable[[Any, jax.Array, jax.Array, Any, jax.Array | None], jax.Array]


def run_pipeline(
    stages: Stages,
    apply: ApplyLayers,
    params: Any,
    names: Any,
    cast: Callable[[Any], Any],
    x_BLD: jax.Array,
    tree: Any,
    key: jax.Array | None,
    policy: Callable[..., Any] | None,
) -> jax.Array:
    """Applies layers to a batch, stage by stage.

    Step t of the loop runs visit t - s on stage s. A visit is one microbatch in one group of
    layers. The microbatches come in groups of as many as there are stages. A group makes all its
    repeats before the next one starts, so what leaves the last stage is at once what the first
    stage needs next, and no stage stores it.

    Each stage keeps the rows of `groups` microbatches. In a group, microbatch n starts on stage n.
    Their rows move one stage to the left in every step until each has been on stage 0, and results
    enter on the last stage and move to the left in the same way. Returns the residual stream after
    the last layer. Raises a ConfigError if the microbatches would not have equal numbers of rows.

    Args:
      apply: applies consecutive layers. It sees the rows of one microbatch on one device.
      names: the logical axes of each array of `params`.
      cast: casts `params` to the dtypes in which they are used.
      tree: other arrays for all layers. Those whose first dimension is the batch are divided into
        microbatches.
      key: a random key, or None. Each microbatch has its own on each of the devices that share it.
      policy: what the backward pass keeps of the layers, as for `jax.checkpoint`, if microbatches
        pass through the stages more than once. `apply` decides otherwise.
    """
    rows, parts = x_BLD.shape[0], stages.pipeline.num_microbatches
    if rows % (parts * stages.data):
        raise ConfigError(
            f'a batch of {rows} rows cannot be divided into {parts} microbatches (Pipeline.'
            f'num_microbatches), each over {stages.data} shards of {stages.data_axes}: use a '
            f'multiple of {parts * stages.data} rows, or fewer microbatches'
        )
    sizes = jax.sharding.get_abstract_mesh().shape
    at = stages.row_axes.index(stages.axis)
    before, after = stages.row_axes[:at], stages.row_axes[at + 1 :]
    shards = [math.prod(sizes[axis] for axis in axes) for axes in (before, (stages.axis,), after)]
    leaves, structure = jax.tree.flatten(tree)
    divided = [leaf.shape[0] == rows for leaf in leaves]
    # All stages see these rows, for all microbatches pass through all stages.
    leaves = [
        leaf.reshape(*shards, -1, *leaf.shape[1:]) if by_row else leaf
        for leaf, by_row in zip(leaves, divided, strict=True)
    ]
    spec = PartitionSpec(from_tuple(before), None, from_tuple(after))
    weights = gather_weights(stages, params, names, cast)
    of_weights = PartitionSpec(from_tuple(stages.data_axes), stages.axis)

    def run(weights: Any, x_BLD: jax.Array, leaves: list[Any], key: Any) -> jax.Array:
        def find(number: jax.Array, group: jax.Array) -> Any:
            """The arrays of a microbatch."""
            found = [
                leaf.reshape(stages.count, -1, stages.groups, *leaf.shape[4:])[number, :, group]
                if by_row
                else leaf
                for leaf, by_row in zip(leaves, divided, strict=True)
            ]
            return jax.tree.unflatten(structure, found)

        if key is not None and stages.data_axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(stages.data_axes))
        return _run_on_stage(stages, apply, weights, x_BLD, find, key, policy)

    return jax.shard_map(
        run,
        in_specs=(
            jax.tree.map(lambda _: of_weights, weights),
            PartitionSpec(stages.row_axes),
            [spec if by_row else PartitionSpec() for by_row in divided],
            PartitionSpec(),
        ),
        out_specs=PartitionSpec(stages.row_axes),
        axis_names={*stages.row_axes},
        check_vma=False,  # `apply` need not say which of its constants differ between devices
    )(weights, x_BLD, leaves, key)


def _run_on_stage(
    stages: Stages,
    apply: ApplyLayers,
    weights: Any,
    x_BLD: jax.Array,
    find: Callable[[jax.Array, jax.Array], Any],
    key: jax.Array | None,
    policy: Callable[..., Any] | None,
) -> jax.Array:
    """The loop on one device. `find` returns the arrays of a microbatch, by number and group."""
    count, repeats, visits = stages.count, stages.pipeline.repeats, stages.visits
    stage = jax.lax.axis_index(stages.axis)
    weights = jax.tree.map(lambda x: x[0].reshape(repeats, stages.layers, *x.shape[2:]), weights)
    right = [(s, (s + 1) % count) for s in range(count if repeats > 1 else count - 1)]

    def divide(visit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the group, the repeat, and the number of the microbatch in its group."""
        visit = jnp.clip(visit, 0, visits - 1)
        return visit // (count * repeats), visit // count % repeats, visit % count

    def run_visit(weights: Any, visit: jax.Array, x_RLD: jax.Array) -> jax.Array:
        group, repeat, number = divide(visit)
        chosen = choose_weights(weights, repeat)
        first = (repeat * count + stage) * stages.layers
        own = None if key is None else jax.random.fold_in(key, group * count + number)
        indices = first + jnp.arange(stages.layers)
        return apply(chosen, indices, x_RLD, find(number, group), own)

    if stages.pipeline.recompute_stages:
        run_visit = jax.checkpoint(run_visit, prevent_cse=False)
    elif repeats > 1:
        # The backward pass chooses the weights of each visit again. They would be kept otherwise.
        run_visit = jax.checkpoint(run_visit, prevent_cse=False, policy=policy)

    def step(carry: Any, time: jax.Array) -> tuple[Any, None]:
        waiting_GRLD, done_GRLD, passed_RLD = carry
        group, repeat, _ = divide(time)  # of stage 0
        starts = repeat == 0
        started_RLD = jax.lax.dynamic_index_in_dim(waiting_GRLD, group, keepdims=False)
        x_RLD = jnp.where((stage == 0) & starts, started_RLD, passed_RLD)
        waiting_GRLD = _shift(stages, waiting_GRLD, group, None, starts)
        x_RLD = run_visit(weights, time - stage, x_RLD)
        group, repeat, _ = divide(time - (count - 1))  # of the last stage
        ends = (repeat == repeats - 1) & (time >= count - 1)
        done_GRLD = _shift(stages, done_GRLD, group, x_RLD, ends)
        return (waiting_GRLD, done_GRLD, jax.lax.ppermute(x_RLD, stages.axis, right)), None

    x_RGLD = x_BLD.reshape(-1, stages.groups, *x_BLD.shape[1:])
    waiting_GRLD = x_RGLD.swapaxes(0, 1)
    # Idle steps compute with the rows of some microbatch, whose values are as harmless as any.
    carry = (waiting_GRLD, jnp.zeros_like(waiting_GRLD), waiting_GRLD[0])
    (_, done_GRLD, _), _ = jax.lax.scan(step, carry, jnp.arange(visits + count - 1))
    return done_GRLD.swapaxes(0, 1).reshape(x_BLD.shape)


def _shift(
    stages: Stages, x_GRLD: jax.Array, group: jax.Array, enters: jax.Array | None, moves: jax.Array
) -> jax.Array:
    """Moves the rows of a group by one stage to the left, if it `moves`.

    The last stage then holds the rows that enter, if any do.
    """
    left = [(s + 1, s) for s in range(stages.count - 1)]
    held = jax.lax.dynamic_index_in_dim(x_GRLD, group, keepdims=False)
    moved = jax.lax.ppermute(held, stages.axis, left)
    if enters is not None:
        is_last = jax.lax.axis_index(stages.axis) == stages.count - 1
        moved = jnp.where(is_last, enters, moved)
    moved = jnp.where(moves, moved, held)
    return jax.lax.dynamic_update_index_in_dim(x_GRLD, moved, group, 0)
