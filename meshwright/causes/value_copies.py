"""Values as they are inside of loops and of functions."""

from __future__ import annotations

import dataclasses

from meshwright.causes.values import Value


def of_shape(value: Value, shape: tuple[int, ...]) -> Value:
    """The value as a function sees it that has another shape, such as that of one shard."""
    if value.shape == shape:
        return value
    return dataclasses.replace(value, shape=shape, copied_from=(value,))


def first_of(value: Value) -> Value:
    """One element along the first dimension."""
    return dataclasses.replace(
        value,
        copied_from=(value,),
        shape=value.shape[1:],
        dims=value.dims[1:],
        layout=None if value.layout is None else value.layout[1:],
    )


def merge(before: Value, after: Value) -> Value:
    """A carry of a loop, with what is known before and after an iteration."""
    dims = tuple(a or b for a, b in zip(before.dims, after.dims, strict=True))
    return dataclasses.replace(
        before,
        copied_from=(before, after),
        dims=dims,
        argument=before.argument if before.argument == after.argument else '',
        gradient_of=after.gradient_of or before.gradient_of,
    )
