"""Faults of layouts: other PartitionSpecs for parameters, for their moments, or for the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.blame_programs.faults.fault import Fault, layout_fault

_BOTH = ('data', 'model')
Table = tuple[tuple[str, dict[str, tuple[Any, ...]]], ...]


def _whole(ranks: dict[str, int], moments: str) -> Table:
    """Layouts that leave a parameter, or its moments, whole on every device."""
    found: list[tuple[str, dict[str, tuple[Any, ...]]]] = []
    for name, rank in ranks.items():
        whole = (None,) * rank
        found += [
            ('dropped rule', {name: whole}),
            ('unsharded optimizer', {f'{moments}/{name}': whole}),
        ]
    return tuple(found)


_SET_1: Table = (
    *_whole({'embedding': 2, 'head': 2, 'down': 3, 'out': 3, 'qkv': 5, 'up': 3}, 'momentum'),
    ('swapped axes', {'embedding': (None, 'model')}),
    ('swapped axes', {'head': ('model', None)}),
    ('swapped axes', {'down': (None, None, 'model')}),
    ('swapped axes', {'out': (None, None, 'model')}),
    ('swapped axes', {'up': (None, 'model', None)}),
    ('swapped axes', {'qkv': (None, None, 'model', None, None)}),
    ('wrong axis', {'qkv': (None, None, None, None, 'model')}),
    ('wrong axis', {'up': (None, None, 'data')}),
    ('wrong axis', {'down': (None, 'data', None)}),
    ('wrong axis', {'head': (None, 'data')}),
    ('wrong axis', {'batch': ('model', None)}),
    ('dropped rule', {'batch': (None, None)}),
)
_SET_2: Table = (
    ('axis of the batch', {'embedding': ('data', None)}),
    ('axis of the batch', {'out': (None, 'data', None)}),
    ('axis of the batch', {'qkv': (None, None, None, 'data', None)}),
    ('axis of the batch', {'up': (None, 'data', None)}),
    ('axis of the batch', {'down': (None, None, 'data')}),
)
_SET_3: Table = (
    ('parameter over both axes', {'embedding': (_BOTH, None)}),
    ('parameter over both axes', {'head': (None, _BOTH)}),
    ('parameter over both axes', {'up': (None, None, _BOTH)}),
    ('parameter over both axes', {'down': (None, _BOTH, None)}),
    ('two wrong layouts', {'up': (None, None, None), 'down': (None, None, None)}),
    ('two wrong layouts', {'qkv': (None,) * 5, 'head': (None, None)}),
    ('two wrong layouts', {'out': (None, None, 'model'), 'head': ('model', None)}),
    ('two wrong layouts', {'embedding': (None, 'model'), 'up': (None, 'model', None)}),
    ('batch over other dimensions', {'batch': (None, 'data')}),
    ('batch over other dimensions', {'batch': (_BOTH, None)}),
    ('batch over other dimensions', {'batch': (None, 'model')}),
)
_SET_4: Table = (
    ('layers over devices', {'up': ('data', None, 'model')}),
    ('layers over devices', {'down': ('data', 'model', None)}),
    ('layers over devices', {'qkv': ('model', None, None, None, None)}),
    ('layers over devices', {'out': ('model', None, None)}),
    ('moments elsewhere', {'momentum/up': (None, 'model', None)}),
    ('moments elsewhere', {'momentum/down': (None, None, 'model')}),
    ('moments elsewhere', {'momentum/embedding': (None, 'model')}),
    ('moments elsewhere', {'momentum/head': ('model', None)}),
    ('moments elsewhere', {'momentum/qkv': (None, None, 'model', None, None)}),
    ('three wrong layouts', dict.fromkeys(('up', 'down', 'out'), (None, None, None))),
    (
        'three wrong layouts',
        {'embedding': (None, None), 'head': (None, None), 'up': (None, None, None)},
    ),
    (
        'three wrong layouts',
        {'up': (None, 'model', None), 'down': (None, None, 'model'), 'out': (None, None, None)},
    ),
    ('the parts of a joined matrix', {'qkv': (None, None, 'data', 'model', None)}),
    ('the parts of a joined matrix', {'qkv': (None, None, None, 'model', 'data')}),
)
_SET_5: Table = (
    *_whole({'table': 2, 'unembed': 2, 'query': 4, 'merge': 4, 'grow': 4, 'shrink': 4}, 'second'),
    ('swapped axes', {'table': ('dp', 'tp')}),
    ('swapped axes', {'unembed': ('tp', 'dp')}),
    ('swapped axes', {'grow': (None, 'dp', 'tp', None)}),
    ('swapped axes', {'shrink': (None, 'dp', None, 'tp')}),
    ('wrong axis', {'query': (None, 'dp', None, 'tp')}),
    ('wrong axis', {'grow': (None, None, 'dp', 'tp')}),
    ('wrong axis', {'merge': (None, None, 'tp', 'dp')}),
    ('wrong axis', {'batch': ('tp', None)}),
    ('dropped rule', {'batch': (None, None)}),
)


def layout_faults(number: int) -> Iterator[Fault]:
    """Yields the faults of layouts in a set."""
    program = 'experts_trainer' if number == 5 else 'plain_trainer'
    for kind, layout in (_SET_1, _SET_2, _SET_3, _SET_4, _SET_5)[number - 1]:
        yield layout_fault(kind, layout, program)
