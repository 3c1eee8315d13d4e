"""What differs between two traces of one function: the arrays of its arguments, and their layouts.

state.opt.count  was weakly typed int32[] and is int32[]
batch            was float32[64,128] and is float32[48,128]
state['step']    was not laid out and is laid out by P()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.sharding import NamedSharding

from meshwright.jax_private import TracedCall
from partitioning.rules import spec_str


def list_differences(before: TracedCall, after: TracedCall) -> Iterator[str]:
    """Yields what differs in the arguments of two traces, an array a line: 'x was ... and is ...'.

    Args:
      before, after: the traces of one function, or of two of the same name.
    """
    old, new = (dict(zip(t.argument_names, _about(t), strict=True)) for t in (before, after))
    for name in {**old, **new}:
        if name not in new:
            yield f'{name} was {" ".join(old[name][:2]).strip()} and is left out'
        elif name not in old:
            yield f'{name} was left out and is {" ".join(new[name][:2]).strip()}'
        elif old[name] != new[name]:
            yield f'{name} {_difference(old[name], new[name])}'
    if before.donated != after.donated and old.keys() == new.keys():
        yield 'other arguments are donated'


def _difference(old: tuple[str, str, str], new: tuple[str, str, str]) -> str:
    if old[:2] != new[:2]:
        was, now = (' '.join(filter(None, one[:2])) for one in (old, new))
    else:
        was, now = old[2], new[2]
    return f'was {was} and is {now}'


def _about(traced: TracedCall) -> Iterator[tuple[str, str, str]]:
    """Of each array: 'weakly typed' or '', its type, and its layout."""
    for aval, sharding in zip(traced.jaxpr.in_avals, traced.arguments, strict=True):
        if not hasattr(aval, 'dtype'):
            yield '', str(aval), ''
            continue
        shape = ','.join(map(str, aval.shape))
        weak = 'weakly typed' if aval.weak_type else ''
        yield weak, f'{aval.dtype.name}[{shape}]', _layout_str(sharding, len(aval.shape))


def _layout_str(sharding: Any, rank: int) -> str:
    if isinstance(sharding, NamedSharding):
        entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
        return f'laid out by {spec_str(type(sharding.spec)(*entries))}'
    return 'on one device' if sharding is not None else 'not laid out'
