"""Hosts that are on this machine only, with a network between them that fails as it is told.

Each host is a network namespace with one interface, a TUN device. A router in this process reads
the packets that each host sends, and passes them on, late, or not at all. Namespaces and devices
end with this process. They need Linux, root and /dev/net/tun.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import heapq
import ipaddress
import os
import random
import selectors
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# From the headers of Linux: sched.h, if_tun.h and mount.h.
NEW_NETWORK, NEW_MOUNTS, NEW_NAME = 0x40000000, 0x00020000, 0x04000000
SET_INTERFACE, TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000
BIND, PRIVATE, RECURSIVE = 0x1000, 1 << 18, 0x4000
NETWORK = ipaddress.ip_network('10.77.0.0/16')
# Large packets, because Python passes on each of them.
PACKET_BYTES = 65000
libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True)
class Host:
    """A host: its name and address, its namespace, and the file that it reads as /etc/hosts."""

    name: str
    address: str
    namespace: str
    names: str


@dataclasses.dataclass(frozen=True)
class Cable:
    """What happens to packets from one host to another: the share lost, and the seconds late."""

    lost: float = 0.0
    late: float = 0.0


WHOLE, CUT = Cable(), Cable(lost=1.0)


def enter(host):
    """Makes this process one on a host, before it has threads."""
    namespace = os.open(host.namespace, os.O_RDONLY)
    _check(libc.setns(namespace, NEW_NETWORK))
    os.close(namespace)
    _check(libc.unshare(NEW_MOUNTS | NEW_NAME))
    socket.sethostname(host.name)
    _check(libc.mount(None, b'/', None, RECURSIVE | PRIVATE, None))
    _check(libc.mount(host.names.encode(), b'/etc/hosts', None, BIND, None))


def why_not():
    """Why this machine cannot have hosts, or '' if it can."""
    if not os.path.exists('/dev/net/tun'):
        return 'hosts need Linux with /dev/net/tun'
    return '' if os.geteuid() == 0 else 'hosts need root'


class Network:
    """Hosts and the cables between them.

    Usage:
      with Network(8, folder, seed=0) as network:
        network.hosts[3]  # for `enter`
        network.isolate(3)

    Args:
      count: the number of hosts.
      folder: where /etc/hosts is written.
      seed: decides which packets are lost.
    """

    def __init__(self, count, folder, seed=0):
        self._cables, self._random = {}, random.Random(seed)
        self._interfaces, self._namespaces = [], []
        addresses = [str(NETWORK[i + 1]) for i in range(count)]
        names = Path(folder) / 'hosts'
        lines = [f'{address} host{i}\n' for i, address in enumerate(addresses)]
        names.write_text('127.0.0.1 localhost\n' + ''.join(lines))
        for address in addresses:
            # In a thread of its own, whose namespaces end with it.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(self._add_host, address).result()
        self.hosts = [
            Host(
                f'host{i}',
                addresses[i],
                f'/proc/{os.getpid()}/fd/{self._namespaces[i]}',
                f'{names}',
            )
            for i in range(count)
        ]
        self._ends, self._end = os.pipe()
        self._router = threading.Thread(target=self._route, name='router', daemon=True)

    def __enter__(self):
        self._router.start()
        return self

    def __exit__(self, *error):
        os.close(self._end)
        self._router.join()
        for descriptor in (self._ends, *self._interfaces, *self._namespaces):
            os.close(descriptor)

    def set_cable(self, source, target, cable):
        """Makes the cable from one host to another, by index, what it is from now on."""
        self._cables[source, target] = cable

    def isolate(self, host, cable=CUT, *, out=True, back=True):
        """Changes all cables from a host (`out`) and to it (`back`)."""
        for other in set(range(len(self.hosts))) - {host}:
            if out:
                self.set_cable(host, other, cable)
            if back:
                self.set_cable(other, host, cable)

    def mend(self):
        """Makes all cables whole."""
        self._cables.clear()

    def _add_host(self, address):
        """Makes a namespace with an interface. The thread that calls it must end then."""
        _check(libc.unshare(NEW_NETWORK))
        interface = os.open('/dev/net/tun', os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(interface, SET_INTERFACE, struct.pack('16sH22x', b'eth0', TUN_WITHOUT_HEADER))
        commands = (
            f'address add {address}/{NETWORK.prefixlen} dev eth0\n'
            f'link set eth0 mtu {PACKET_BYTES} txqueuelen 1000 up\nlink set lo up\n'
        )
        subprocess.run(['ip', '-batch', '-'], input=commands, text=True, check=True)
        self._interfaces.append(interface)
        self._namespaces.append(os.open('/proc/thread-self/ns/net', os.O_RDONLY))

    def _route(self):
        """Passes on packets until `_end` is closed."""
        late = []  # (time, number, index of the target, packet)
        with selectors.DefaultSelector() as ready:
            ready.register(self._ends, selectors.EVENT_READ, None)
            for index, interface in enumerate(self._interfaces):
                ready.register(interface, selectors.EVENT_READ, index)
            for number in range(1 << 62):
                while late and late[0][0] <= time.monotonic():
                    self._deliver(*heapq.heappop(late)[2:])
                wait = max(0.0, late[0][0] - time.monotonic()) if late else None
                for key, _ in ready.select(wait):
                    if key.data is None:
                        return
                    packet = os.read(key.fd, PACKET_BYTES)
                    target = self._target(packet)
                    cable = self._cables.get((key.data, target), WHOLE)
                    if target is None or (cable.lost and self._random.random() < cable.lost):
                        continue
                    if cable.late:
                        item = (time.monotonic() + cable.late, number, target, packet)
                        heapq.heappush(late, item)
                    else:
                        self._deliver(target, packet)

    def _target(self, packet):
        """The index of the host that a packet is for, or None."""
        if packet[0] >> 4 != 4:
            return None
        index = int.from_bytes(packet[16:20], 'big') - int(NETWORK[1])
        return index if 0 <= index < len(self.hosts) else None

    def _deliver(self, target, packet):
        with contextlib.suppress(BlockingIOError):  # A full queue loses packets, as a real one.
            os.write(self._interfaces[target], packet)


def _check(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
