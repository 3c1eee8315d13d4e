"""A stack of layers, one after another or scanned."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from train.models.remat import Remat
from train.models.t5.config import T5Config


def run_layers(
    layer: type[nn.Module],
    config: T5Config,
    count: int,
    scanned_name: str,
    attributes: dict[str, Any],
    x: jax.Array,
    *arguments: Any,
) -> jax.Array:
    """Runs the layers of a stack, in a compact method of it.

    Args:
      layer: a module that maps (x, *arguments) to (x, None).
      config: says how layers are run.
      count: the number of layers.
      scanned_name: 'encoder' or 'decoder', the name of the layers' module if they are scanned; else
        they are 'layers_0' and so on.
      attributes: the attributes of each layer, except its settings.
      x: the input of the first layer.
      *arguments: the other arguments of every layer.

    Returns:
      The output of the last layer.
    """

    def recomputed(remat: Remat | None) -> Any:
        if remat is None:
            return layer
        return nn.remat(layer, policy=remat.policy, prevent_cse=not config.scan_layers)

    if not config.scan_layers:
        for i in range(count):
            made = recomputed(config.remats[i % len(config.remats)])
            settings = attributes | {'config': config.of_layer(scanned_name, i)}
            x, _ = made(**settings, name=f'layers_{i}')(x, *arguments)
        return x
    scanned = nn.scan(
        recomputed(config.remats[0]),
        variable_axes={'params': config.param_scan_axis, 'cache': 0, 'losses': 0, 'metrics': 0},
        split_rngs={'params': True, 'dropout': True},
        in_axes=nn.broadcast,
        length=count,
        metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    settings = attributes | {'config': config.of_layer(scanned_name, 0)}
    return scanned(**settings, name=scanned_name)(x, *arguments)[0]
