"""T5X's `adafactor`, implemented by optax."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax

from train.errors import check_counts
from train.optimizers import Optimizer
from train.t5x.refusals import check_number, check_off, check_one_of, refusal

# The valid intervals of numeric settings.
NUMBERS = {
    'beta1': '[0, 1) or None',
    'decay_rate': '(0, 1]',
    'clipping_threshold': '(0, inf) or None',
    'weight_decay_rate': '[0, inf) or None',
    'epsilon1': '(0, inf)',
    'global_norm_clip_threshold': '(0, inf) or None',
}


@dataclasses.dataclass(frozen=True)
class StandardFactorRules:
    """The choice of factored dimensions. optax always factors a parameter's two largest ones."""


def standard_logical_factor_rules(rules: Any = None) -> StandardFactorRules:
    """Replaces T5X's rules by logical axes. optax chooses the factored dimensions itself.

    Args:
      rules: custom rules, which are refused.

    Raises:
      ConfigError: if rules are given.
    """
    why = 'optax factors the two largest dimensions of a parameter'
    check_off('adafactor.standard_logical_factor_rules.rules', rules, why)
    return StandardFactorRules()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor:
    """The optimizer of T5X's configurations. The trainer sets its learning rate.

    Attributes:
      learning_rate: must be None; set `trainer.Trainer.learning_rate_fn` instead.
      factored: whether the second moments of large matrices are stored as rows and columns.
      multiply_by_parameter_scale: whether updates are scaled by the parameter's root mean square.
      beta1: the decay of the momentum, or None for no momentum.
      decay_rate: the exponent of the decay of second moments.
      step_offset: the step from which that decay counts.
      clipping_threshold: the largest root mean square of an update, or None for no clipping.
      weight_decay_rate: the fraction of a weight that each update subtracts, or None.
      min_dim_size_to_factor: dimensions smaller than this are not factored.
      epsilon1: the number added to squared gradients.
      epsilon2: the smallest scale of a parameter; must be 0.001.
      dtype_momentum: the dtype of the momentum.
      factor_map: must be None.
      logical_factor_rules: None, or `standard_logical_factor_rules()`.
      weight_decay_rate_lr_exponent: must be None.
      global_norm_clip_threshold: the global norm to which gradients are clipped, or None.
      max_parameter_scale: must be None.
      skip_nan_updates: must be False.
    """

    learning_rate: float | None = None
    factored: bool = True
    multiply_by_parameter_scale: bool = True
    beta1: float | None = None
    decay_rate: float = 0.8
    step_offset: int = 0
    clipping_threshold: float | None = 1.0
    weight_decay_rate: float | None = None
    min_dim_size_to_factor: int = 128
    epsilon1: float = 1e-30
    epsilon2: float = 1e-3
    dtype_momentum: Any = 'float32'
    factor_map: Any = None
    logical_factor_rules: StandardFactorRules | None = None
    weight_decay_rate_lr_exponent: float | None = None
    global_norm_clip_threshold: float | None = None
    max_parameter_scale: float | None = None
    skip_nan_updates: bool = False

    def __post_init__(self) -> None:
        key = 'adafactor.Adafactor'
        trainer = 'the learning rate is set by trainer.Trainer.learning_rate_fn'
        check_off(f'{key}.learning_rate', self.learning_rate, trainer)
        why = "optax's smallest scale of a parameter is 0.001"
        check_one_of(f'{key}.epsilon2', self.epsilon2, (1e-3,), why)
        scaled = self.multiply_by_parameter_scale
        why = 'optax scales the updates of all parameters or of none'
        check_one_of(f'{key}.multiply_by_parameter_scale', scaled, (True, False), why)
        factoring = 'optax factors the two largest dimensions of a parameter'
        check_off(f'{key}.factor_map', self.factor_map, factoring)
        rules = self.logical_factor_rules
        if rules is not None and not isinstance(rules, StandardFactorRules):
            raise refusal(f'{key}.logical_factor_rules', rules, f'{factoring}; leave it out')
        exponent = self.weight_decay_rate_lr_exponent
        why = "optax's weight decay has a constant rate"
        check_off(f'{key}.weight_decay_rate_lr_exponent', exponent, why)
        scale = self.max_parameter_scale
        check_off(
            f'{key}.max_parameter_scale', scale, 'optax does not limit the scale of a parameter'
        )
        for name, allowed in NUMBERS.items():
            check_number(f'{key}.{name}', getattr(self, name), allowed)
        check_counts(minimum=0, **{f'{key}.step_offset': self.step_offset})
        check_counts(**{f'{key}.min_dim_size_to_factor': self.min_dim_size_to_factor})
        check_one_of(f'{key}.factored', self.factored, (True, False), 'it must be True or False')
        try:
            floating = jnp.issubdtype(jnp.dtype(self.dtype_momentum), jnp.floating)
        except TypeError:
            floating = False
        if not floating:
            why = "write 'float32' or 'bfloat16'"
            raise refusal(f'{key}.dtype_momentum', self.dtype_momentum, why)
        why = 'a run stops as soon as the loss is not finite'
        check_off(f'{key}.skip_nan_updates', self.skip_nan_updates, why)

    def optimizer(self, learning_rate: optax.Schedule) -> Optimizer:
        """The trainer's optimizer with this learning rate."""
        return Optimizer(
            transform=self._transform,
            learning_rate=learning_rate,
            clip_norm=self.global_norm_clip_threshold,
        )

    def _transform(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
        return optax.adafactor(
            learning_rate,
            min_dim_size_to_factor=self.min_dim_size_to_factor,
            decay_rate=self.decay_rate,
            decay_offset=self.step_offset,
            multiply_by_parameter_scale=self.multiply_by_parameter_scale,
            clipping_threshold=self.clipping_threshold,
            momentum=self.beta1,
            dtype_momentum=self.dtype_momentum,
            weight_decay_rate=self.weight_decay_rate,
            eps=self.epsilon1,
            factored=self.factored,
        )
