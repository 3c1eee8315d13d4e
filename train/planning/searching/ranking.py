"""What compiled candidates say about the others: by how much predictions are off, by setting."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from train.planning.searching.candidate import Candidate

# How much evidence a setting needs before it is believed: with one compiled candidate, a setting
# takes half of what is unexplained, with three of them three quarters.
_DOUBT = 1.0


def correct(
    known: Sequence[tuple[Candidate, float]], candidates: Sequence[Candidate]
) -> list[float]:
    """Returns the factor by which the prediction of each candidate is to be multiplied.

    The factor is a product of one factor per setting, which a ridge regression finds in logarithms.

    Args:
      known: candidates whose figure is known, each with the ratio of the figure to its prediction.
      candidates: those whose factors are wanted.
    """
    if not known:
        return [1.0] * len(candidates)
    words = sorted({word for candidate, _ in known for word in candidate.features})
    has = np.array([[word in c.features for word in words] for c, _ in known], float)
    ratios = np.array([math.log(ratio) for _, ratio in known])
    usual = ratios.mean()
    # Every setting of one candidate shares what is unexplained, so the doubt grows with their
    # number.
    doubt = _DOUBT * has.sum(axis=1).mean()
    weights = np.linalg.solve(has.T @ has + doubt * np.eye(len(words)), has.T @ (ratios - usual))
    weight_of = dict(zip(words, weights.tolist(), strict=True))
    return [
        math.exp(usual + sum(weight_of.get(word, 0.0) for word in candidate.features))
        for candidate in candidates
    ]
