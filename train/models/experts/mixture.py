"""A layer of experts as a pure function of what its router says.

Suffixes of array names: G groups, T tokens of a group, K choices of a token, S slots, E experts,
C capacity, M embed, F mlp, I and O the inputs and outputs of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from partitioning import constrain
from train.models.experts import dropless, routing
from train.models.experts.config import ExpertsConfig
from train.models.experts.mlp import Mlps


class Mixture(NamedTuple):
    """What experts make of tokens.

    Attributes:
      y_GTM: the weighted sum of the outputs of each token's experts; 0 if no expert takes it.
      losses: the load-balance loss and the router's z-loss, with their factors, scalars.
      metrics: what is reported, scalars: `routing.routing_metrics`, and the losses without factors.
    """

    y_GTM: jax.Array
    losses: dict[str, jax.Array]
    metrics: dict[str, jax.Array]


def mix(
    config: ExpertsConfig,
    mlps: Mlps,
    x_GTM: jax.Array,
    is_token_GT: jax.Array,
    logits_GTE: jax.Array,
    *,
    training: bool,
    decode: bool = False,
) -> Mixture:
    """Sends tokens to their experts and sums up what comes back.

    Args:
      config: how tokens are routed.
      mlps: the experts.
      x_GTM: the tokens in groups, in the dtype of the experts.
      is_token_GT: which tokens are routed, bool. The others are padding.
      logits_GTE: the float32 logits of the router.
      training: whether the capacity of training applies.
      decode: whether single tokens are decoded: then experts take all of them.
    """
    c, tokens = config, x_GTM.shape[1]
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
            x_GTM.reshape(-1, x_GTM.shape[2]),
            experts_GTK.reshape(-1, c.num_selected_experts),
            routed.weights_GTK.reshape(-1, c.num_selected_experts),
            mlps,
            decode=decode,
        ).reshape(x_GTM.shape)
    else:
        y_GSM = _apply_experts(routing.dispatch(x_GTM, routed), mlps, decode)
        y_GTM = routing.combine(y_GSM, routed)
    return Mixture(
        lay_out(y_GTM, ('batch', None, 'embed'), decode),
        *_report(c, logits_GTE, probabilities_GTE, routed),
    )


def _report(
    c: ExpertsConfig, logits_GTE: jax.Array, probabilities_GTE: jax.Array, routed: routing.Routing
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The losses and the metrics of a layer."""
    losses = {
        'auxiliary_loss': routing.load_balance_loss(probabilities_GTE, routed),
        'router_z_loss': routing.router_z_loss(logits_GTE, routed.is_token_GT),
    }
    factors = {'auxiliary_loss': c.auxiliary_loss_factor, 'router_z_loss': c.router_z_loss_factor}
    metrics = losses | routing.routing_metrics(probabilities_GTE, routed)
    if c.dropless:
        del metrics['expert_usage']  # experts have no slots
    scaled = {name: factors[name] * value for name, value in losses.items()}
    return scaled, jax.tree.map(jax.lax.stop_gradient, metrics)


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


def lay_out(x: jax.Array, names: Sequence[str | None], decode: bool) -> jax.Array:
    """Lays out an activation. While decoding, sizes that are not divisible are replicated."""
    return constrain(x, names, on_indivisible='replicate' if decode else None)
