"""Finds connections of this process on which the other host no longer answers.

The channel joins each process to process 0 only. If two others cannot reach each other, both wait
in a collective, and then all processes do: none is silent, and none keeps the others waiting. The
kernel knows more. It sends data again until the other host acknowledges it, and counts how often.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

# The columns of /proc/net/tcp: https://docs.kernel.org/networking/proc_net_tcp.html
_REMOTE, _TIMER, _AGAIN, _SOCKET = 2, 5, 6, 9
_SENDS_AGAIN = '01'


class UnansweredConnections:
    """For how long other hosts have not answered.

    Args:
      folder: the folder of a process in /proc. Without it, as on other systems than Linux, all
        connections count as answered.
    """

    def __init__(self, folder: Path = Path('/proc/self')):
        self._folder = folder
        self._since: Mapping[tuple[str, str], float] = {}

    def seconds(self, now: float) -> dict[str, float]:
        """Returns the seconds, at the time `now`, since each address began not to answer.

        Only the time since an earlier call that has seen it is known.
        """
        found = self._find()
        self._since = {one: self._since.get(one, now) for one in found}
        longest: dict[str, float] = {}
        for (address, _), since in self._since.items():
            longest[address] = max(longest.get(address, 0.0), now - since)
        return longest

    def _find(self) -> set[tuple[str, str]]:
        """The address and the socket of each connection on which data is sent again."""
        found = set()
        for name in ('tcp', 'tcp6'):
            with contextlib.suppress(OSError):
                for line in (self._folder / 'net' / name).read_text().splitlines()[1:]:
                    row = line.split()
                    if row[_TIMER].startswith(_SENDS_AGAIN) and int(row[_AGAIN], 16):
                        found.add((_address(row[_REMOTE]), row[_SOCKET]))
        own = self._own_sockets() if found else set()
        return {one for one in found if one[1] in own}

    def _own_sockets(self) -> set[str]:
        """The sockets of this process: the table has those of the whole host."""
        found = set()
        for path in (self._folder / 'fd').iterdir():
            with contextlib.suppress(OSError):  # It may have been closed meanwhile.
                found.add(os.readlink(path).removeprefix('socket:[').removesuffix(']'))
        return found


def _address(text: str) -> str:
    """The address in 'hexadecimal digits:port', whose words of four bytes are little-endian."""
    digits = bytes.fromhex(text.partition(':')[0])
    words = [digits[i : i + 4][::-1] for i in range(0, len(digits), 4)]
    address = ipaddress.ip_address(b''.join(words))
    mapped = getattr(address, 'ipv4_mapped', None)
    return str(mapped or address)
