"""A layer of experts, as a pure function for any router, and as a module in the place of an MLP.

Suffixes of array names: B batch, L length, G groups, T tokens of a group, K choices of a token,
S slots, E experts, C capacity, M embed, F mlp, I and O the inputs and outputs of a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from train.models.experts import dropless, routing
from train.models.experts.config import ExpertsConfig
from train.models.experts.dropless import Activation, Mlps
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


class ExpertMlp(nn.Module):
    """An MLP for each expert, and a router that chooses the experts of each token.

    The groups of tokens are sharded like the batch, and the parameters of the experts over the
    logical axis 'expert'. The tokens that experts take are exchanged between the devices: XLA makes
    an all-to-all of the change from 'batch' to ('expert_replicas', 'expert'), and of the way back.

    It sows the load-balance loss and the router's z-loss, with their factors, into 'losses', and
    `routing_metrics` and both losses into 'metrics', with 'experts/' before their names. The random
    numbers of jitter and dropout are from 'dropout'.

    Attributes:
      config: how tokens are routed.
      mlp_dim: the width of the hidden layer of an expert.
      activations: one function for each part of the hidden layer. The parts are multiplied.
      dropout_rate: the dropout rate of the hidden layer of the experts.
      dtype: the dtype of the experts and of what is exchanged. The router computes in float32.
    """

    config: ExpertsConfig
    mlp_dim: int
    activations: Sequence[Activation] = (nn.relu,)
    dropout_rate: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x_BLM: jax.Array,
        is_token_BL: jax.Array | None = None,
        *,
        deterministic: bool = True,
        decode: bool = False,
    ) -> jax.Array:
        """Applies the experts to tokens.

        Returns the weighted sum of the outputs of each token's experts, like `x_BLM`; 0 for tokens
        that no expert takes. Raises a ConfigError if `tokens_per_group` does not divide the tokens.

        Args:
          x_BLM: the tokens, [batch, length, embed].
          is_token_BL: which tokens are routed, bool [batch, length]. The others are padding, and
            their output is 0. By default, all are routed.
          deterministic: whether there is no jitter and no dropout, and the capacity is the one
            for evaluations.
          decode: whether single tokens are decoded: then each row is a group without a capacity.
        """
        mixture = mix(
            self.config,
            self._mlps(x_BLM.shape[2], deterministic),
            x_BLM,
            is_token_BL,
            functools.partial(Router(self.config, name='router'), deterministic=deterministic),
            training=not deterministic,
            decode=decode,
        )
        for name, value in mixture.losses.items():
            self.sow('losses', name, value)
        for name, value in mixture.metrics.items():
            self.sow('metrics', f'experts/{name}', value)
        return mixture.y_BLM

    def _mlps(self, width: int, deterministic: bool) -> Mlps:
        """Creates the parameters of the experts."""
        expert = Experts(self.config.num_experts, width, self.mlp_dim, name='expert')
        into_hidden, out = expert(len(self.activations))
        dropped = self.dropout_rate and not deterministic
        return Mlps(
            into_hidden=tuple(kernel.astype(self.dtype) for kernel in into_hidden),
            out=out.astype(self.dtype),
            activations=tuple(self.activations),
            dropout_rate=self.dropout_rate,
            dropout_key=self.make_rng('dropout') if dropped else None,
        )


class Router(nn.Module):
    """The logits of the experts for each token, in float32."""

    config: ExpertsConfig

    @nn.compact
    def __call__(self, x_GTM: jax.Array, *, deterministic: bool) -> jax.Array:
        x_GTM, noise = x_GTM.astype(jnp.float32), self.config.jitter_noise
        if noise and not deterministic:
            key = self.make_rng('dropout')
            x_GTM *= jax.random.uniform(key, x_GTM.shape, minval=1 - noise, maxval=1 + noise)
        return RouterWeights(self.config.num_experts, name='router_weights')(x_GTM)


class RouterWeights(nn.Module):
    """The linear map of a router."""

    num_experts: int

    @nn.compact
    def __call__(self, x_GTM: jax.Array) -> jax.Array:
        normal = nn.with_logical_partitioning(nn.initializers.normal(0.02), ('embed', 'unmodeled'))
        dense = nn.Dense(
            self.num_experts, use_bias=False, kernel_init=normal, precision='float32', name='w'
        )
        return dense(x_GTM)


class Experts(nn.Module):
    """The kernels of the MLPs of all experts."""

    num_experts: int
    width: int
    mlp_dim: int

    @nn.compact
    def __call__(self, num_activations: int) -> tuple[list[jax.Array], jax.Array]:
        shape, names = (self.width, self.mlp_dim), ('embed', 'expert_mlp')
        made = ['wi'] if num_activations == 1 else [f'wi_{i}' for i in range(num_activations)]
        into_hidden = [
            Kernel((self.num_experts, *shape), ('expert', *names), name=n)() for n in made
        ]
        out = Kernel((self.num_experts, *shape[::-1]), ('expert', *names[::-1]), name='wo')
        return into_hidden, out()


class Kernel(nn.Module):
    """The kernels of a linear map for each expert, [experts, inputs, outputs]."""

    shape: tuple[int, int, int]
    names: tuple[str, str, str]

    @nn.compact
    def __call__(self) -> Any:
        scaling = nn.initializers.variance_scaling(
            1.0, 'fan_in', 'truncated_normal', in_axis=1, out_axis=2, batch_axis=(0,)
        )
        boxed = nn.with_logical_partitioning(scaling, self.names)
        return self.param('kernel', boxed, self.shape, jnp.float32)
