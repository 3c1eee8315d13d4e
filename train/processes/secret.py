"""The secret of a run, by which its processes know each other, and lines that are sealed with it.

Each end of a connection sends 16 random bytes first. From them and the secret, both derive a key
for each direction. Every line carries its HMAC-SHA256, which also covers its number on the
connection, so that lines cannot be forged, repeated, or brought from another connection. They are
not encrypted.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from partitioning.untrusted_text import read_regular_file
from train.errors import ConfigError

VARIABLE, FILE_VARIABLE = 'MESHWRIGHT_SECRET', 'MESHWRIGHT_SECRET_FILE'
NONCE_BYTES = 16
_LEAST_CHARACTERS = 16
_MOST_BYTES = 4096
_HOW_TO_MAKE_ONE = 'such as the output of `openssl rand -hex 16`'


def find_secret(environ: Mapping[str, str], config_home: Path | None = None) -> bytes:
    """The secret of the run of this process.

    It is the text of MESHWRIGHT_SECRET, or of the file of MESHWRIGHT_SECRET_FILE. Without either,
    it is in meshwright/secret below the user's folder of configurations, and is made there once:
    processes of one user on one host, or on hosts with a shared home, need no setting.
    `config_home` is the folder of configurations, by default XDG_CONFIG_HOME or ~/.config. Raises a
    ConfigError if both are set, if the secret is short, or if others may read the file.
    """
    text, file = environ.get(VARIABLE), environ.get(FILE_VARIABLE)
    if text is not None and file is not None:
        raise ConfigError(f'{VARIABLE} and {FILE_VARIABLE} are both set: unset one of them')
    if text is not None:
        return _checked(text, VARIABLE)
    if file is not None:
        return _read(Path(file), f'{FILE_VARIABLE}={file}')
    try:
        base = config_home or Path(environ.get('XDG_CONFIG_HOME') or Path.home() / '.config')
        path = base / 'meshwright' / 'secret'
        if not path.exists():
            _make(path)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f'the secret by which the processes of a run know each other cannot be kept in the '
            f'home folder ({error}): set {VARIABLE} to the same text of at least '
            f'{_LEAST_CHARACTERS} characters for all of them, {_HOW_TO_MAKE_ONE}'
        ) from error
    return _read(path, str(path))


def random_secret() -> str:
    """A new secret, as text."""
    return secrets.token_hex(16)


def _checked(text: str, name: str) -> bytes:
    text = text.strip()
    if len(text) < _LEAST_CHARACTERS:
        raise ConfigError(
            f'{name} is too short ({len(text)} of at least {_LEAST_CHARACTERS} characters): use '
            f'a longer one, {_HOW_TO_MAKE_ONE}'
        )
    return text.encode(errors='surrogateescape')


def _read(path: Path, name: str) -> bytes:
    """Reads the file of a secret, which must be a file that nobody else can read."""
    try:
        found = read_regular_file(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f'{name} cannot be read ({os.strerror(error.errno or 0)})') from error
    if found is None:
        raise ConfigError(f'{name} is not a file')
    text, mode = found
    if mode & 0o077:
        raise ConfigError(
            f'{name} can be read by other users (mode {stat.S_IMODE(mode):o}): run chmod 600 {path}'
        )
    return _checked(text.decode(errors='surrogateescape'), name)


def _make(path: Path) -> None:
    """Makes the file of a secret. Of several processes that make it, one succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f'{path.name}.{secrets.token_hex(8)}')
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(file, 'w') as opened:
            opened.write(f'{random_secret()}\n')
        try:
            os.link(unfinished, path)
        except FileExistsError:
            return
    finally:
        os.unlink(unfinished)


class Seal:
    """Seals the lines of one direction of a connection, or checks them, in their order."""

    def __init__(self, key: bytes):
        self._key, self._number = key, 0

    def sign(self, line: bytes) -> bytes:
        """The line with its seal before it."""
        return self._code(line) + b' ' + line

    def verify(self, sealed: bytes) -> bytes | None:
        """The line without its seal, or None if the seal is not right."""
        code, _, line = sealed.partition(b' ')
        return line if hmac.compare_digest(code, self._code(line)) else None

    def _code(self, line: bytes) -> bytes:
        number = self._number.to_bytes(8, 'big')
        self._number += 1
        return hmac.digest(self._key, number + line, 'sha256').hex().encode()


def make_seals(secret: bytes, of_guest: bytes, of_host: bytes) -> tuple[Seal, Seal]:
    """The seals of a connection: of what the guest, who connects, sends, and of what the host does.

    Args:
      of_guest, of_host: the random bytes that each of them has sent.
    """
    keys = (
        hmac.digest(secret, b'meshwright ' + who + of_guest + of_host, 'sha256')
        for who in (b'guest', b'host ')
    )
    guest, host = map(Seal, keys)
    return guest, host
