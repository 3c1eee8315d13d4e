"""Secrets: by one, the processes of a run know each other, and by one, a user knows own programs.

A secret is the text of a variable or a file. Otherwise it is made once in the user's folder of
configurations. `launch` and some launch files make a secret for one run, which begins with
`one-run-`, so that the runs of one user never meet; what a later run is to know has another one.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from partitioning.untrusted_text import read_regular_file
from train.errors import ConfigError

VARIABLE, FILE_VARIABLE = 'MESHWRIGHT_SECRET', 'MESHWRIGHT_SECRET_FILE'
_OF_ONE_RUN = 'one-run-'
_LEAST_CHARACTERS = 16
_MOST_BYTES = 4096
_HOW_TO_MAKE_ONE = 'such as the output of `openssl rand -hex 16`'


def find_secret(
    environ: Mapping[str, str], config_home: Path | None = None, *, lasting: bool = False
) -> bytes:
    """The secret of the run of this process, or, if it is to be `lasting`, of its user's runs.

    It is the text of MESHWRIGHT_SECRET, or of the file of MESHWRIGHT_SECRET_FILE. Without either,
    it is in meshwright/secret below the user's folder of configurations, and is made there once:
    processes of one user on one host, or on hosts with a shared home, need no setting.
    `config_home` is the folder of configurations, by default XDG_CONFIG_HOME or ~/.config. Raises a
    ConfigError if both are set, if the secret is short, or if others may read the file.
    """
    text, file = environ.get(VARIABLE), environ.get(FILE_VARIABLE)
    if lasting and text is not None and text.startswith(_OF_ONE_RUN):
        text = None
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
            'the secret of this user, for processes and programs, cannot be kept in the home '
            f'folder ({error}): set {VARIABLE} to the same text of at least '
            f'{_LEAST_CHARACTERS} characters for all processes, {_HOW_TO_MAKE_ONE}'
        ) from error
    return _read(path, str(path))


def secret_of_one_run() -> str:
    """A new secret, as text, for the processes of one run."""
    return f'{_OF_ONE_RUN}{secrets.token_hex(16)}'


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
            opened.write(f'{secrets.token_hex(16)}\n')
        try:
            os.link(unfinished, path)
        except FileExistsError:
            return
    finally:
        os.unlink(unfinished)
