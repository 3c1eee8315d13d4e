"""The routing of tokens to experts, as pure functions.

Suffixes of array names: G groups, T tokens of a group, K choices of a token, E experts, S slots
(the places of all experts, expert by expert), M embed.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """Which expert takes which token.

    Attributes:
      experts_GTK: the experts that each token chooses, the most probable first, int32.
      weights_GTK: the weights of the experts' outputs, float32; 0 if the expert does not take it.
      slots_GTK: the slot of each choice, int32, or the number of slots if the expert does not take
        it. Slot e * capacity + p is place p of expert e.
      choices_GS: the choice t * K + k that takes each slot, int32, or T * K if the slot is free.
      is_token_GT: which tokens are routed, bool. The others are padding.
    """

    experts_GTK: jax.Array
    weights_GTK: jax.Array
    slots_GTK: jax.Array
    choices_GS: jax.Array
    is_token_GT: jax.Array

    @property
    def is_taken_GTK(self) -> jax.Array:
        """Which choices are taken by their experts."""
        return self.slots_GTK < self.choices_GS.shape[1]

    @property
    def num_dropped(self) -> jax.Array:
        """The number of choices of tokens, without padding, that their experts do not take."""
        return jnp.sum(self.is_token_GT[..., None] & ~self.is_taken_GTK)


def route(
    probabilities_GTE: jax.Array,
    is_token_GT: jax.Array,
    *,
    num_selected: int,
    capacity: int,
    normalize: bool = False,
) -> Routing:
    """Lets each token choose its most probable experts, and each expert take its first tokens.

    An expert takes the first choices of all tokens in their order, then their second choices, and
    so on, until `capacity` places are taken. Padding takes no place. `normalize` divides the
    weights of a token by the sum over its choices.
    """
    groups, tokens, num_experts = probabilities_GTE.shape
    weights_GTK, experts_GTK = choose_experts(probabilities_GTE, num_selected)
    if normalize:
        weights_GTK /= jnp.sum(weights_GTK, axis=-1, keepdims=True)
    # All first choices come before all second choices.
    ordered_GN = experts_GTK.swapaxes(1, 2).reshape(groups, -1)
    routed_GN = jnp.tile(is_token_GT, num_selected)
    chosen_GNE = jax.nn.one_hot(ordered_GN, num_experts, dtype=jnp.int32) * routed_GN[..., None]
    places_GN = jnp.sum((jnp.cumsum(chosen_GNE, axis=1) - 1) * chosen_GNE, axis=-1)
    is_taken_GN = routed_GN & (places_GN < capacity)
    slots_GN = jnp.where(is_taken_GN, ordered_GN * capacity + places_GN, num_experts * capacity)
    slots_GTK = slots_GN.reshape(groups, num_selected, tokens).swapaxes(1, 2)
    choices_GS = invert(slots_GTK.reshape(groups, -1), num_experts * capacity)
    weights_GTK = jnp.where(slots_GTK < num_experts * capacity, weights_GTK, 0.0)
    return Routing(experts_GTK, weights_GTK, slots_GTK, choices_GS, is_token_GT)


def choose_experts(probabilities_GTE: jax.Array, num_selected: int) -> tuple[jax.Array, jax.Array]:
    """Returns the largest probabilities of each token, and their experts, each [G, T, K]."""
    # Not jax.lax.top_k, for which XLA gathers the tokens of all devices on some platforms.
    weights, experts, left_GTE = [], [], probabilities_GTE
    for _ in range(num_selected):
        expert_GT = jnp.argmax(left_GTE, axis=-1)
        is_chosen_GTE = jax.nn.one_hot(expert_GT, left_GTE.shape[-1], dtype=bool)
        weights.append(jnp.sum(probabilities_GTE, axis=-1, where=is_chosen_GTE))
        experts.append(expert_GT.astype(jnp.int32))
        left_GTE = jnp.where(is_chosen_GTE, -jnp.inf, left_GTE)
    return jnp.stack(weights, axis=-1), jnp.stack(experts, axis=-1)


def dispatch(x_GTM: jax.Array, routing: Routing, fill: bool = True) -> jax.Array:
    """Returns the tokens in the slots that they take, [G, S, M].

    Free slots are 0, or with `fill=False` any token, which saves a pass over all slots.
    """
    tokens_GS = routing.choices_GS // routing.slots_GTK.shape[2]
    return take_rows(x_GTM, tokens_GS, routing.slots_GTK, fill)


def combine(y_GSM: jax.Array, routing: Routing) -> jax.Array:
    """Returns the weighted sums of the experts' outputs for each token, [G, T, M]."""
    groups, tokens, selected = routing.slots_GTK.shape
    flat = routing.slots_GTK.reshape(groups, tokens * selected)
    y_GNM = take_rows(y_GSM, flat, routing.choices_GS[..., None])
    y_GTKM = y_GNM.reshape(groups, tokens, selected, -1)
    return jnp.einsum('GTKM,GTK->GTM', y_GTKM, routing.weights_GTK.astype(y_GTKM.dtype))


def load_balance_loss(probabilities_GTE: jax.Array, routing: Routing) -> jax.Array:
    """The load-balance loss of Switch Transformers (https://arxiv.org/abs/2101.03961, equation 4).

    For each group it is E * sum over experts of f * P, where f is the share of the tokens that
    choose the expert, before any is dropped, and P is its mean probability. Uniform routing to K
    experts gives K. The result is the mean over all groups that have tokens.
    """
    num_experts = probabilities_GTE.shape[-1]
    is_token_GT = routing.is_token_GT.astype(jnp.float32)
    chosen_GTE = jnp.sum(jax.nn.one_hot(routing.experts_GTK, num_experts), axis=2)
    tokens_G = jnp.sum(is_token_GT, axis=1)
    count_G1 = jnp.maximum(tokens_G, 1.0)[:, None]
    share_GE = jnp.einsum('GTE,GT->GE', chosen_GTE, is_token_GT) / count_G1
    mean_GE = jnp.einsum('GTE,GT->GE', probabilities_GTE, is_token_GT) / count_G1
    loss_G = num_experts * jnp.sum(share_GE * mean_GE, axis=-1)
    return jnp.sum(loss_G) / jnp.maximum(jnp.sum(tokens_G > 0), 1)


def router_z_loss(logits_GTE: jax.Array, is_token_GT: jax.Array) -> jax.Array:
    """The router's z-loss of ST-MoE (https://arxiv.org/abs/2202.08906, equation 5).

    It is the mean over all tokens of the squared log-normalizer of the router's softmax.
    """
    log_z_GT = jax.nn.logsumexp(logits_GTE.astype(jnp.float32), axis=-1)
    return _mean(jnp.square(log_z_GT), is_token_GT)


def routing_metrics(probabilities_GTE: jax.Array, routing: Routing) -> dict[str, jax.Array]:
    """Returns what to report about a layer, scalars.

    - fraction_tokens_left_behind: the share of tokens that no expert takes.
    - dropped_tokens: the number of choices that their experts do not take.
    - expert_usage: the share of all slots that are taken.
    - router_confidence: the mean weight of the choices that are taken.
    - router_entropy: the mean entropy of the router's probabilities, in nats.
    - largest_load: the tokens of the most popular expert, relative to an even split.
    """
    num_experts = probabilities_GTE.shape[-1]
    taken_GTK, is_token_GT = routing.is_taken_GTK, routing.is_token_GT
    num_taken = jnp.sum(taken_GTK)
    chosen_GTKE = jax.nn.one_hot(routing.experts_GTK, num_experts) * is_token_GT[..., None, None]
    load_E = jnp.sum(chosen_GTKE, axis=(0, 1, 2))
    entropy_GT = jnp.sum(jax.scipy.special.entr(probabilities_GTE), axis=-1)
    return {
        'fraction_tokens_left_behind': _mean(~jnp.any(taken_GTK, axis=-1), is_token_GT),
        'dropped_tokens': routing.num_dropped.astype(jnp.float32),
        'expert_usage': num_taken / float(routing.choices_GS.size),  # it may exceed int32
        'router_confidence': jnp.sum(routing.weights_GTK) / jnp.maximum(num_taken, 1),
        'router_entropy': _mean(entropy_GT, is_token_GT),
        'largest_load': num_experts * jnp.max(load_E) / jnp.maximum(jnp.sum(load_E), 1),
    }


def _mean(values_GT: jax.Array, is_token_GT: jax.Array) -> jax.Array:
    """The mean over all tokens without padding."""
    return jnp.sum(values_GT * is_token_GT) / jnp.maximum(jnp.sum(is_token_GT), 1)


def invert(slots_GN: jax.Array, num_slots: int) -> jax.Array:
    """Returns the index n of each slot, or N if the slot is free."""

    def invert(slots_N: jax.Array) -> jax.Array:
        free_S = jnp.full(num_slots, slots_N.size, jnp.int32)
        return free_S.at[slots_N].set(jnp.arange(slots_N.size, dtype=jnp.int32), mode='drop')

    return jax.vmap(invert)(slots_GN)


# The gradient of taking rows by index would be a scatter. All rows that were taken are known, so it
# is a sum of rows taken by index too, which is fast and keeps the sharding of the groups.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_rows(
    x_GNM: jax.Array, rows_GP: jax.Array, back_GNR: jax.Array, fill: bool = True
) -> jax.Array:
    """Takes rows of each group, and for indices outside 0 or, unless `fill`, the nearest row.

    Args:
      rows_GP: the index n of each row to take, or one outside [0, N).
      back_GNR: the indices p at which row n is taken, filled up with ones outside [0, P).
    """
    mode, rows_GP1 = 'fill' if fill else 'clip', rows_GP[..., None]
    return jnp.take_along_axis(x_GNM, rows_GP1, axis=1, mode=mode, fill_value=0)


def _take_rows_forward(
    x_GNM: jax.Array, rows_GP: jax.Array, back_GNR: jax.Array, fill: bool
) -> tuple[jax.Array, jax.Array]:
    return take_rows(x_GNM, rows_GP, back_GNR, fill), back_GNR


def _take_rows_backward(
    fill: bool, back_GNR: jax.Array, change_GPM: jax.Array
) -> tuple[jax.Array, None, None]:
    groups, rows, repeats = back_GNR.shape
    flat = back_GNR.reshape(groups, rows * repeats, 1)
    taken = jnp.take_along_axis(change_GPM, flat, axis=1, mode='fill', fill_value=0)
    return taken.reshape(groups, rows, repeats, -1).sum(axis=2), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)
