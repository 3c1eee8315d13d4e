"""A port for process 0, which no other program takes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserves a port, which no other program gets while the context is open.

    The socket that reserves it never listens. It allows other sockets of this user on the port, so
    process 0 can listen there, and then jax's coordinator.

    Yields:
      The port.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(('', 0))
        yield holder.getsockname()[1]
