"""Creates the nnx form of the built-in transformer, which loads nnx only when it is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

from train.models.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class CreateNnxTransformer:
    """Creates the nnx form of `Transformer(config)` from `nnx.Rngs`, as `NextToken` needs it."""

    config: TransformerConfig

    def __call__(self, rngs: Any) -> Any:
        from train.models.nnx_transformer import NnxTransformer  # nnx takes long to import

        return NnxTransformer(self.config, rngs=rngs)
