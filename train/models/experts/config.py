"""The settings of a layer of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from train.errors import ConfigError, check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """How tokens are routed to experts, and what balances the experts.

    Tokens are routed in groups. In each group, an expert takes at most `capacity` tokens: the first
    choices of all tokens in their order, then their second choices, and so on. What does not fit is
    dropped, so the token keeps only its residual.

    Attributes:
      num_experts: the number of experts of a layer.
      num_selected_experts: the number of experts that each token chooses: 1 in Switch Transformers.
      dropless: whether experts take all tokens. Then the capacity has no effect.
      train_capacity_factor: the capacity in training is this factor times the tokens of a group,
        divided by the number of experts. It does not grow with `num_selected_experts`.
      eval_capacity_factor: the factor in evaluations. While single tokens are decoded, none is
        dropped.
      min_expert_capacity: the smallest capacity.
      tokens_per_group: the number of tokens in a group, which divides the tokens of a batch. None
        makes each row a group.
      normalize_weights: whether the weights of a token's experts are divided by their sum. If not,
        they are the router's probabilities.
      jitter_noise: in training, the router multiplies its inputs by random numbers between
        1 - jitter_noise and 1 + jitter_noise.
      auxiliary_loss_factor: the coefficient of the load-balance loss.
      router_z_loss_factor: the coefficient of the router's z-loss.
      encoder_every: in the encoder of a network, every n-th layer has experts instead of an MLP:
        the layers n - 1, 2n - 1, and so on. None means no layer.
      decoder_every: the same of its decoder.
      mlp_dim: the width of the hidden layer of an expert. None means the width of the dense MLPs.
      dropout_rate: the dropout rate of the hidden layer of an expert. None means the network's.

    The losses of a network are means over its layers with experts.

    Raises:
      ConfigError: if a setting is malformed.
    """

    num_experts: int
    num_selected_experts: int = 1
    dropless: bool = False
    train_capacity_factor: float = 1.25
    eval_capacity_factor: float = 2.0
    min_expert_capacity: int = 4
    tokens_per_group: int | None = None
    normalize_weights: bool = False
    jitter_noise: float = 0.0
    auxiliary_loss_factor: float = 0.01
    router_z_loss_factor: float = 0.0
    encoder_every: int | None = 1
    decoder_every: int | None = 1
    mlp_dim: int | None = None
    dropout_rate: float | None = None

    def __post_init__(self) -> None:
        check_fields(
            ExpertsConfig,
            self,
            'ExpertsConfig.',
            jitter_noise='[0, 1)',
            auxiliary_loss_factor='[0, inf)',
            router_z_loss_factor='[0, inf)',
            dropout_rate='[0, 1)',
        )
        if self.num_selected_experts > self.num_experts:
            raise ConfigError(
                f'ExpertsConfig.num_selected_experts is {self.num_selected_experts}, but there are '
                f'{self.num_experts} experts: select at most {self.num_experts}'
            )

    def of_layer(self, layers: Mapping[str, int], stack: str, index: int) -> ExpertsConfig | None:
        """Returns the settings of one layer of a stack, or None if it has no experts.

        The factors of its losses are divided by the number of all layers with experts. `layers` has
        the number of layers of both stacks, 'encoder' and 'decoder'.
        """
        every = {'encoder': self.encoder_every, 'decoder': self.decoder_every}
        sparse = sum(count // (every[name] or count + 1) for name, count in layers.items())
        chosen = every[stack]
        if chosen is None or (index + 1) % chosen:
            return None
        return dataclasses.replace(
            self,
            auxiliary_loss_factor=self.auxiliary_loss_factor / sparse,
            router_z_loss_factor=self.router_z_loss_factor / sparse,
        )

    def capacity(self, tokens: int, *, training: bool) -> int:
        """Returns the number of tokens of a group of `tokens` tokens that an expert takes."""
        if self.dropless:
            return tokens
        factor = self.train_capacity_factor if training else self.eval_capacity_factor
        capacity = round(factor * tokens / self.num_experts)
        return min(tokens, max(capacity, self.min_expert_capacity))

    def group_size(self, rows: int, length: int) -> int:
        """Returns the number of tokens in a group, for a batch of [rows, length] tokens.

        Raises:
          ConfigError: if `tokens_per_group` does not divide the tokens of the batch.
        """
        size = self.tokens_per_group
        if size is None:
            return length
        if (rows * length) % size:
            divisors = [n for n in range(1, rows * length + 1) if not (rows * length) % n]
            nearest = min(divisors, key=lambda n: abs(n - size))
            raise ConfigError(
                f'ExpertsConfig.tokens_per_group is {size}, which does not divide the {rows} x '
                f'{length} = {rows * length:,} tokens of a batch: use {nearest}, or None for one '
                'group per row'
            )
        return size
