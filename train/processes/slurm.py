"""Slurm's short forms: lists of hosts, and lists of the number of tasks of each host."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from train.errors import ConfigError

_HOSTS = r'(?:[^,\[\]\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+'
_TASKS = r'\d+(?:\(x\d+\))?'


def expand_hosts(hosts: str) -> Iterator[str]:
    """Yields the hosts of a list such as 'gpu[08-10,12],login1', in their order.

    A range keeps the leading zeros of its first number. With several brackets in a name, the last
    one changes first, as in `scontrol show hostnames`.

    Args:
      hosts: the list, as in SLURM_STEP_NODELIST.

    Raises:
      ConfigError: if the list is malformed, or a range goes down.
    """
    if not re.fullmatch(f'{_HOSTS}(?:,{_HOSTS})*', hosts):
        raise ConfigError(f"{hosts!r} is not a list of hosts: write it as 'gpu[08-10,12],login1'")
    for names in re.findall(_HOSTS, hosts):
        parts = re.split(r'\[([^]]*)\]', names)  # texts, with the ranges of brackets between them
        choices = [
            [part] if n % 2 == 0 else [number for r in part.split(',') for number in _expand(r)]
            for n, part in enumerate(parts)
        ]
        yield from map(''.join, itertools.product(*choices))


def _expand(numbers: str) -> list[str]:
    """The numbers of a range such as '08-10', with its zeros."""
    first, _, last = numbers.partition('-')
    if int(last or first) < int(first):
        raise ConfigError(f'the range {numbers} in a list of hosts must go up')
    return [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]


def tasks_of_host(tasks: str, host: int) -> int:
    """Returns the number of tasks of one host.

    Args:
      tasks: the tasks of all hosts, such as '4(x2),1' for 4, 4 and 1, as in
        SLURM_STEP_TASKS_PER_NODE.
      host: the index of the host.

    Raises:
      ConfigError: if the list is malformed or too short.
    """
    if not re.fullmatch(f'{_TASKS}(?:,{_TASKS})*', tasks):
        raise ConfigError(f"{tasks!r} is not a list of tasks per host, such as '4(x2),1'")
    left = host
    for count, times in re.findall(r'(\d+)(?:\(x(\d+)\))?', tasks):
        left -= int(times or 1)
        if left < 0:
            return int(count)
    raise ConfigError(f'{tasks!r} lists the tasks of {host - left} hosts, and not of host {host}')
