"""The memory of a compiled program, from the texts of its buffer assignment and live ranges.

    allocation 0: size 3145728, parameter 0, shape |f32[6,1024,128]| at ShapeIndex {}:
     value: <218 param.4 @0> (size=3145728,offset=0): f32[6,1024,128]{2,1,0}
    allocation 29: size 17305912, preallocated-temp:
     value: <200 fusion.12{0} @0> (size=524288,offset=15728640): f32[4,32,1024]{2,1,0}

and, in the other text, `fusion.12{0}:31-34`, which are numbers of instructions.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping

from meshwright.program.costs import MemoryUse

_ALLOCATION = re.compile(r'^allocation (\d+): size (\d+)(.*)$')
_VALUE = re.compile(r'^ value: <\d+ (\S+?)(?:\{\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)')
_RANGE = re.compile(r'^\s+(\S+?)(?:\{\})?:(\d+)-(\d+)$', re.MULTILINE)
_COLOR = re.compile(r'\bcolor (\d+)')

# The values of temporaries: the allocation and offset of each place -> (name, size) of its values.
_Places = dict[tuple[str, int], list[tuple[str, int]]]


def read_buffer_assignment(text: str, live_ranges: str = '') -> MemoryUse:
    """Returns the memory in the main memory of a device.

    Temporaries are what is reserved for them; parts of it are in use at different times. The peak
    has what is in use of them at once, if the live ranges are known, and else all of them. Other
    memories, such as the vector memory of TPUs, do not count, and neither do constants, which are a
    part of the program.

    Args:
      text: the buffer assignment.
      live_ranges: the live ranges, or ''.

    Raises:
      ValueError: if the text is not a buffer assignment.
    """
    arguments = outputs = aliased = temporaries = 0
    places: _Places = collections.defaultdict(list)
    is_temporary, number = False, ''
    for line in text.splitlines():
        if (value := _VALUE.match(line)) and is_temporary:
            places[number, int(value[3])].append((value[1], int(value[2])))
        if (found := _ALLOCATION.match(line)) is None:
            continue
        number, size, about = found[1], int(found[2]), found[3]
        color = _COLOR.search(about)
        in_main_memory = color is None or color[1] == '0'
        is_argument, is_output = ', parameter ' in about, 'maybe-live-out' in about
        is_part_of_program = 'thread-local' in about or 'constant' in about
        is_temporary = in_main_memory and not (is_argument or is_output or is_part_of_program)
        arguments += size * (is_argument and in_main_memory)
        outputs += size * (is_output and in_main_memory)
        aliased += size * (is_argument and is_output and in_main_memory)
        temporaries += size * is_temporary
    if not number:
        raise ValueError('not a buffer assignment: expected lines such as "allocation 0: size 64"')
    ranges = {name: (int(first), int(last)) for name, first, last in _RANGE.findall(live_ranges)}
    at_once = _most_at_once(places, ranges)
    return MemoryUse(
        peak=arguments + outputs - aliased + min(temporaries, at_once or temporaries),
        arguments=arguments,
        outputs=outputs,
        aliased=aliased,
        temporaries=temporaries,
        program=0,
    )


def _most_at_once(places: _Places, ranges: Mapping[str, tuple[int, int]]) -> int:
    """The most bytes of temporaries that are live at once; 0 if no live range is known."""
    changes: dict[int, int] = collections.defaultdict(int)
    for values in places.values():
        for first, last, size in _joined(values, ranges):
            changes[first] += size
            changes[last + 1] -= size
    most = size = 0
    for time in sorted(changes):
        size += changes[time]
        most = max(most, size)
    return most


def _joined(
    values: list[tuple[str, int]], ranges: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """The times of the values of one place; those that overlap are one value in several names."""
    known = sorted((*ranges[name], size) for name, size in values if name in ranges)
    joined: list[tuple[int, int, int]] = []
    for first, last, size in known:
        if joined and first <= joined[-1][1]:
            before = joined.pop()
            first, last, size = before[0], max(before[1], last), max(before[2], size)
        joined.append((first, last, size))
    yield from joined
