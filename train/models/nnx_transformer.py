"""The built-in transformer as an nnx module, with the parameters of the linen module."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from train.errors import ConfigError
from train.models import forward
from train.models.config import TransformerConfig
from train.models.transformer import Transformer
from train.output_layer import DeferredLogits


class NnxTransformer(nnx.Module):
    """A language model: maps tokens to the float32 logits of the next token.

    It has the parameters of `Transformer(config).init(rngs.params())`, with the same paths, shapes,
    logical axes and values. `train()` and `eval()` turn dropout on and off. Raises a ConfigError if
    the model has experts, whose losses only the linen form sows.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        if config.experts is not None:
            raise ConfigError('the nnx form of a model has no experts: use Transformer(config)')
        self.config = config
        self.deterministic = True
        boxes = Transformer(config).init(rngs.params(), method='get_parameters')['params']
        with nnx.use_eager_sharding(False):  # arrays are laid out where they are used
            for name, tree in boxes.items():
                setattr(self, name, _to_nnx(tree))
        if config.dropout_rate:
            self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)

    def __call__(
        self,
        tokens_BL: jax.Array,
        *,
        positions_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        deterministic: bool | None = None,
        defer_logits: bool = False,
    ) -> jax.Array | DeferredLogits:
        """Computes the logits, float32 [batch, length, vocab], or what computes them.

        `train.models.forward.defer_logits` describes the arguments.
        """
        deterministic = self.deterministic if deterministic is None else deterministic
        use_dropout = self.config.dropout_rate and not deterministic
        deferred, _, _ = forward.defer_logits(
            self.config,
            nnx.to_pure_dict(nnx.state(self, nnx.Param)),
            tokens_BL,
            positions_BL=positions_BL,
            segments_BL=segments_BL,
            dropout_key=self.dropout.rngs() if use_dropout else None,
        )
        return deferred if defer_logits else deferred.logits()


def _to_nnx(tree: Any) -> Any:
    """Returns nested dicts of boxes as nnx modules."""
    if isinstance(tree, dict):
        return nnx.Dict({name: _to_nnx(below) for name, below in tree.items()})
    return nnx.Param(tree.value, out_sharding=tree.names)
