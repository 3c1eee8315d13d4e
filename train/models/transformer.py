"""The built-in transformer as a linen module. `train.models.nnx_transformer` has its nnx form."""

from __future__ import annotations

import flax.linen as nn
import jax

from train.models import forward
from train.models.config import RopeScaling, TransformerConfig
from train.models.parameters import Params, list_parameters
from train.output_layer import DeferredLogits

__all__ = ['RopeScaling', 'Transformer', 'TransformerConfig']


class Transformer(nn.Module):
    """A language model: maps tokens to the float32 logits of the next token."""

    config: TransformerConfig

    @nn.compact
    def get_parameters(self) -> Params:
        """Returns the parameters, and creates them with their logical axes in `init`."""
        tree = list_parameters(self.config)

        def create(key: jax.Array, name: str) -> Params:
            leaves, structure = jax.tree.flatten(tree[name])
            keys, dtype = jax.random.split(key, len(leaves)), self.config.param_dtype
            created = (p.create(k, dtype) for p, k in zip(leaves, keys, strict=True))
            boxed = map(nn.LogicallyPartitioned, created, (p.names for p in leaves))
            return jax.tree.unflatten(structure, boxed)

        return {name: self.param(name, create, name) for name in tree}

    def __call__(
        self,
        tokens_BL: jax.Array,
        *,
        positions_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        deterministic: bool = True,
        defer_logits: bool = False,
    ) -> jax.Array | DeferredLogits:
        """Computes the logits, float32 [batch, length, vocab], or what computes them.

        `train.models.forward.defer_logits` describes the arguments.
        """
        use_dropout = self.config.dropout_rate and not deterministic
        deferred, _, sown = forward.defer_logits(
            self.config,
            self.get_parameters(),
            tokens_BL,
            positions_BL=positions_BL,
            segments_BL=segments_BL,
            dropout_key=self.make_rng('dropout') if use_dropout else None,
        )
        for collection, values in sown.items():
            for name, value in values.items():
                self.sow(collection, name, value)
        return deferred if defer_logits else deferred.logits()
