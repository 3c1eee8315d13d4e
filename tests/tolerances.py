"""How far apart two float32 programs for the same function may be, derived from the function.

Two processors add up numbers in different orders, and some multiply and add in one operation. Every
operation then rounds by up to `UNIT` of its result, and what this does to the final result depends
on the function: a softmax of large scores amplifies it, and a mean averages it out. A tolerance
that was found by trying therefore holds on one processor only.

`rounding_spread` measures the amplification instead. It multiplies each number that goes in by
1 + 2**-14 or 1 - 2**-14, far above what any processor rounds, and scales the change of the result
down to one rounding. The change is linear: 2**-11 and 2**-17 give the same spread within 10%.

For example, two programs for the logits of T5 1.1 differ by 9e-5 on one processor and by 1.03e-4 on
another. The spread of the logits is 6.7e-5, and for nine other models 2e-6 to 6e-6. All ten models
differ from PyTorch by 0.8 to 1.9 times their spread. A wrong formula differs by thousands of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

UNIT = 2.0**-24  # the largest relative error of rounding to float32
_CHANGE = 2.0**-14
# Both programs round each number that they compute, and not only those that go in.
SPREADS = 4.0


def rounding_spread(function: Callable[[Any], Any], inputs: Any, draws: int = 4) -> Any:
    """Returns by how much one rounding of each input changes the results.

    Args:
      function: a function of one tree of float32 arrays, to a tree of arrays or of numbers.
      inputs: the tree.
      draws: how many times the inputs are changed; the largest change counts.

    Returns:
      A tree like the result, with the largest change of any element of each array.
    """
    random = np.random.default_rng(0)
    before = jax.tree.map(_wide, function(inputs))
    spreads = jax.tree.map(lambda x: 0.0, before)
    for _ in range(draws):
        changed = jax.tree.map(lambda x: _change(x, random), inputs)
        changes = jax.tree.map(lambda x, y: np.abs(_wide(x) - y).max(), function(changed), before)
        spreads = jax.tree.map(max, spreads, changes)
    return jax.tree.map(lambda change: change * UNIT / _CHANGE, spreads)


def rounding_limit(expected: Any, spread: float, *, steps: int = 1, operations: int = 0) -> Any:
    """Returns how far the result of another program for the same function may be from this one.

    Args:
      expected: the result.
      spread: what `rounding_spread` returns for the function.
      steps: how many steps the function takes in turn; each of them rounds everything once more.
      operations: how often an element itself is rounded in a step, which the inputs do not show.
    """
    return SPREADS * steps * (spread + operations * UNIT * np.abs(_wide(expected)))


def assert_equal_but_for_rounding(
    found: Any, expected: Any, spread: float, *, name: str = '', **settings: int
) -> None:
    """Asserts that a result of float32 is the result of another program for the same function.

    Args:
      found, expected: the results.
      spread: what `rounding_spread` returns for the function.
      name: what the message calls the result.
      **settings: `steps` and `operations` of `rounding_limit`.
    """
    limit = rounding_limit(expected, spread, **settings)
    apart = np.abs(_wide(found) - _wide(expected))
    message = f'{name} differs by {apart.max():.3g}, where rounding explains {limit.max():.3g}'
    assert (apart <= limit).all(), message


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def _change(x: Any, random: np.random.Generator) -> Any:
    array = np.asarray(x)
    if array.dtype != np.float32:
        return x
    changed = array * (1 + _CHANGE * random.choice([-1, 1], array.shape)).astype(np.float32)
    return jax.device_put(changed, x.sharding) if isinstance(x, jax.Array) else changed
