"""Constants in jaxprs: the results of small operations whose arguments are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# The values of variables that are known; others are None or not there.
Values = dict[Any, Any]
_LARGEST = 2**20  # elements; larger results are not computed


def value_of(atom: Any, values: Mapping[Any, Any]) -> Any:
    """The value of a variable or a literal, or None if it is not known."""
    return atom.val if hasattr(atom, 'val') else values.get(atom)


def bodies_of(params: Mapping[str, Any]) -> list[Any]:
    """The jaxprs in the parameters of an equation."""

    def find(value: Any) -> Iterator[Any]:
        if hasattr(value, 'eqns') or hasattr(getattr(value, 'jaxpr', None), 'eqns'):
            yield value
        elif isinstance(value, tuple | list):
            for one in value:
                yield from find(one)

    return [body for value in params.values() for body in find(value)]


def evaluate(equation: Any, arguments: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation, if it is simple and all its arguments are known."""
    compute = _OPERATIONS.get(equation.primitive.name)
    if compute is None or any(argument is None for argument in arguments):
        return ()
    if any(getattr(v.aval, 'size', _LARGEST) >= _LARGEST for v in equation.outvars):
        return ()
    return [np.asarray(compute(equation.params, *arguments))]


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
