"""Warnings of the compiler about arrays that it makes whole on every device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_WARNING = re.compile(
    r'Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from '
    r'sharding (?P<before>\{.*?\}) to (?P<after>\{.*?\}) (?:efficiently |without doing a full '
    r'rematerialization of the tensor )?for HLO operation:? (?P<operation>%.*)'
)
_OPERATION = re.compile(r'%(?P<name>[\w.\-]+) = (?P<type>\w+\[[\d,]*\])')
_PATH = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r'stack_frame_id=(\d+)')


class Rematerialization(NamedTuple):
    """An array that the compiler makes whole on every device to go from one layout to another.

    Attributes:
      message: the line of the compiler.
      array: the type of the part that a device has, such as 'f32[4,16,32]'.
      before: the layout before, as XLA writes it.
      after: the layout after.
      instruction: the name of the instruction, before optimization.
      op_name: the path of the jax operation, or ''.
      frame: the number of its stack frame in the table of the program, or 0.
    """

    message: str
    array: str
    before: str
    after: str
    instruction: str
    op_name: str
    frame: int


def find_rematerializations(log: str) -> Iterator[Rematerialization]:
    """Yields the warnings of involuntary full rematerialization in the log of a compiler.

    Args:
      log: what the compiler wrote to the standard error of the process. Equal warnings count once.
    """
    seen = set()
    for line in log.splitlines():
        if 'Involuntary full rematerialization' not in line:
            continue
        message = line[line.index('Involuntary') :]
        if message in seen:
            continue
        seen.add(message)
        found = _WARNING.search(message)
        operation = _OPERATION.search(found['operation'] if found else message)
        path, frame = _PATH.search(message), _FRAME.search(message)
        yield Rematerialization(
            message=message,
            array=operation['type'] if operation else '',
            before=found['before'] if found else '',
            after=found['after'] if found else '',
            instruction=operation['name'] if operation else '',
            op_name=path[1] if path else '',
            frame=int(frame[1]) if frame else 0,
        )
