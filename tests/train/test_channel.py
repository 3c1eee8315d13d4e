"""The ports at which processes find each other, with a firewall between them."""

import socket
import threading

import pytest

from train.processes import channel
from train.processes.channel import open_channel
from train.processes.disagreements import NotTogether
from train.processes.launching.attempts import reserved_port
from train.processes.wire import Limits


@pytest.fixture
def ports():
    with reserved_port() as first, reserved_port() as second:
        yield first, second


@pytest.fixture
def join(monkeypatch):
    """Lets processes 0 and 1 join in two threads, and returns what each of them gets."""

    def join(ports, closed, seconds=60.0):
        connect = socket.create_connection

        def through_firewall(address, **how):
            if address[1] in closed:
                raise TimeoutError('timed out')
            return connect(address, **how)

        monkeypatch.setattr(socket, 'create_connection', through_firewall)
        monkeypatch.setattr(channel, '_start_member', lambda one: one)
        got, limits = {}, Limits(init_seconds=seconds)

        def one(index):
            try:
                got[index] = open_channel(f'127.0.0.1:{ports[0]}', 2, index, limits, ports[1:])[1]
            except NotTogether as error:
                got[index] = str(error)

        threads = [threading.Thread(target=one, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return got

    return join


def test_the_first_port_that_is_open_is_taken(join, ports):
    first, second = ports
    assert join(ports, closed=[]) == {0: first, 1: first}
    assert join(ports, closed=[first]) == {0: second, 1: second}


def test_a_message_names_the_ports_that_are_closed(join, ports):
    first, second = ports
    got = join(ports, closed=ports, seconds=1.0)
    assert f'at port {first} or {second} ' in got[0]
    assert f'process 1 cannot reach process 0 at 127.0.0.1:{first} or {second} ' in got[1]


def test_a_port_that_is_in_use_on_process_0_is_left_out(join, ports, monkeypatch):
    first, second = ports
    monkeypatch.setattr(channel, '_SECONDS_FOR_THE_MESSAGE', 0.5)  # The other program says nothing.
    with socket.create_server(('', first)):
        assert join(ports, closed=[]) == {0: second, 1: second}
