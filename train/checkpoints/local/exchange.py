"""How processes send parts of local checkpoints to each other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import xxhash

from train.checkpoints.local.held import HeldParts
from train.checkpoints.local.parts import INDEX, SHARDS, Key, complete_part
from train.checkpoints.steps import manifest
from train.checkpoints.steps.manifest import FileRecord, Manifest, parse_manifest
from train.checkpoints.steps.record import FILE, ITEM
from train.errors import ConfigError
from train.processes.peers import Peers
from train.processes.wire import Connection, Message

_FILES = (manifest.FILE, f'{ITEM}/{FILE}', INDEX, SHARDS)
_BLOCK_BYTES = 2**22
_SECONDS = 60.0  # without an answer, a process counts as lost
_SECONDS_TO_SAVE = 600.0  # that another process may take to write its own part


class Saved:
    """How far this process is with its own parts: the last step, and whether it was written."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step, self._is_good = -1, False

    def note(self, step: int, is_good: bool) -> None:
        """Notes that a step has been written, or that it could not be."""
        with self._changed:
            self._step, self._is_good = step, is_good
            self._changed.notify_all()

    def wait(self, step: int) -> bool:
        """Waits until a step has been tried, and returns whether it was written."""
        with self._changed:
            self._changed.wait_for(lambda: self._step >= step, _SECONDS_TO_SAVE)
            return self._step == step and self._is_good


def answers(held: HeldParts, saved: Saved) -> Callable[[Connection, Message], None]:
    """Returns the function that answers the requests of other processes."""

    def answer(connection: Connection, message: Message) -> None:
        key = Key(*message['key'])
        if message['kind'] == 'await':
            connection.send('written' if saved.wait(key.step) else 'failed')
            return
        folder, name, first = held.folder(key), message['name'], int(message['first'])
        if folder is None or name not in _FILES:
            connection.send('gone')
            return
        try:
            with (folder / name).open('rb') as file:
                left = message['size']
                left = file.seek(0, 2) - first if left is None else int(left)
                file.seek(first)
                connection.send('here', size=left)
                while left and (block := file.read(min(left, _BLOCK_BYTES))):
                    connection.send_block(block)
                    left -= len(block)
        except OSError:
            left = 1
        if left:  # It has been deleted or cut meanwhile.
            connection.send('gone')

    return answer


def read_from(
    peers: Peers, index: int, key: Key, name: str, first: int = 0, size: int | None = None
) -> bytearray:
    """Reads a file of a part, or some bytes of it, from a process that has it.

    Raises an OSError if the process cannot be reached or does not have it any more.
    """
    data = bytearray()
    for block in _blocks(peers, index, key, name, first, size):
        data += block
    return data


def _blocks(
    peers: Peers, index: int, key: Key, name: str, first: int = 0, size: int | None = None
) -> Generator[bytearray]:
    request: dict[str, Any] = {'key': key, 'name': name, 'first': first, 'size': size}
    with peers.connected(index) as connection:
        connection.send('read', **request)
        about = connection.receive(_SECONDS)
        left = int(about['size']) if about is not None and about['kind'] == 'here' else None
        while left is None or left > 0:
            block = None if left is None else connection.receive_block(_SECONDS)
            if left is None or not block:
                raise ConnectionError(f'process {index} did not send {name} of part {key.part}')
            yield block
            left -= len(block)


def copy_from(peers: Peers, index: int, key: Key, held: HeldParts) -> bool:
    """Copies the part that another process is about to write. Returns whether it could write it.

    Raises an OSError if the process is lost, or the copy cannot be written here, and a ConfigError
    if something else arrives than was sent.
    """
    with peers.connected(index) as connection:
        connection.send('await', key=key)
        said = connection.receive(_SECONDS_TO_SAVE + _SECONDS)
        if said is None:
            raise ConnectionError(f'process {index} is lost')
    if said['kind'] != 'written':
        return False
    about = parse_manifest(read_from(peers, index, key, manifest.FILE).decode(), f'process {index}')
    folder = held.prepare(key)
    try:
        for name in _FILES[1:]:
            _copy_file(peers, index, key, name, folder, about)
        complete_part(folder, about)
    except BaseException:
        held.abandon(folder)
        raise
    held.complete(key, folder)
    return True


def _copy_file(peers: Peers, index: int, key: Key, name: str, folder: Any, about: Manifest) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    digest, size = xxhash.xxh3_128(), 0
    blocks = contextlib.closing(_blocks(peers, index, key, name))
    with (folder / name).open('wb') as file, blocks as received:
        for block in received:
            file.write(block)
            digest.update(block)
            size += len(block)
    if about.files.get(name) != FileRecord(size, digest.hexdigest()):
        raise ConfigError(f'{name} of part {key.part} has changed on the way from process {index}')
