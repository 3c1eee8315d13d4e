"""Experts that take all tokens: the rows of each expert are sorted together and multiplied at once.

Every device sends its tokens to the devices of their experts, and gets the outputs back. The
buffers have room for the case that all of its tokens choose the experts of one device.

Suffixes of array names: N tokens, K choices of a token, C = N * K choices, D devices along the mesh
axes of the experts, E experts, H experts of a device, M embed, F mlp, S sorted rows, I and O the
inputs and outputs of a matrix.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import spmd
from jax.sharding import PartitionSpec as P

from partitioning import logical_to_mesh_axes
from partitioning.products import scatter_sum
from partitioning.rules import as_tuple
from train.errors import ConfigError
from train.models.experts.routing import Routing, combine, dispatch, invert, take_rows
from train.models.remat import name_of_part, named

Activation = Callable[[jax.Array], jax.Array]
# (rows, kernels [experts, inputs, outputs]) -> the rows of each expert times its kernel.
Multiply = Callable[[jax.Array, jax.Array], jax.Array]
# (key, probability, shape) -> random bools that are true with this probability.
Sample = Callable[[jax.Array, float, tuple[int, ...]], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlps:
    """The MLPs of all experts of a layer, or of those that one device holds.

    Attributes:
      into_hidden: one array of kernels for each activation, [E, M, F].
      out: the kernels of the output, [E, F, M].
      activations: one function for each part of the hidden layer. The parts are multiplied.
      dropout_key: the random key of the dropout, or None for no dropout.
    """

    into_hidden: tuple[jax.Array, ...]
    out: jax.Array
    dropout_key: jax.Array | None
    activations: Sequence[Activation] = dataclasses.field(metadata={'static': True})
    dropout_rate: float = dataclasses.field(metadata={'static': True})

    def hidden(
        self, x: jax.Array, multiply: Multiply, sample: Sample = jax.random.bernoulli
    ) -> jax.Array:
        """Computes the hidden layer, [..., F], of rows [..., M]."""
        pairs, count = zip(self.into_hidden, self.activations, strict=True), len(self.into_hidden)
        parts = [
            activation(named(multiply(x, kernel), name_of_part(i, count)))
            for i, (kernel, activation) in enumerate(pairs)
        ]
        hidden = parts[0]
        for part in parts[1:]:
            hidden = hidden * part
        if self.dropout_key is None or not self.dropout_rate:
            return hidden
        kept = 1.0 - self.dropout_rate
        is_kept = sample(self.dropout_key, kept, hidden.shape)
        return jnp.where(is_kept, hidden / kept, 0).astype(hidden.dtype)


def apply_experts(
    x_NM: jax.Array,
    experts_NK: jax.Array,
    weights_NK: jax.Array,
    mlps: Mlps,
    *,
    decode: bool = False,
) -> jax.Array:
    """Returns the weighted sum of the outputs of each token's experts, [N, M].

    Raises a ConfigError if the rules shard the experts over mesh axes that do not shard the batch.

    Args:
      x_NM: the tokens, sharded like a batch.
      experts_NK: the experts of each token; the number of experts or more for none.
      mlps: the experts, sharded over the logical axes 'expert' and 'expert_mlp'.
      decode: whether tokens that their mesh axes do not divide are replicated.
    """
    ids_NK = jnp.arange(experts_NK.size).reshape(experts_NK.shape)
    mesh, rules = jax.sharding.get_abstract_mesh(), spmd.get_logical_axis_rules()
    if mesh.empty or mesh.manual_axes or not rules:
        return _apply_local(mlps, x_NM, experts_NK, weights_NK, ids_NK)

    def spec(array: jax.Array, *names: str | None) -> P:
        policy: Any = 'replicate' if decode else None
        shape = array.shape
        return logical_to_mesh_axes(names, rules, mesh=mesh, shape=shape, on_indivisible=policy)

    batch = P(spec(x_NM, 'batch', None)[0])
    into = spec(mlps.into_hidden[0], 'expert', 'embed', 'expert_mlp')
    out = spec(mlps.out, 'expert', 'expert_mlp', 'embed')
    axes, gathered, hidden = map(as_tuple, into)
    sharded = as_tuple(logical_to_mesh_axes(('batch',), rules, mesh=mesh)[0])
    if missing := [axis for axis in axes if axis not in sharded]:
        raise ConfigError(
            f"the rules shard 'expert' over {missing[0]!r}, which does not shard 'batch': dropless "
            f"experts need {missing[0]!r} in the rule of 'batch'; add it, or set dropless = False"
        )
    specs: dict[str, Any] = {'into_hidden': (into,) * len(mlps.into_hidden), 'out': out}
    if mlps.dropout_key is not None:
        specs['dropout_key'] = P()
    of_mlps = dataclasses.replace(mlps, **specs)

    def local(mlps: Mlps, *arrays: jax.Array) -> jax.Array:
        return _apply_local(mlps, *arrays, axes=axes, gathered_axes=gathered, hidden_axes=hidden)

    return jax.shard_map(local, in_specs=(of_mlps, *[batch] * 4), out_specs=batch, check_vma=False)(
        mlps, x_NM, experts_NK, weights_NK, ids_NK
    )


def _apply_local(
    mlps: Mlps,
    x_NM: jax.Array,
    experts_NK: jax.Array,
    weights_NK: jax.Array,
    ids_NK: jax.Array,
    *,
    axes: tuple[str, ...] = (),
    gathered_axes: tuple[str, ...] = (),
    hidden_axes: tuple[str, ...] = (),
) -> jax.Array:
    """The same on one device, which holds some of the tokens and some of the experts.

    Experts are sharded over `axes`, and their hidden layers over `hidden_axes`. The dimension M of
    their kernels is gathered over `gathered_axes`. The ids are the numbers of the choices among the
    choices of all devices.
    """
    devices = math.prod(jax.lax.axis_size(axis) for axis in axes)
    routed, counts_DH = _sort_by_device(experts_NK, weights_NK, devices, mlps.out.shape[0])
    # Free rows belong to no expert: nobody reads what becomes of them.
    x_DCM = dispatch(x_NM[None], routed, fill=False).reshape(devices, -1, x_NM.shape[1])
    x_DCM, counts_DH = (_exchange(x, axes) for x in (x_DCM, counts_DH))
    # Each row's expert: the rows of a device are sorted, and the rows behind them are free.
    places_C, ends_DH = jnp.arange(x_DCM.shape[1]), jnp.cumsum(counts_DH, axis=1)
    held_S = jnp.ravel(jnp.sum(places_C[:, None] >= ends_DH[:, None], axis=-1))
    # The rows of one device have the order already.
    order_S = jnp.argsort(held_S, stable=True) if devices > 1 else None
    back_S = None if order_S is None else jnp.argsort(order_S)
    x_SM = _reorder(x_DCM.reshape(held_S.size, -1), order_S, back_S)
    sizes_H = jnp.sum(counts_DH, axis=0)

    def into_hidden(rows: jax.Array, kernels: jax.Array) -> jax.Array:
        return multiply_groups(rows, kernels, sizes_H, gathered_axes, 1)

    def sample(key: jax.Array, probability: float, shape: tuple[int, ...]) -> jax.Array:
        ids_DC = jnp.ravel(ids_NK)[jnp.minimum(routed.choices_GS, ids_NK.size - 1)]
        ids_S = jnp.ravel(_exchange(ids_DC.reshape(x_DCM.shape[:2]), axes))
        ids_S = ids_S if order_S is None else ids_S[order_S]
        return _sample_rows(key, probability, ids_S, shape[1], hidden_axes)

    hidden_SF = mlps.hidden(x_SM, into_hidden, sample)
    y_SM = multiply_groups(hidden_SF, mlps.out, sizes_H, gathered_axes, 2)
    y_SM = jax.lax.psum(y_SM, hidden_axes)
    y_SM = _reorder(y_SM, back_S, order_S)
    # Kept after the exchange: the weights of the experts need it for their gradients.
    y_DCM = named(_exchange(y_SM.reshape(x_DCM.shape), axes), 'mlp_out')
    return combine(y_DCM.reshape(1, *y_SM.shape), routed)[0]


def _reorder(x_SM: jax.Array, order_S: jax.Array | None, back_S: jax.Array | None) -> jax.Array:
    """Takes rows in an order, of which `back_S` is the inverse; None keeps them."""
    if order_S is None or back_S is None:
        return x_SM
    return take_rows(x_SM[None], order_S[None], back_S[None, :, None])[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def multiply_groups(
    rows_SI: jax.Array,
    kernels_HIO: jax.Array,
    sizes_H: jax.Array,
    axes: tuple[str, ...] = (),
    dimension: int = 0,
) -> jax.Array:
    """Multiplies the rows of each group by its matrix, [S, O]: `jax.lax.ragged_dot`.

    Matrices whose `dimension` is sharded over Manual mesh axes are gathered, and again for the
    gradients. The gradient of the matrices is scattered while it is summed over these axes.

    The gradient never contracts the last dimension of matrices. The compiler of TPUs would run out
    of vector memory, for instance on v6e with the matrices of Mixtral.
    """
    return jax.lax.ragged_dot(rows_SI, _gather(kernels_HIO, axes, dimension), sizes_H)


def _gather(kernels_HIO: jax.Array, axes: tuple[str, ...], dimension: int) -> jax.Array:
    if not axes:
        return kernels_HIO
    return jax.lax.all_gather(kernels_HIO, axes, axis=dimension, tiled=True)


def _multiply_forward(
    rows_SI: jax.Array,
    kernels_HIO: jax.Array,
    sizes_H: jax.Array,
    axes: tuple[str, ...],
    dimension: int,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    y_SO = jax.lax.ragged_dot(rows_SI, _gather(kernels_HIO, axes, dimension), sizes_H)
    return y_SO, (rows_SI, kernels_HIO, sizes_H)


def _multiply_backward(
    axes: tuple[str, ...], dimension: int, given: tuple[jax.Array, ...], change_SO: jax.Array
) -> tuple[Any, ...]:
    rows_SI, kernels_HIO, sizes_H = given
    kernels_HIO = _gather(kernels_HIO, axes, dimension)
    # Without the barriers, the transposition would become a part of the product again.
    change_SO = jax.lax.optimization_barrier(change_SO)
    kernels_HOI = jax.lax.optimization_barrier(jnp.swapaxes(kernels_HIO, 1, 2))
    change_SI = jax.lax.ragged_dot(change_SO, kernels_HOI, sizes_H)
    if dimension == 2:  # narrow shards of the last dimension would be sums of whole matrices
        of_kernels = _gradient_of_kernels(change_SO, rows_SI, kernels_HOI, sizes_H, axes)
        return change_SI, jnp.swapaxes(of_kernels, 1, 2), None
    return change_SI, _gradient_of_kernels(rows_SI, change_SO, kernels_HIO, sizes_H, axes), None


def _gradient_of_kernels(
    rows_SI: jax.Array,
    change_SO: jax.Array,
    kernels_HIO: jax.Array,
    sizes_H: jax.Array,
    axes: tuple[str, ...],
) -> jax.Array:
    """Returns the gradient of kernels that are linear maps of rows; I is scattered over `axes`."""
    (gradient_HIO,) = jax.linear_transpose(
        lambda kernels: jax.lax.ragged_dot(rows_SI, kernels, sizes_H), kernels_HIO
    )(change_SO)
    return scatter_sum(gradient_HIO, axes, 1) if axes else gradient_HIO


multiply_groups.defvjp(_multiply_forward, _multiply_backward)


def _sample_rows(
    key: jax.Array, probability: float, ids_S: jax.Array, width: int, axes: tuple[str, ...]
) -> jax.Array:
    """Draws the random bools of each row by its id, so that they are the same on every mesh.

    Rows are sharded over `axes`; `width` is the length of a row on one device.
    """
    total = width * math.prod(jax.lax.axis_size(axis) for axis in axes)
    keys_S = jax.vmap(jax.random.fold_in, (None, 0))(key, ids_S)
    kept_SF = jax.vmap(lambda key: jax.random.bernoulli(key, probability, (total,)))(keys_S)
    first = jax.lax.axis_index(axes) * width if axes else 0
    return jax.lax.dynamic_slice_in_dim(kept_SF, first, width, axis=1)


def _sort_by_device(
    experts_NK: jax.Array, weights_NK: jax.Array, devices: int, held: int
) -> tuple[Routing, jax.Array]:
    """Sorts the choices of tokens by the devices of their experts, and there by expert.

    Returns a routing of one group to the devices, each with room for all choices, and the number of
    rows for each expert, [D, H], where H experts are held by a device.
    """
    experts_C = jnp.minimum(jnp.ravel(experts_NK), held * devices)
    counts_DH = jnp.bincount(experts_C, length=held * devices + 1)[:-1].reshape(devices, held)
    rows_D = jnp.sum(counts_DH, axis=1)
    places_C = jnp.argsort(jnp.argsort(experts_C, stable=True))
    device_C = experts_C // held
    places_C -= jnp.append(jnp.cumsum(rows_D) - rows_D, 0)[device_C]
    slots_C = jnp.where(
        device_C < devices, device_C * experts_C.size + places_C, devices * experts_C.size
    )
    routed = Routing(
        experts_NK[None],
        weights_NK[None],
        slots_C.reshape(1, *experts_NK.shape),
        invert(slots_C[None], devices * experts_C.size),
        jnp.ones((1, experts_NK.shape[0]), bool),
    )
    return routed, counts_DH


def _exchange(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sends x[d] to device d, and returns what each device has sent."""
    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True) if axes else x
