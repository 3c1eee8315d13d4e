"""Arrays of a checkpoint in groups, so that a model of many layers fits on a screen."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from partitioning.state import Role
from train.checkpoints.arrays.stored import StoredArray

_OPTIMIZER = ('opt_state/', 'state/param_states/')
_OTHER = ('step', 'state/step', 'flax_mutables/')
ROLES: tuple[Role, ...] = ('parameters', 'optimizer', 'other')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayGroup:
    """Arrays whose names differ only in numbers, and which have the same shape and dtype.

    The arrays of an optimizer are in one group for each thing that it keeps of all parameters.

    Attributes:
      name: their name, with the numbers as ranges, such as 'params/layers_[0-11]/mlp/wi/kernel', or
        with '*' for the name of a parameter, such as 'opt_state/0/mu/*'.
      count: the number of arrays.
      shape: the shape of each, or None if they differ.
      dtype: the dtype of each.
      nbytes: the size of all of them, in bytes.
      role: their role.
    """

    name: str
    count: int
    shape: tuple[int, ...] | None
    dtype: str
    nbytes: int
    role: Role


def role_of(name: str) -> Role:
    """The role of an array by its name in a checkpoint of any format.

    Weights in other formats have any names, so what is neither of an optimizer nor a step is a
    parameter.
    """
    if name.startswith(_OPTIMIZER):
        return 'optimizer'
    return 'other' if name.startswith(_OTHER) else 'parameters'


def group_arrays(arrays: Mapping[str, StoredArray]) -> list[ArrayGroup]:
    """Groups arrays: parameters first, then arrays of the optimizer, each in their order."""
    groups = dict[tuple[Any, ...], list[str]]()
    parameters = {name.partition('/')[2] for name in arrays if role_of(name) == 'parameters'}
    for name, array in arrays.items():
        role = role_of(name)
        kept = _replace_parameter(name, parameters) if role == 'optimizer' else name
        pattern = re.sub(r'\d+', '#', name) if kept == name else kept
        shape = tuple(array.shape) if kept == name else None
        groups.setdefault((pattern, shape, str(array.dtype), role), []).append(name)
    found = [
        ArrayGroup(
            name=_with_ranges(names) if '*' not in pattern else pattern,
            count=len(names),
            shape=shape,
            dtype=dtype,
            nbytes=sum(arrays[name].nbytes for name in names),
            role=role,
        )
        for (pattern, shape, dtype, role), names in groups.items()
    ]
    return sorted(found, key=lambda group: ROLES.index(group.role))


def _replace_parameter(name: str, parameters: Collection[str]) -> str:
    """The name with '*' in place of the longest name of a parameter in it."""
    keys = name.split('/')
    for length in range(len(keys) - 1, 0, -1):
        for start in range(1, len(keys) - length + 1):
            if '/'.join(keys[start : start + length]) in parameters:
                return '/'.join([*keys[:start], '*', *keys[start + length :]])
    return name


def _with_ranges(names: Sequence[str]) -> str:
    """The name that stands for names which differ only in numbers."""
    columns = zip(*(re.split(r'(\d+)', name) for name in names), strict=True)
    return ''.join(_range({*column}) for column in columns)


def _range(texts: Collection[str]) -> str:
    """One text as it is, and several numbers as a range."""
    if len(texts) == 1:
        return next(iter(texts))
    shown = sorted(texts, key=int)
    if int(shown[-1]) - int(shown[0]) == len(shown) - 1:
        return f'[{shown[0]}-{shown[-1]}]'
    shown = shown if len(shown) <= 4 else [*shown[:3], '...', shown[-1]]
    return f'[{",".join(shown)}]'
