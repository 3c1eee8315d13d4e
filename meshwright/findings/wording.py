"""How findings write layouts, lines and types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.jaxpr.values import Axes, Value
from partitioning.rules import from_tuple, spec_str


def axes_str(axes: Sequence[Axes | None]) -> str:
    """The mesh axes of each dimension as code: `P('data', None)`."""
    return spec_str(PartitionSpec(*(from_tuple(own or ()) for own in axes)))


def type_str(value: Value) -> str:
    """The type of a value: `float32[8,16]`."""
    return f'{value.dtype}[{",".join(map(str, value.shape))}]'


def and_more(group: Sequence[Any]) -> str:
    """The beginning of a sentence about the first of several arrays."""
    return f'with {len(group) - 1} more like it, ' if len(group) > 1 else ''
