"""Installs releases, each in a folder of its own, with uv or else with venv and pip."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.checking.radar.releases import Release

_MADE = 'made.json'  # written last, so that a folder without it is made anew
_LAST = 300  # characters of what an installer that failed said
_SHOW = """\
import json
from importlib import metadata
print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version
                  for d in metadata.distributions() if d.metadata['Name']}))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """A release that is installed, or why it is not.

    Attributes:
      release: the release.
      folder: its folder.
      versions: all packages that are installed in it.
      error: why it cannot be used, in one line, or ''.
    """

    release: Release
    folder: Path
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    error: str = ''

    @property
    def python(self) -> str:
        """Its Python."""
        return str(self.folder / 'bin' / 'python')

    @property
    def key(self) -> str:
        """The name of its folder, which tells it from all others."""
        return self.folder.name

    @property
    def tpu_library(self) -> Path | None:
        """The compiler for TPUs that is installed in it."""
        found = sorted(self.folder.glob('lib/python*/site-packages/libtpu/libtpu.so'))
        return found[0] if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What every environment has besides its release.

    Attributes:
      python: the Python of the environments.
      requirements: packages that the programs need, as pip reads them.
      tpu: whether programs are compiled for TPUs, which takes libtpu.
    """

    python: str
    requirements: tuple[str, ...] = ()
    tpu: bool = True


def make_environment(release: Release, wanted: Wanted, folder: Path) -> Environment:
    """Installs a release, unless the folder has it already.

    Args:
      release: the release.
      wanted: what else the environment has.
      folder: the folder of all environments.
    """
    packages = _packages(release, wanted)
    text = json.dumps([packages, os.path.realpath(wanted.python)])
    key = f'{release.name.replace("==", "-")}-{hashlib.sha256(text.encode()).hexdigest()[:8]}'
    made = Environment(release=release, folder=folder / key)
    file = made.folder / _MADE
    if file.is_file():
        return dataclasses.replace(made, versions=json.loads(file.read_text(encoding='utf-8')))
    shutil.rmtree(made.folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for command in (*_commands(made, wanted, packages), [made.python, '-c', _SHOW]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors='replace')
        except OSError as error:
            return dataclasses.replace(made, error=f'{command[0]}: {error.strerror}')
        if done.returncode:
            shutil.rmtree(made.folder, ignore_errors=True)
            said = ' '.join(done.stderr.split()) or f'{command[0]} ended with {done.returncode}'
            return dataclasses.replace(made, error=f'cannot be installed: {said[-_LAST:]}')
    versions = json.loads(done.stdout)
    file.write_text(json.dumps(versions), encoding='utf-8')
    return dataclasses.replace(made, versions=versions)


def _packages(release: Release, wanted: Wanted) -> list[str]:
    """What is installed, as pip reads it."""
    pins = dict(release.pins)
    jax = 'jax[tpu]' if wanted.tpu and 'libtpu' not in pins else 'jax'
    packages = [f'{jax}=={pins["jax"]}' if 'jax' in pins else jax]
    packages += [f'{name}=={version}' for name, version in pins.items() if name != 'jax']
    held = {'jax', *pins}
    return packages + [one for one in wanted.requirements if package_of(one) not in held]


def package_of(requirement: str) -> str:
    """The name of the package of a requirement: 'flax' of 'flax>=0.12.1'."""
    return re.split(r'[^\w.-]', requirement.strip(), maxsplit=1)[0].lower().replace('_', '-')


def _commands(made: Environment, wanted: Wanted, packages: Sequence[str]) -> list[list[str]]:
    folder, uv = str(made.folder), find_uv()
    if uv is not None:
        venv = [uv, 'venv', '--quiet', '--python', wanted.python, folder]
        return [venv, [uv, 'pip', 'install', '--quiet', '--python', made.python, *packages]]
    venv = [wanted.python, '-m', 'venv', folder]
    install = [made.python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check']
    return [venv, [*install, *packages]]


def find_uv() -> str | None:
    """The program uv: the one next to this Python, or another one on the path."""
    beside = Path(sys.executable).with_name('uv')
    return str(beside) if beside.is_file() else shutil.which('uv')
