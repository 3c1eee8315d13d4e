"""The file of a golden forecast: what a reviewer agreed to, and what differs from it.

It is JSON with one line for each exchange and each array, so that version control shows what
changed:

    {"format": "meshwright golden forecast 1",
     "function": "train_step", "topology": "v5p:4x4x4", "num_slices": 1,
     "mesh": {"fsdp": 16, "tensor": 4},
     "compiler": "libtpu 0.0.52",
     "fits": true, "peak": 8053063680,
     "collectives": [
      {"kind": "all-gather", "axes": ["fsdp"], "network": "ici", "bytes": 48000000000, "count": 96}
     ],
     "arrays": [
      {"path": "params/embedding", "shape": [128256, 4096], "dtype": "float32",
       "spec": "P('tensor', 'fsdp')", "bytes_per_device": 32833536}
     ]}
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.report.forecasts import Forecast
from partitioning.amounts import bytes_str, share_str
from partitioning.plan.tables import shape_str, spec_or_padded_str
from partitioning.untrusted_text import parse_json

FORMAT = 'meshwright golden forecast 1'
# The keys of each object, with the types of their values.
_HEAD: dict[str, tuple[type, ...]] = {
    'function': (str,),
    'topology': (str,),
    'num_slices': (int,),
    'mesh': (dict,),
    'compiler': (str,),
    'fits': (bool, type(None)),
    'peak': (int,),
}
_LISTS: dict[str, tuple[type, ...]] = {'collectives': (list,), 'arrays': (list,)}
_EXCHANGE: dict[str, tuple[type, ...]] = {
    'kind': (str,),
    'axes': (list,),
    'network': (str,),
    'bytes': (int,),
    'count': (int,),
}
_ARRAY: dict[str, tuple[type, ...]] = {
    'path': (str,),
    'shape': (list,),
    'dtype': (str,),
    'spec': (str,),
    'bytes_per_device': (int,),
}

Golden = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerances:
    """How much a forecast may differ from its golden file. Layouts may not differ.

    Attributes:
      peak: the share by which the peak memory may differ.
      wire: the share by which the bytes of one kind of exchange over the same axes may differ.
      count: the share by which the number of such exchanges may differ.
    """

    peak: float = 0.01
    wire: float = 0.01
    count: float = 0.0


def golden_of(forecast: Forecast) -> dict[str, Any]:
    """What a golden file has of a forecast, as values that JSON can hold."""
    sums: dict[tuple[str, tuple[str, ...], str], list[float]]
    sums = collections.defaultdict(lambda: [0.0, 0])
    for c, _ in forecast.collectives:
        held = sums[c.kind, c.axes, c.network]
        held[0] += c.total_bytes
        held[1] += c.count
    return {
        'format': FORMAT,
        'function': forecast.function,
        'topology': forecast.topology,
        'num_slices': forecast.num_slices,
        'mesh': dict(forecast.mesh),
        'compiler': forecast.back_end_version,
        'fits': forecast.fits,
        'peak': forecast.memory.peak,
        'collectives': [
            dict(zip(_EXCHANGE, (kind, [*axes], network, round(sent), count), strict=True))
            for (kind, axes, network), (sent, count) in sorted(sums.items())
        ],
        'arrays': [
            {
                'path': row.path,
                'shape': [*row.shape],
                'dtype': row.dtype,
                'spec': spec_or_padded_str(row.spec),
                'bytes_per_device': row.bytes_per_device,
            }
            for row in sorted(forecast.arrays, key=lambda row: row.path.split('/'))
        ],
    }


def golden_to_text(golden: Golden) -> str:
    """The text of a golden file; see the format above."""
    head = ',\n'.join(f' {json.dumps(key)}: {json.dumps(golden[key])}' for key in _HEAD)
    lists = ',\n'.join(f' {json.dumps(key)}: [{_lines(golden[key])}]' for key in _LISTS)
    return f'{{"format": {json.dumps(FORMAT)},\n{head},\n{lists}}}\n'


def golden_from_text(text: str) -> dict[str, Any]:
    """Reads the text of a golden file.

    Raises:
      ValueError: if it is not one.
    """
    held = parse_json(text)
    if not isinstance(held, dict) or held.get('format') != FORMAT:
        found = held.get('format') if isinstance(held, dict) else type(held).__name__
        raise ValueError(f'the file must have "format": "{FORMAT}", not {found!r}')
    _check_object('the file', held, {'format': (str,), **_HEAD, **_LISTS})
    for key, keys in (('collectives', _EXCHANGE), ('arrays', _ARRAY)):
        for entry in held[key]:
            _check_object(f'an entry of "{key}"', entry, keys)
    return held


def compare_golden(golden: Golden, now: Golden, tolerances: Tolerances) -> list[str]:
    """Returns what differs, one line for each figure and array; empty if nothing does."""
    lines = []
    if golden['mesh'] != now['mesh']:
        lines.append(f'mesh: {_mesh_str(golden["mesh"])} -> {_mesh_str(now["mesh"])}')
    if golden['fits'] != now['fits']:
        words = {True: 'fits', False: 'does not fit', None: 'limit not known'}
        lines.append(f'{words[golden["fits"]]} -> {words[now["fits"]]}')
    if _differs(golden['peak'], now['peak'], tolerances.peak):
        lines.append(f'peak memory: {_change(golden["peak"], now["peak"], tolerances.peak)}')
    lines += _compare_exchanges(golden['collectives'], now['collectives'], tolerances)
    lines += _compare_arrays(golden['arrays'], now['arrays'])
    return lines


def _compare_exchanges(
    golden: Sequence[Golden], now: Sequence[Golden], tolerances: Tolerances
) -> Iterator[str]:
    old, new = ({_exchange_str(e): e for e in held} for held in (golden, now))
    for name in {**old, **new}:
        if name not in new:
            yield f'- {name}: {bytes_str(old[name]["bytes"])} in {old[name]["count"]:,}'
        elif name not in old:
            yield f'+ {name}: {bytes_str(new[name]["bytes"])} in {new[name]["count"]:,}'
        else:
            before, after = old[name], new[name]
            changes = []
            if _differs(before['bytes'], after['bytes'], tolerances.wire):
                changes.append(_change(before['bytes'], after['bytes'], tolerances.wire))
            if _differs(before['count'], after['count'], tolerances.count):
                changes.append(f'executed {before["count"]:,} -> {after["count"]:,} times')
            if changes:
                yield f'~ {name}: {"; ".join(changes)}'


def _compare_arrays(golden: Sequence[Golden], now: Sequence[Golden]) -> Iterator[str]:
    old, new = ({a['path']: a for a in held} for held in (golden, now))
    for path in {**old, **new}:
        if path not in new:
            yield f'- {path}: {_array_str(old[path])}'
        elif path not in old:
            yield f'+ {path}: {_array_str(new[path])}'
        elif old[path] != new[path]:
            changes = [
                f'{key.replace("_", " ")} {_value_str(old[path], key)} -> '
                f'{_value_str(new[path], key)}'
                for key in _ARRAY
                if old[path][key] != new[path][key]
            ]
            yield f'~ {path}: {"; ".join(changes)}'


def _differs(before: float, after: float, tolerance: float) -> bool:
    return abs(after - before) > tolerance * abs(before)


def _change(before: float, after: float, tolerance: float) -> str:
    """Two numbers of bytes and their difference: `7.50 GiB -> 9.00 GiB (+20%, more than 1%)`."""
    change = f'{bytes_str(before)} -> {bytes_str(after)}'
    if not before:
        return change
    share = after / before - 1
    sign = '+' if share > 0 else '-'
    return f'{change} ({sign}{share_str(abs(share))}, more than {100 * tolerance:g}%)'


def _exchange_str(exchange: Golden) -> str:
    axes = ' x '.join(exchange['axes']) or 'unnamed axes'
    return f'{exchange["kind"]} over {axes} ({exchange["network"]})'


def _array_str(array: Golden) -> str:
    shape, held = shape_str(array['shape']), bytes_str(array['bytes_per_device'])
    return f'{shape} {array["dtype"]}, {array["spec"]}, {held} per device'


def _value_str(array: Golden, key: str) -> str:
    value = array[key]
    if key == 'shape':
        return shape_str(value)
    return bytes_str(value) if key == 'bytes_per_device' else str(value)


def _mesh_str(mesh: Mapping[str, int]) -> str:
    return ' x '.join(f'{axis} {size}' for axis, size in mesh.items())


def _lines(entries: Sequence[Golden]) -> str:
    lines = ',\n'.join(f'  {json.dumps(entry)}' for entry in entries)
    return f'\n{lines}\n ' if lines else ''


def _check_object(what: str, held: Any, keys: Mapping[str, tuple[type, ...]]) -> None:
    if not isinstance(held, dict) or {*held} != {*keys}:
        found = ', '.join(map(str, held)) if isinstance(held, dict) else repr(held)
        raise ValueError(f'{what} must have {", ".join(keys)}, not {found}')
    for key, kinds in keys.items():
        if not isinstance(held[key], kinds):
            raise ValueError(f'{what} has {key!r} {held[key]!r}, which must be {kinds[0].__name__}')
