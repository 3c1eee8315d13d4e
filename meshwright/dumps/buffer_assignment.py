"""The memory of a compiled program, from the text of its buffer assignment.

allocation 0: size 3145728, parameter 0, shape |f32[6,1024,128]| at ShapeIndex {}, maybe-live-out:
 value: <218 param.4 @0> (size=3145728,offset=0): f32[6,1024,128]{2,1,0}
allocation 29: size 17305912, preallocated-temp:
"""

from __future__ import annotations

import re

from meshwright.program.costs import MemoryUse

_ALLOCATION = re.compile(r'^allocation \d+: size (\d+)(.*)$', re.MULTILINE)
_COLOR = re.compile(r'\bcolor (\d+)')


def read_buffer_assignment(text: str) -> MemoryUse:
    """Returns the memory in the main memory of a device.

    Parts of the temporaries are in use at different times, but all of them are reserved: the peak
    is the sum of all allocations. Other memories, such as the vector memory of TPUs, do not count,
    and neither do constants, which are a part of the program.

    Raises:
      ValueError: if the text is not a buffer assignment.
    """
    arguments = outputs = aliased = temporaries = 0
    found = _ALLOCATION.findall(text)
    if not found:
        raise ValueError('not a buffer assignment: expected lines such as "allocation 0: size 64"')
    for digits, about in found:
        size, color = int(digits), _COLOR.search(about)
        if color is not None and color[1] != '0':
            continue
        is_argument, is_output = ', parameter ' in about, 'maybe-live-out' in about
        arguments += size * is_argument
        outputs += size * is_output
        aliased += size * (is_argument and is_output)
        if not (is_argument or is_output or 'thread-local' in about or 'constant' in about):
            temporaries += size
    return MemoryUse(
        peak=arguments + outputs - aliased + temporaries,
        arguments=arguments,
        outputs=outputs,
        aliased=aliased,
        temporaries=temporaries,
        program=0,
    )
