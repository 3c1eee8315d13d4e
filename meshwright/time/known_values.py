"""The results of small steps whose operands are constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshwright.jaxpr.values import Step

_LARGEST = 2**20  # elements; larger results are not computed


def evaluate(step: Step, arguments: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of a step, or () if it is not simple or an argument is not known.

    Args:
      step: the step.
      arguments: the elements of its inputs, None for those that are not known.
    """
    compute = _OPERATIONS.get(step.name)
    if compute is None or any(argument is None for argument in arguments):
        return ()
    if any(value.size >= _LARGEST for value in step.outputs):
        return ()
    return [np.asarray(compute(step.params, *arguments))]


def _divide(_: Any, x: Any, y: Any) -> Any:
    """Divides as XLA does: integers are rounded towards zero."""
    whole = np.issubdtype(np.asarray(x).dtype, np.integer)
    return np.trunc(np.divide(x, y)).astype(np.asarray(x).dtype) if whole else np.divide(x, y)


def _broadcast(params: Any, x: Any, *_: Any) -> Any:
    shape = [1] * len(params['shape'])
    for dimension, size in zip(params['broadcast_dimensions'], np.shape(x), strict=True):
        shape[dimension] = size
    return np.broadcast_to(np.reshape(x, shape), params['shape'])


def _iota(params: Any) -> Any:
    shape = [1] * len(params['shape'])
    shape[params['dimension']] = -1
    line = np.arange(params['shape'][params['dimension']], dtype=params['dtype'])
    return np.broadcast_to(line.reshape(shape), params['shape'])


def _select(_: Any, which: Any, *cases: Any) -> Any:
    return np.choose(np.asarray(which).astype(int), [np.asarray(case) for case in cases])


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *arguments: function(*arguments)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    'add': _plain(np.add),
    'sub': _plain(np.subtract),
    'mul': _plain(np.multiply),
    'div': _divide,
    'rem': _plain(np.fmod),
    'max': _plain(np.maximum),
    'min': _plain(np.minimum),
    'neg': _plain(np.negative),
    'sign': _plain(np.sign),
    'eq': _plain(np.equal),
    'ne': _plain(np.not_equal),
    'lt': _plain(np.less),
    'le': _plain(np.less_equal),
    'gt': _plain(np.greater),
    'ge': _plain(np.greater_equal),
    'and': _plain(np.bitwise_and),
    'or': _plain(np.bitwise_or),
    'xor': _plain(np.bitwise_xor),
    'not': _plain(np.invert),
    'clamp': _plain(lambda low, x, high: np.clip(x, low, high)),
    'copy': _plain(np.asarray),
    'name': _plain(np.asarray),
    'sharding_constraint': _plain(np.asarray),
    'optimization_barrier': _plain(np.asarray),
    'convert_element_type': lambda params, x: np.asarray(x).astype(params['new_dtype']),
    'squeeze': lambda params, x: np.squeeze(x, tuple(params['dimensions'])),
    'reshape': lambda params, x: np.reshape(x, params['new_sizes']),
    'broadcast_in_dim': _broadcast,
    'iota': _iota,
    'select_n': _select,
}
