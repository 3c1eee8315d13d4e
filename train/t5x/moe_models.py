"""T5X's `contrib.moe.models`: models whose network has experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from train.errors import ConfigError
from train.models.experts import ExpertsConfig
from train.t5x.models import (
    BaseTransformerModel,
    DecoderOnlyModel,
    EncoderDecoderModel,
    Predicted,
)
from train.t5x.refusals import check_number


def _set_factors(model: BaseTransformerModel, **factors: float) -> None:
    """Gives the network of a model the factors of its losses.

    Raises:
      ConfigError: if the network has no experts.
    """
    key = f'models.{type(model).__name__}'
    config: Any = getattr(model.module, 'config', None)
    for name, value in factors.items():
        check_number(f'{key}.{name}', value, '[0, inf)')
    experts = getattr(config, 'experts', None)
    if not isinstance(experts, ExpertsConfig):
        raise ConfigError(
            f'{key}.module has no experts: write experts = @experts.ExpertsConfig() among its '
            'settings, after `from train.models import experts`'
        )
    experts = dataclasses.replace(
        experts,
        auxiliary_loss_factor=factors['aux_loss_factor'],
        router_z_loss_factor=factors['router_z_loss_factor'],
    )
    module = model.module.clone(config=dataclasses.replace(config, experts=experts))
    object.__setattr__(model, 'module', module)


# The arguments can be given by position, in T5X's order.
@dataclasses.dataclass(frozen=True)
class MoeEncoderDecoderModel(EncoderDecoderModel):
    """An encoder-decoder with experts.

    Attributes:
      aux_loss_factor: the coefficient of the load-balance loss. It replaces the
        coefficient in the network's `ExpertsConfig`.
      router_z_loss_factor: the coefficient of the router's z-loss. It also replaces the coefficient
        in `ExpertsConfig`.

    `models.EncoderDecoderModel` describes the other attributes.
    """

    default_decoder_params: Any = dataclasses.field(default=None, init=False, repr=False)
    aux_loss_factor: float = 0.0
    router_z_loss_factor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _set_factors(
            self,
            aux_loss_factor=self.aux_loss_factor,
            router_z_loss_factor=self.router_z_loss_factor,
        )

    # A gin file sets the arguments of this method, and not of `EncoderDecoderModel`.
    def predict_batch_with_aux(
        self,
        params: Any,
        batch: Mapping[str, jax.Array],
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool | None = False,
        num_decodes: int | None = 1,
        prompt_with_targets: bool = False,
        flax_mutables: Mapping[str, Any] | None = None,
    ) -> Predicted:
        return super().predict_batch_with_aux(
            params,
            batch,
            rng,
            decoder_params,
            return_all_decodes,
            num_decodes,
            prompt_with_targets,
            flax_mutables,
        )


@dataclasses.dataclass(frozen=True)
class MoeDecoderOnlyModel(DecoderOnlyModel):
    """A decoder with experts. `MoeEncoderDecoderModel` describes its own attributes."""

    aux_loss_factor: float = 0.0
    router_z_loss_factor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _set_factors(
            self,
            aux_loss_factor=self.aux_loss_factor,
            router_z_loss_factor=self.router_z_loss_factor,
        )

    # A gin file sets the arguments of this method, and not of `DecoderOnlyModel`.
    def predict_batch_with_aux(
        self,
        params: Any,
        batch: Mapping[str, jax.Array],
        rng: jax.Array | None = None,
        *,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
        decoder_params: Mapping[str, Any] | None = None,
        flax_mutables: Mapping[str, Any] | None = None,
    ) -> Predicted:
        return super().predict_batch_with_aux(
            params,
            batch,
            rng,
            return_all_decodes=return_all_decodes,
            num_decodes=num_decodes,
            decoder_params=decoder_params,
            flax_mutables=flax_mutables,
        )
