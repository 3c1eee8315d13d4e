"""Gradients averaged in a narrow dtype: AutoDist's compressors, as optax transformations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.products.sums import varying_axes
from partitioning.rules import MeshLike, as_tuple, check_axes, describe_axes, from_tuple, num_shards

if TYPE_CHECKING:
    import optax

AxisName = str | tuple[str, ...]


class CompressionState(NamedTuple):
    """The rounding errors of each worker, which a step leaves for the next one.

    Attributes:
      error: a tree like the parameters, of arrays [workers, *shape] in float32 or wider. Inside a
        shard_map over the workers they are [1, *shape]. Parameters that are not floating
        have None. Without error feedback, `error` is None.
    """

    error: Any


def compress_gradients(
    dtype: Any = 'bfloat16',
    *,
    error_feedback: bool = False,
    axis_name: AxisName | None = None,
    mesh: MeshLike | None = None,
) -> optax.GradientTransformation:
    """Rounds gradients to `dtype`, averages them over the workers, and casts them back.

    AutoDist's HorovodCompressor is `compress_gradients('float32')`, HorovodCompressorEF is the same
    with error_feedback=True, and NoneCompressor is `optax.identity()`.

    Usage:
      tx = optax.chain(
          compress_gradients(error_feedback=True, axis_name='data', mesh=mesh), optax.adam(1e-3))
      specs = compression_specs(jax.eval_shape(tx.init, params), 'data')

      @functools.partial(
          jax.shard_map, mesh=mesh, in_specs=(P(), specs, P('data')), out_specs=(P(), specs))
      def step(params, opt_state, rows):
          # Without pcast, jax would sum the gradients before they are compressed.
          grads = jax.grad(loss)(jax.lax.pcast(params, 'data', to='varying'), rows)
          updates, opt_state = tx.update(grads, opt_state)
          return optax.apply_updates(params, updates), opt_state

    Outside shard_map (axis_name=None), jax averages gradients in their own dtype before they are
    rounded here. A value beyond the range of `dtype` becomes infinite, as in any cast.

    Args:
      dtype: the floating dtype in which workers send gradients. (With bfloat16 on CPU, the
        shard_map must be over all mesh axes.)
      error_feedback: whether to keep the rounding error and add it to the next gradient. Errors
        that are not finite are dropped.
      axis_name: the mesh axis or axes of the workers, in a `jax.shard_map` over them.
      mesh: the mesh, or the sizes of its axes. It is needed if error_feedback and axis_name are
        both set, because the state has an error for each worker.

    Raises:
      ValueError: if `dtype` is not floating, if `mesh` is missing or is given without `axis_name`,
        or if the mesh lacks an axis. `update` raises it if it runs outside a shard_map over the
        workers, if gradients are already summed, or if an error is not [1, *shape].
    """
    import optax  # imported here because it is heavy and only compression needs it

    try:
        sent = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f'dtype {dtype!r} is not a dtype: {error}') from error
    if not jnp.issubdtype(sent, jnp.floating):
        raise ValueError(f"dtype {sent} is not floating: use 'bfloat16', for example")
    workers = _count_workers(error_feedback, axis_name, mesh)

    def init(params: Any) -> CompressionState:
        def zeros(x: Any) -> Any:
            return jnp.zeros((workers, *jnp.shape(x)), _wide(x)) if _is_floating(x) else None

        return CompressionState(jax.tree.map(zeros, params) if error_feedback else None)

    def update(grads: Any, state: CompressionState, params: Any = None) -> tuple[Any, Any]:
        del params
        try:
            for axis in as_tuple(axis_name):
                jax.lax.axis_index(axis)
        except NameError as error:
            raise ValueError(
                f'compress_gradients(axis_name={axis_name!r}) must run inside a jax.shard_map over '
                f'{axis_name!r}; without a shard_map, remove axis_name'
            ) from error
        flat = jax.tree.leaves(grads)
        tree: Any = jax.tree.structure(grads)
        errors = tree.flatten_up_to(state.error) if error_feedback else [None] * len(flat)
        pairs = [_compressed(g, e, sent, axis_name) for g, e in zip(flat, errors, strict=True)]
        means = tree.unflatten([mean for mean, _ in pairs])
        if not error_feedback:
            return means, state
        return means, CompressionState(tree.unflatten([error for _, error in pairs]))

    return optax.GradientTransformation(init, update)


def compression_specs(state: Any, axis_name: AxisName | None) -> Any:
    """The specs of a state in a shard_map: errors are split by worker, the rest is replicated.

    The state may be a whole train state; `axis_name` is the mesh axis or axes of the workers.
    """
    by_worker = PartitionSpec(from_tuple(as_tuple(axis_name)))

    def specs(x: Any) -> Any:
        spec = by_worker if is_compression_state(x) else PartitionSpec()
        return jax.tree.map(lambda _: spec, x)

    return jax.tree.map(specs, state, is_leaf=is_compression_state)


def is_compression_state(x: Any) -> bool:
    """Whether `x` is the state of `compress_gradients`."""
    return isinstance(x, CompressionState)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _wide(x: Any) -> Any:
    """The dtype for sums: float32, or the dtype of `x` if it is wider."""
    return jnp.promote_types(jnp.result_type(x), jnp.float32)


def _count_workers(error_feedback: bool, axis_name: AxisName | None, mesh: MeshLike | None) -> int:
    """The number of workers that keep rounding errors."""
    if mesh is None:
        if error_feedback and axis_name is not None:
            raise ValueError(f'error_feedback over {axis_name!r} needs mesh= to count the workers')
        return 1
    if axis_name is None:
        raise ValueError(
            f"mesh= ({describe_axes(mesh)}) needs the axis of the workers, such as axis_name='data'"
        )
    check_axes(as_tuple(axis_name), mesh, 'axis_name')
    return num_shards(axis_name, mesh)


def _compressed(
    gradient: Any, error: Any, sent: Any, axis_name: AxisName | None
) -> tuple[Any, Any]:
    """The mean of one gradient over all workers, and this worker's new rounding error.

    The old and the new error are [1, *shape]. Both are None without error feedback.
    """
    if not _is_floating(gradient):
        return gradient, None
    wanted = gradient
    if error is not None:
        if error.shape != (1, *jnp.shape(gradient)):
            raise ValueError(
                f'a gradient of shape {jnp.shape(gradient)} has errors of shape {error.shape}, not '
                f'{(1, *jnp.shape(gradient))}: pass compression_specs(opt_state, {axis_name!r}) as '
                'in_specs and out_specs of the shard_map, and mesh= to compress_gradients'
            )
        wanted = gradient.astype(error.dtype) + error[0]
    # Without a barrier, XLA may remove a cast that is undone later, and nothing would be rounded.
    rounded = jax.lax.optimization_barrier(wanted.astype(sent))
    mean = rounded
    if axis_name is not None:
        # Under shard_map(check_vma=False), jax does not sum gradients, and no axis is in `own`.
        for axis in as_tuple(axis_name):
            own = varying_axes(jax.lax.axis_index(axis))
            if axis in own and axis not in varying_axes(gradient):
                raise ValueError(
                    f'a gradient of shape {jnp.shape(gradient)} is already summed over {axis!r} '
                    'without compression: take the gradient at '
                    f"jax.lax.pcast(params, {axis!r}, to='varying')"
                )
        total = jax.lax.psum(rounded, axis_name).astype(_wide(gradient))
        mean = total / jax.lax.psum(1, axis_name)
    if error is not None:
        lost = wanted - rounded.astype(wanted.dtype)
        error = jnp.where(jnp.isfinite(lost), lost, 0)[None]
    return mean.astype(gradient.dtype), error
