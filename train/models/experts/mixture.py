"""A layer of experts as a pure function, for any router.

Suffixes of array names: B batch, L length, G groups, T tokens of a group, K choices of a token,
S slots, E experts, C capacity, M embed, F mlp, I and O the inputs and outputs of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from train.models.experts import dropless, routing
from train.models.experts.config import ExpertsConfig
from train.models.experts.dropless import Mlps
from train.models.residual import lay_out


class Mixture(NamedTuple):
    """What experts make of tokens.

    Attributes:
      y_BLM: the weighted sum of the outputs of each token's experts; 0 if no expert takes it.
      losses: the load-balance loss and the router's z-loss, with their factors, scalars.
      metrics: what is reported, scalars: `routing.routing_metrics`, and the losses without factors.
    """

    y_BLM: jax.Array
    losses: dict[str, jax.Array]
    metrics: dict[str, jax.Array]


def mix(
    config: ExpertsConfig,
    mlps: Mlps,
    x_BLM: jax.Array,
    is_token_BL: jax.Array | None,
    find_logits: Callable[[jax.Array], jax.Array],
    *,
    training: bool,
    decode: bool = False,
) -> Mixture:
    """Sends tokens to their experts and sums up what comes back.

    Raises a ConfigError if `tokens_per_group` does not divide the tokens.

    Args:
      is_token_BL: which tokens are routed, bool; None routes all. The others are padding.
      find_logits: the router: a function of the tokens in groups, which returns the logits of the
        experts for each, float32.
      training: whether the capacity of training applies.
      decode: whether single tokens are decoded: then each row is a group, and experts take all.
    """
    c, (batch, length, width) = config, x_BLM.shape
    tokens = length if decode else c.group_size(batch, length)
    x_GTM = lay_out(x_BLM.reshape(-1, tokens, width), ('batch', None, 'embed'), decode)
    is_token_GT = jnp.ones(x_GTM.shape[:2], bool)
    if is_token_BL is not None:
        is_token_GT = jnp.broadcast_to(is_token_BL, (batch, length)).reshape(-1, tokens)
    logits_GTE = find_logits(x_GTM)
    x_GTM = x_GTM.astype(mlps.out.dtype)
    everything = c.dropless or decode
    routed = routing.route(
        probabilities_GTE := jax.nn.softmax(logits_GTE),
        is_token_GT,
        num_selected=c.num_selected_experts,
        capacity=tokens if everything else c.capacity(tokens, training=training),
        normalize=c.normalize_weights,
    )
    if everything:
        experts_GTK = jnp.where(is_token_GT[..., None], routed.experts_GTK, c.num_experts)
        y_GTM = dropless.apply_experts(
            x_GTM.reshape(-1, width),
            experts_GTK.reshape(-1, c.num_selected_experts),
            routed.weights_GTK.reshape(-1, c.num_selected_experts),
            mlps,
            decode=decode,
        ).reshape(x_GTM.shape)
    else:
        y_GSM = _apply_experts(routing.dispatch(x_GTM, routed), mlps, decode)
        y_GTM = routing.combine(y_GSM, routed)
    y_GTM = lay_out(y_GTM, ('batch', None, 'embed'), decode)
    losses = {
        'auxiliary_loss': routing.load_balance_loss(probabilities_GTE, routed),
        'router_z_loss': routing.router_z_loss(logits_GTE, routed.is_token_GT),
    }
    factors = {'auxiliary_loss': c.auxiliary_loss_factor, 'router_z_loss': c.router_z_loss_factor}
    metrics = losses | routing.routing_metrics(probabilities_GTE, routed)
    if c.dropless:
        del metrics['expert_usage']  # experts have no slots
    scaled = {name: factors[name] * value for name, value in losses.items()}
    metrics = jax.tree.map(jax.lax.stop_gradient, metrics)
    return Mixture(y_GTM.reshape(x_BLM.shape), scaled, metrics)


def _apply_experts(x_GSM: jax.Array, mlps: Mlps, decode: bool) -> jax.Array:
    """Sends the slots to the devices of their experts, applies them, and sends them back."""
    here, there = ('batch', 'unmodeled', None), ('expert_replicas', 'expert', None)

    def multiply(x_GECI: jax.Array, kernels_EIO: jax.Array) -> jax.Array:
        return jnp.einsum('GECI,EIO->GECO', x_GECI, kernels_EIO)

    shape = (x_GSM.shape[0], mlps.out.shape[0], -1, x_GSM.shape[2])
    x_GECM = lay_out(x_GSM.reshape(shape), (*here, 'embed'), decode)
    x_GECM = lay_out(x_GECM, (*there, 'embed'), decode)
    hidden_GECF = lay_out(mlps.hidden(x_GECM, multiply), (*there, 'expert_mlp'), decode)
    y_GECM = lay_out(multiply(hidden_GECF, mlps.out), (*there, 'embed'), decode)
    return lay_out(y_GECM, (*here, 'embed'), decode).reshape(x_GSM.shape)
