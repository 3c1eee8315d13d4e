"""The MLPs of experts, as a pure function of their kernels.

Suffixes of array names: E experts, M embed, F mlp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

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
      dropout_rate: the dropout rate of the hidden layer.
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
        """Computes the hidden layer, [..., F], of rows [..., M].

        Args:
          x: the rows.
          multiply: multiplies rows by the kernels of their experts.
          sample: draws the random bools of the dropout.
        """
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
