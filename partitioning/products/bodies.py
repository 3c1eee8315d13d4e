"""The jaxprs inside of an equation, and how often each of them runs.

A `scan` of 12 layers has one body, which runs 12 times. A `shard_map` over 8 devices has one body,
which runs on 8 devices with the shapes of one shard. A `cond` has one body for each branch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def bodies_of(equation: Any) -> list[Any]:
    """Returns the jaxprs in the parameters of an equation: Jaxprs and ClosedJaxprs."""

    def find(value: Any) -> Iterator[Any]:
        if hasattr(value, 'eqns'):
            yield value
        elif isinstance(value, tuple | list):
            for one in value:
                yield from find(one)

    return [body for value in equation.params.values() for body in find(value)]


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the Jaxpr in a ClosedJaxpr and its constants; a Jaxpr has no constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, 'jaxpr') else (jaxpr, ())


def count_runs(equation: Any) -> int:
    """Returns how often a device runs the bodies of an equation; 1 where nobody knows."""
    params, name = equation.params, equation.primitive.name
    if name == 'scan':
        return params['length']
    if name == 'pallas_call':  # its body has the shapes of one block
        return math.prod(n for n in params['grid_mapping'].grid if isinstance(n, int))
    return 1


def count_devices(equation: Any) -> int:
    """Returns on how many devices the bodies of an equation run, each with a part of the arrays."""
    params = equation.params
    if equation.primitive.name != 'shard_map':
        return 1
    return math.prod(params['mesh'].shape[axis] for axis in params['newly_manual_axes'])


def count_scan_arguments(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many arguments of a `scan` are the same in all iterations, and how many carried.

    The other arguments are scanned: each iteration has one element along their first dimension.
    """
    if 'num_consts' in params:
        return params['num_consts'], params['num_carry']
    constants, carried, _ = params['ft_in'].unpack()  # from jax 0.12 on
    return len(constants), len(carried)
