"""Which releases of packages are compared: 'jax==0.10.0,jax==0.10.2+flax==0.12.8'."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

LOWEST = (0, 9)  # of jax, as pyproject.toml says
_PIN = re.compile(r'(?P<name>[A-Za-z][\w.-]*)==(?P<version>\d[\w.]*)')
_STABLE = re.compile(r'\d+(\.\d+)*')
_ADVICE = 'write --versions=jax==0.10.0,jax==0.10.2'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """The versions of one environment.

    Attributes:
      pins: the packages with their versions, jax first.
    """

    pins: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """The versions as a user writes them: 'jax==0.10.2+flax==0.12.8'."""
        return '+'.join(f'{package}=={version}' for package, version in self.pins)

    @property
    def packages(self) -> tuple[str, ...]:
        """The names of the packages."""
        return tuple(package for package, _ in self.pins)


def parse_releases(text: str) -> tuple[Release, ...]:
    """Reads what `--versions` says.

    Args:
      text: releases with commas between them; a release is 'jax==0.10.2', or several packages with
        + between them. A bare version is one of jax.

    Raises:
      ValueError: if the text is malformed, or if there are fewer than two releases.
    """
    found: list[Release] = []
    for part in filter(None, (part.strip() for part in text.split(','))):
        release = _release(part)
        if release in found:
            raise ValueError(f'--versions names {release.name} twice: keep one')
        found.append(release)
    if len(found) < 2:
        raise ValueError(
            f'--versions={text} has {len(found)} of the 2 releases that it takes to compare: '
            f'{_ADVICE}'
        )
    return tuple(found)


def _release(text: str) -> Release:
    pins: dict[str, str] = {}
    for one in text.split('+'):
        pin = f'jax=={one}' if one[:1].isdigit() else one.strip()
        match = _PIN.fullmatch(pin)
        if match is None:
            raise ValueError(f'--versions: {one!r} is not a version of a package: {_ADVICE}')
        name = match['name'].lower().replace('_', '-')
        if name in pins:
            raise ValueError(f'--versions: {text} names {name} twice: keep one')
        pins[name] = match['version']
    ordered = sorted(pins.items(), key=lambda pin: pin[0] != 'jax')
    return Release(pins=tuple(ordered))


def list_releases(python: str, lowest: tuple[int, ...] = LOWEST) -> tuple[Release, ...]:
    """Asks the registry for the releases of jax that a Python can install, oldest first.

    Args:
      python: the Python of the environments.
      lowest: the lowest release.

    Raises:
      ValueError: if the registry cannot be asked, or has fewer than two such releases.
    """
    version = _python_version(python)
    asked = [sys.executable, '-m', 'pip', 'index', 'versions', 'jax']
    asked += ['--python-version', version, '--only-binary=:all:', '--disable-pip-version-check']
    answer = subprocess.run(asked, capture_output=True, text=True, errors='replace')
    line = re.search(r'^Available versions: (.+)$', answer.stdout, re.MULTILINE)
    if answer.returncode or line is None:
        said = ' '.join(answer.stderr.split())[-200:]
        raise ValueError(
            f'the registry does not say which releases of jax exist: {said}; {_ADVICE}'
        )
    found = supported_versions(line[1], lowest)
    if len(found) < 2:
        raise ValueError(
            f'Python {version} can install {len(found)} releases of jax from '
            f'{".".join(map(str, lowest))} on: name another one, --python=PATH'
        )
    return tuple(Release(pins=(('jax', v),)) for v in found)


def supported_versions(listed: str, lowest: tuple[int, ...]) -> list[str]:
    """The released versions of a list with commas that are not too old, oldest first."""
    known = [v for v in re.split(r'[,\s]+', listed) if _STABLE.fullmatch(v)]
    return sorted((v for v in known if version_key(v) >= lowest), key=version_key)


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, for its order."""
    return tuple(int(number) for number in re.findall(r'\d+', version))


def _python_version(python: str) -> str:
    code = 'import sys; print("%d.%d" % sys.version_info[:2])'
    return subprocess.run(
        [python, '-c', code], capture_output=True, text=True, check=True
    ).stdout.strip()
