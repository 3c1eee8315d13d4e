"""T5X's `adafactor`: its optimizer by T5X's names. `train.optimizers.factored` has the rule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from train.errors import ConfigError, check_fields
from train.optimizers import LogicalAxes, Optimizer
from train.optimizers.factored import (
    HEURISTIC_RULE as HEURISTIC_RULE,
    AdafactorSettings,
    FactorDim as FactorDim,
    Factoring,
    FactorRule,
    factor_dimensions,
    make_adafactor,
    rule_by_axes,
)
from train.t5x.refusals import check_off, check_one_of, refusal

KEY = 'adafactor.Adafactor'
# The valid intervals of numeric settings. Others are above 0.
NUMBERS = {
    'beta1': '[0, 1)',
    'decay_rate': '(0, 1]',
    'epsilon2': '[0, inf)',
    'learning_rate': '[0, inf)',
    'step_offset': '[0, inf)',
    'weight_decay_rate': '[0, inf)',
    'weight_decay_rate_lr_exponent': '[0, inf)',
}
# What a rule may call the dimensions.
_KINDS = {
    'row': FactorDim.ROW,
    'col': FactorDim.COLUMN,
    'column': FactorDim.COLUMN,
    'batch': FactorDim.BATCH,
    'none': FactorDim.NONE,
    'unfactorized': FactorDim.NONE,
}
_COLUMNS = 'vocab mlp heads kv_heads kv joined_kv q_wi_fused o_wo_fused multiquery_heads kv_fused'


def standard_logical_factor_rules() -> dict[str, FactorDim]:
    """Returns what each logical axis of T5X's models is to Adafactor.

    Models of this trainer have 'kv_heads' in addition.
    """
    return {
        'embed': FactorDim.ROW,
        **dict.fromkeys(_COLUMNS.split(), FactorDim.COLUMN),
        'layers': FactorDim.BATCH,
        'stack': FactorDim.BATCH,
        'relpos_buckets': FactorDim.NONE,
        'layer_norm_scale': FactorDim.NONE,
    }


def logical_factor_rules() -> dict[str, FactorDim]:
    """Returns T5X's rules, with rules for mixtures of experts: each expert is factored alone."""
    return {
        **standard_logical_factor_rules(),
        'expert': FactorDim.BATCH,
        'expert_mlp': FactorDim.COLUMN,
        'unmodeled': FactorDim.NONE,
    }


class HParamMap:
    """A setting that differs between parameters.

    Args:
      rules: (regular expression, value) pairs. The first expression that occurs in the path of a
        parameter, such as 'decoder/mlp/wi/kernel', chooses its value.
    """

    def __init__(self, rules: Sequence[tuple[str, Any]]):
        self.rules = tuple((re.compile(pattern), value) for pattern, value in rules)

    def __getitem__(self, path: str) -> Any:
        """The value for a parameter; raises ConfigError if no rule matches."""
        for pattern, value in self.rules:
            if pattern.search(path):
                return value
        raise ConfigError(
            f'adafactor.HParamMap.rules: no rule matches {path!r}: add a last rule with ".*"'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(AdafactorSettings):
    """The optimizer of T5X's configurations. The trainer sets its learning rate.

    Attributes:
      learning_rate: must be None; set `trainer.Trainer.learning_rate_fn` instead.
      factored: whether the second moments of large matrices are stored as rows and columns.
      multiply_by_parameter_scale: whether updates are scaled by the parameter's root mean square:
        True, False, or an `HParamMap` with either for each parameter.
      factor_map: an `HParamMap` with the rule of each parameter: a tuple with 'row', 'column',
        'batch' or 'none' for each dimension, `HEURISTIC_RULE`, or None for not factored.
        `logical_factor_rules` takes precedence.
      min_dim_size_to_factor: matrices with a smaller dimension are not factored.
      logical_factor_rules: what each logical axis is: 'row', 'column', 'batch' or 'none'.

    `train.optimizers.factored.AdafactorSettings` describes the other attributes.
    """

    learning_rate: float | None = None
    factored: bool = True
    multiply_by_parameter_scale: bool | HParamMap = True
    min_dim_size_to_factor: int = 128
    factor_map: HParamMap | None = None
    logical_factor_rules: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        trainer = 'the learning rate is set by trainer.Trainer.learning_rate_fn'
        check_off(f'{KEY}.learning_rate', self.learning_rate, trainer)
        scaled, key = self.multiply_by_parameter_scale, f'{KEY}.multiply_by_parameter_scale'
        if not isinstance(scaled, HParamMap):
            check_one_of(key, scaled, (True, False), 'it must be a bool or an @HParamMap()')
        if self.factor_map is not None and not isinstance(self.factor_map, HParamMap):
            raise refusal(f'{KEY}.factor_map', self.factor_map, 'write @adafactor.HParamMap()')
        if not self.factored and self.factor_map is not None:
            raise refusal(f'{KEY}.factored', False, 'factor_map is set; leave one of them out')
        check_fields(Adafactor, self, f'{KEY}.', **NUMBERS)
        try:
            floating = jnp.issubdtype(jnp.dtype(self.dtype_momentum), jnp.floating)
        except TypeError:
            floating = False
        if not floating:
            why = "write 'float32' or 'bfloat16'"
            raise refusal(f'{KEY}.dtype_momentum', self.dtype_momentum, why)
        if (rules := self.logical_factor_rules) is not None:
            if not isinstance(rules, Mapping):
                why = 'write @adafactor.standard_logical_factor_rules(), with the parentheses'
                raise refusal(f'{KEY}.logical_factor_rules', rules, why)
            for axis, kind in rules.items():
                _kind(f'{KEY}.logical_factor_rules[{axis!r}]', kind)

    def optimizer(self, learning_rate: optax.Schedule) -> Optimizer:
        """The trainer's optimizer with this learning rate."""
        return Optimizer(transform=self.transform, learning_rate=learning_rate, clip_norm=None)

    def transform(
        self, learning_rate: optax.Schedule | float, logical_axes: LogicalAxes
    ) -> optax.GradientTransformation:
        """The optax transformation, given the names of the dimensions of each parameter."""
        scaled = self.multiply_by_parameter_scale

        def factoring(path: str, shape: tuple[int, ...]) -> Factoring:
            rule = self._rule(path, logical_axes)
            return factor_dimensions(path, shape, rule, self.min_dim_size_to_factor)

        def is_scaled(path: str) -> bool:
            return bool(scaled[path] if isinstance(scaled, HParamMap) else scaled)

        return make_adafactor(learning_rate, self, factoring, is_scaled)

    def _rule(self, path: str, logical_axes: LogicalAxes) -> FactorRule:
        """The factor rule of a parameter."""
        if not self.factored:
            return None
        if self.logical_factor_rules is not None and path in logical_axes:
            rules = {axis: _kind(axis, kind) for axis, kind in self.logical_factor_rules.items()}
            return rule_by_axes(path, logical_axes[path], rules)
        rule = HEURISTIC_RULE if self.factor_map is None else self.factor_map[path]
        if rule is None or rule is HEURISTIC_RULE:
            return rule
        return tuple(_kind(f'{KEY}.factor_map[{path!r}]', kind) for kind in rule)


def _kind(key: str, name: Any) -> FactorDim:
    """The FactorDim of a name. T5X's own enumeration has the same names."""
    if isinstance(name, FactorDim):
        return name
    found = _KINDS.get(str(getattr(name, 'name', name)).lower())
    if found is None:
        raise refusal(key, name, "write 'row', 'column', 'batch' or 'none'")
    return found
