"""What a radar compares, from [tool.meshwright.radar] in pyproject.toml.

[tool.meshwright.radar]
requirements = ["flax", "optax==0.2.8"]     # what the programs need, as pip reads it
path = ["src"]                              # folders with modules that they import
versions = ["jax==0.10.2", "jax==0.11.2"]   # by default, all releases of jax that exist
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from pathlib import Path

from meshwright.checking.radar.releases import LOWEST, Release, list_releases, parse_releases
from meshwright.checking.settings import CheckedProgram, check_keys, read_settings, read_texts

_KEYS = ('requirements', 'path', 'versions')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RadarSettings:
    """What a repository declares.

    Attributes:
      root: the folder of its pyproject.toml.
      programs: the programs, which are the goldens of `meshwright check`.
      requirements: packages that every environment has.
      path: folders with modules that the programs import.
      versions: releases, as `--versions` writes them; '' if none are declared.
    """

    root: Path
    programs: tuple[CheckedProgram, ...]
    requirements: tuple[str, ...] = ()
    path: tuple[Path, ...] = ()
    versions: str = ''

    @property
    def needs_tpu(self) -> bool:
        """Whether a program is compiled for TPUs."""
        return any(p.topology and p.compile and not p.on_cpu for p in self.programs)

    def releases(self, asked: str, python: str) -> tuple[Release, ...]:
        """The releases: those asked for, else those declared, else all that the registry has.

        Args:
          asked: what `--versions` says, or ''.
          python: the Python of the environments.

        Raises:
          ValueError: if they are malformed, or fewer than two.
        """
        text = asked or self.versions
        return parse_releases(text) if text else list_releases(python, LOWEST)


def read_radar(root: Path, only: tuple[str, ...] = ()) -> RadarSettings:
    """Reads what the pyproject.toml of a folder declares.

    Args:
      root: the folder.
      only: names of programs; by default all.

    Raises:
      ValueError: if something is malformed, or if no program is declared.
    """
    settings = read_settings(root, only)
    if not settings.programs:
        raise ValueError(
            'the radar compiles programs that pyproject.toml declares, and there are only tests: '
            'add [tool.meshwright.goldens.step] with function = "layouts:step" and topology = '
            '"v5e:4x4"'
        )
    table = tomllib.loads((root / 'pyproject.toml').read_text(encoding='utf-8'))
    held = table['tool']['meshwright'].get('radar', {})
    where = '[tool.meshwright.radar]'
    check_keys(held, _KEYS, where)
    lists = {key: read_texts(held.get(key, []), f'{where} {key}') for key in _KEYS}
    folders = tuple(Path(os.path.normpath(root / folder)) for folder in lists['path'])
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f'{where} path: there is no folder {os.path.relpath(folder, root)}')
    return RadarSettings(
        root=root,
        programs=settings.programs,
        requirements=lists['requirements'],
        path=folders,
        versions=','.join(lists['versions']),
    )


def default_cache() -> Path:
    """`meshwright/radar` in the user's cache directory."""
    root = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    return Path(root).expanduser() / 'meshwright' / 'radar'
