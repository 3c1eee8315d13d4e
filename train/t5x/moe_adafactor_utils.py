"""T5X's `contrib.moe.adafactor_utils`: what the logical axes of experts are to Adafactor."""

from __future__ import annotations

from train.t5x.adafactor import FactorDim, standard_logical_factor_rules


def logical_factor_rules() -> dict[str, FactorDim]:
    """Returns T5X's rules, with those of mixtures of experts: each expert is factored alone."""
    return {
        **standard_logical_factor_rules(),
        'expert': FactorDim.BATCH,
        'expert_mlp': FactorDim.COLUMN,
        'unmodeled': FactorDim.NONE,
    }
