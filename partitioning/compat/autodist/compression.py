"""Gradients that travel in few bits: AutoDist's compressors, as optax transformations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.rules import (
    MeshLike,
    PaddedSpec,
    as_tuple,
    axis_sizes,
    check_spec,
    describe_axes,
)

if TYPE_CHECKING:
    import optax

AxisName = str | tuple[str, ...]


class CompressionState(NamedTuple):
    """What a step leaves to the next: the rounding errors of each worker.

    Attributes:
      error: like the parameters, of shape [workers, *shape] and float32 or wider; None for a
        parameter that is not floating. Inside a shard_map over the workers [1, *shape], each its
        own. Without error feedback there is none at all.
    """

    error: Any


def compress_gradients(
    dtype: Any = 'bfloat16',
    *,
    error_feedback: bool = False,
    axis_name: AxisName | None = None,
    mesh: MeshLike | None = None,
) -> optax.GradientTransformation:
    """Gradients rounded to `dtype` and back, and in between averaged over the workers.

    AutoDist's HorovodCompressor is `compress_gradients('float32')`, HorovodCompressorEF that with
    error_feedback=True, and NoneCompressor is `optax.identity()`.

    Usage:
      tx = optax.chain(
          compress_gradients(error_feedback=True, axis_name='data', mesh=mesh), optax.adam(1e-3))
      specs = compression_specs(jax.eval_shape(tx.init, params), 'data')
      shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
      opt_state = jax.jit(tx.init, out_shardings=shardings)(params)

      @functools.partial(jax.jit, donate_argnums=(0, 1))
      @functools.partial(
          jax.shard_map, mesh=mesh, in_specs=(P(), specs, P('data')), out_specs=(P(), specs))
      def step(params, opt_state, rows):
          # Each worker's own gradient: that of shared parameters would arrive summed already.
          grads = jax.grad(loss)(jax.lax.pcast(params, 'data', to='varying'), rows)
          updates, opt_state = tx.update(grads, opt_state)
          return optax.apply_updates(params, updates), opt_state

    Outside shard_map (axis_name=None) jax has averaged the gradients before any transformation sees
    them: they are rounded, but have travelled whole. A value beyond the range of `dtype` becomes
    infinite, as in any cast.

    Args:
      dtype: what travels, a floating type. (On CPU, XLA widens bfloat16 within its all-reduce, and
        needs a shard_map over all mesh axes, not some.)
      error_feedback: what rounding takes off is kept, and added to the next gradient. Errors that
        are not finite are dropped.
      axis_name: the mesh axis, or axes, of the workers, in a `jax.shard_map` over them.
      mesh: with both, the mesh, or the sizes of its axes: the state has an error for each worker.

    Returns:
      An optax.GradientTransformation, to be first of a chain. Only floating gradients are changed:
      others pass through as they are, not averaged. The result has the types of the gradients.

    Raises:
      ValueError: no floating type; a mesh without workers, or workers with errors and no mesh; an
        axis that the mesh lacks; and in `update`, workers outside a shard_map over them, gradients
        that are summed already, or errors that are not those of one worker.
    """
    import optax  # heavy, and only those who compress need it

    sent = _floating(dtype)
    workers = _workers(error_feedback, axis_name, mesh)

    def init(params: Any) -> CompressionState:
        def zeros(x: Any) -> Any:
            return jnp.zeros((workers, *jnp.shape(x)), _wide(x)) if _is_floating(x) else None

        return CompressionState(jax.tree.map(zeros, params) if error_feedback else None)

    def update(
        updates: Any, state: CompressionState, params: Any = None
    ) -> tuple[Any, CompressionState]:
        del params
        _check_inside(axis_name)
        errors = state.error if error_feedback else jax.tree.map(lambda _: None, updates)
        wanted = jax.tree.map(lambda g, e: _corrected(g, e, axis_name), updates, errors)
        rounded = jax.tree.map(lambda w: _rounded(w, sent), wanted)
        means = jax.tree.map(lambda g, r: _mean(g, r, axis_name), updates, rounded)
        if not error_feedback:
            return means, state
        return means, CompressionState(jax.tree.map(_lost, wanted, rounded, errors))

    return optax.GradientTransformation(init, update)


def compression_specs(state: Any, axis_name: AxisName | None, mesh_axes: Any = None) -> Any:
    """The specs of a state in which each worker has the errors of its own rounding.

    Args:
      state: of an optimizer, or of a whole training; abstract or not.
      axis_name: the mesh axis, or axes, of the workers.
      mesh_axes: the specs of its arrays without regard to the errors, such as those of
        `PjitPartitioner.get_mesh_axes`; by default all replicated, as in_specs of a shard_map over
        the workers have them.

    Returns:
      A tree like `state` of PartitionSpecs: the errors are split by worker, over `axis_name`.
    """
    workers = as_tuple(axis_name)
    first = workers[0] if len(workers) == 1 else workers or None

    def by_worker(spec: Any) -> Any:
        if isinstance(spec, PaddedSpec):
            return PaddedSpec(by_worker(spec.outside), by_worker(spec.inside))
        # The rest of an error is laid out as its parameter, over axes that workers leave free.
        rest = (tuple(a for a in as_tuple(axes) if a not in workers) for axes in tuple(spec)[1:])
        return PartitionSpec(first, *(a[0] if len(a) == 1 else a or None for a in rest))

    def of(specs: Any) -> Any:
        if not is_compression_state(specs):
            return specs
        return CompressionState(jax.tree.map(by_worker, specs.error, is_leaf=_is_spec))

    if mesh_axes is None:
        mesh_axes = jax.tree.map(lambda _: PartitionSpec(), state)
    return jax.tree.map(of, mesh_axes, is_leaf=lambda x: _is_spec(x) or is_compression_state(x))


def is_compression_state(x: Any) -> bool:
    """True for the state of `compress_gradients`."""
    return isinstance(x, CompressionState)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec | PaddedSpec)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _wide(x: Any) -> Any:
    """The type to add up in: float32, or that of `x` if it is wider."""
    return jnp.promote_types(jnp.result_type(x), jnp.float32)


def _floating(dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f'dtype {dtype!r} is no type of arrays: {error}') from error
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError(f"gradients cannot travel as {found}: choose a floating type, 'bfloat16'")
    return found


def _workers(error_feedback: bool, axis_name: AxisName | None, mesh: MeshLike | None) -> int:
    """How many workers have errors of their own."""
    if mesh is None:
        if error_feedback and axis_name is not None:
            raise ValueError(
                f'error_feedback over {axis_name!r} keeps an error for each worker: give mesh=, '
                'which says how many there are'
            )
        return 1
    if axis_name is None:
        raise ValueError(
            f'mesh= {describe_axes(axis_sizes(mesh))} says how many workers there are, and '
            "axis_name= which axis they are along: give both, such as axis_name='data', or none"
        )
    check_spec(PartitionSpec(as_tuple(axis_name)), mesh, 'axis_name')
    return math.prod(axis_sizes(mesh)[axis] for axis in as_tuple(axis_name))


def _check_inside(axis_name: AxisName | None) -> None:
    """Raises ValueError for workers that there are none of here."""
    try:
        for axis in as_tuple(axis_name):
            jax.lax.axis_index(axis)
    except NameError as error:
        raise ValueError(
            f'compress_gradients(axis_name={axis_name!r}) averages over {axis_name!r} and must be '
            'called in a jax.shard_map over it; outside one leave axis_name out'
        ) from error


def _corrected(gradient: Any, error: Any, axis_name: AxisName | None) -> Any:
    """What a worker wants to send: its gradient and what it owes from the step before."""
    if error is None:
        return gradient
    if error.shape != (1, *jnp.shape(gradient)):
        raise ValueError(
            f'a gradient of shape {jnp.shape(gradient)} has errors of shape {error.shape}, not of '
            f'one worker: pass compression_specs(opt_state, {axis_name!r}) to the in_specs and '
            'out_specs of the shard_map, and the mesh= of it here'
        )
    return gradient.astype(error.dtype) + error[0]


def _rounded(wanted: Any, sent: Any) -> Any:
    """What a worker sends."""
    if not _is_floating(wanted):
        return wanted
    # Without a barrier XLA may leave out a cast that is undone: rounding would take nothing off.
    return jax.lax.optimization_barrier(wanted.astype(sent))


def _lost(wanted: Any, rounded: Any, error: Any) -> Any:
    """What rounding took off, [1, *shape]."""
    if error is None:
        return None
    lost = wanted - rounded.astype(wanted.dtype)
    return jnp.where(jnp.isfinite(lost), lost, 0)[None]


def _mean(gradient: Any, rounded: Any, axis_name: AxisName | None) -> Any:
    """The mean of what all workers send, in the type of the gradient."""
    if not _is_floating(gradient):
        return gradient
    if axis_name is None:
        return rounded.astype(gradient.dtype)
    _check_own(gradient, as_tuple(axis_name))
    total = jax.lax.psum(rounded, axis_name).astype(_wide(gradient))
    return (total / jax.lax.psum(1, axis_name)).astype(gradient.dtype)


def _check_own(gradient: Any, axes: tuple[str, ...]) -> None:
    """Raises ValueError for a gradient that is the same for all workers: jax has summed it.

    What shard_map(check_vma=False) does not track, it does not sum either.
    """
    for axis in axes:
        if axis in _varying(jax.lax.axis_index(axis)) and axis not in _varying(gradient):
            raise ValueError(
                f'a gradient of shape {jnp.shape(gradient)} is the sum over {axis!r} already, in '
                f'its own precision: differentiate by jax.lax.pcast(params, {axis!r}, '
                "to='varying'), the parameters as each worker's own"
            )


def _varying(x: Any) -> frozenset[str]:
    """The mesh axes along which a value differs, as far as jax tracks it."""
    aval: Any = jax.typeof(x)
    manual = getattr(aval, 'manual_axis_type', None)  # since jax 0.10
    return aval.vma if manual is None else manual.varying
