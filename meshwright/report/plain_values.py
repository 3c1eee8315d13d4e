"""Frozen dataclasses as JSON, and back.

to_plain(At(line='model.py:41'))        {'line': 'model.py:41', 'text': '', 'why': '', 'rule': ''}
from_plain(At, {'line': 'model.py:41'})  At(line='model.py:41')
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from partitioning.hardware import CHIPS, Chip
from partitioning.untrusted_text import parse_json

_Value = TypeVar('_Value')
# Fields that only the process that made them uses: the changes of a cause that may be tried.
_LEFT_OUT = ('all_changes',)


def to_plain(value: Any) -> Any:
    """A dataclass as a dict of its fields, a tuple as a list, and a chip as its name."""
    if isinstance(value, Chip):
        return value.name
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value) if f.name not in _LEFT_OUT]
        return {name: to_plain(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {str(key): to_plain(x) for key, x in value.items()}
    return [to_plain(x) for x in value] if isinstance(value, tuple | list) else value


def map_texts(value: _Value, function: Callable[[str], str]) -> _Value:
    """The same text, tuple or dataclass with `function` of each text in it.

    Fields that `to_plain` leaves out stay as they are.
    """
    changed: Any = value
    if isinstance(value, str):
        changed = function(value)
    elif isinstance(value, tuple):
        changed = tuple(map_texts(entry, function) for entry in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.name not in _LEFT_OUT]
        held = {name: map_texts(getattr(value, name), function) for name in names}
        changed = dataclasses.replace(value, **held)
    return changed


def from_plain(kind: Any, value: Any, path: str) -> Any:
    """The value of a type from what `to_plain` made of it.

    Args:
      kind: the type: a dataclass, a union with None, or what their fields are annotated with.
      value: the plain value.
      path: where it stands in the file, for messages.

    Raises:
      ValueError: if the value is not of this type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (a for a in arguments if a is not type(None))
        return None if value is None else from_plain(inner, value, path)
    if kind is Chip:
        return _checked(value, lambda x: x in CHIPS, 'the name of a chip', path, CHIPS.get)
    if dataclasses.is_dataclass(kind):
        return _object(kind, value, path)
    if origin is tuple:
        _checked(value, lambda x: isinstance(x, list), 'a list', path)
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        if len(kinds) != len(value):
            raise ValueError(f'{path} must have {len(kinds)} entries, not {len(value)}')
        pairs = enumerate(zip(kinds, value, strict=True))
        return tuple(from_plain(a, x, f'{path}[{i}]') for i, (a, x) in pairs)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _checked(value, lambda x: isinstance(x, dict), 'an object', path)
        return {key: from_plain(arguments[1], x, f'{path}.{key}') for key, x in value.items()}
    if origin is typing.Literal:
        return _checked(value, lambda x: x in arguments, f'one of {arguments}', path)
    accepted = (int, float) if kind is float else kind
    is_kind = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    return _checked(value, lambda x: is_kind, f'of type {kind.__name__}', path)


def to_lines(held: Mapping[str, Any]) -> str:
    """JSON in which each entry of the object, and each entry of a list in it, has its own line."""
    lines = []
    for key, value in held.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = '[\n' + ',\n'.join(f'  {json.dumps(x)}' for x in value) + '\n ]'
        lines.append(f' {json.dumps(key)}: {text}')
    return '{\n' + ',\n'.join(lines) + '\n}\n'


def read_object(text: str, expected: str) -> dict[str, Any]:
    """The entries of a JSON object whose "format" is the expected one, without this entry.

    Raises:
      ValueError: if the text is not such an object.
    """
    try:
        held = parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f'the file is not JSON: {error}') from error
    found = held.get('format') if isinstance(held, dict) else held
    if found != expected:
        raise ValueError(f'the file must have "format": "{expected}", not {found!r}')
    return {key: value for key, value in held.items() if key != 'format'}


def _object(kind: Any, value: Any, path: str) -> Any:
    _checked(value, lambda x: isinstance(x, dict), 'an object', path)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in value:
        if name not in fields:
            raise ValueError(f'{path} has an unknown entry {name!r}')
    for name, field in fields.items():
        without = field.default is field.default_factory is dataclasses.MISSING
        if name not in value and without:
            raise ValueError(f'{path} lacks {name!r}')
    hints = _hints(kind)
    return kind(**{name: from_plain(hints[name], x, f'{path}.{name}') for name, x in value.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _checked(value: Any, is_valid: Any, expected: str, path: str, convert: Any = None) -> Any:
    try:
        valid = is_valid(value)
    except TypeError:  # a list is not a key of a dict
        valid = False
    if not valid:
        raise ValueError(f'{path} must be {expected}, not {value!r}')
    return value if convert is None else convert(value)
