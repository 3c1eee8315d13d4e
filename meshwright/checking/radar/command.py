"""Runs `meshwright radar`: makes the environments, records the programs, and compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from meshwright.checking.radar.environments import Environment, Wanted, make_environment
from meshwright.checking.radar.settings import RadarSettings
from meshwright.checking.radar.steps import Radar, compare_releases
from meshwright.checking.radar.sweep import Sweep, records_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class RadarRun:
    """How a radar runs.

    Attributes:
      python: the Python of the environments.
      cache: the folder of the environments and records.
      versions: the releases, as `--versions` writes them; '' for those that are declared, or all.
      limit: the seconds that a program may take.
      progress: receives a text when something begins or ends.
    """

    python: str
    cache: Path
    versions: str = ''
    limit: float = 900
    progress: Callable[[str], None] = lambda text: None


def run_radar(settings: RadarSettings, run: RadarRun) -> Radar:
    """Compiles the programs of a repository with several releases, and compares them.

    A run that was stopped continues where it was: environments and records are kept.

    Raises:
      ValueError: if the releases are malformed, or if none can be installed.
    """
    wanted = Wanted(python=run.python, requirements=settings.requirements, tpu=settings.needs_tpu)
    environments: list[Environment] = []
    for release in settings.releases(run.versions, run.python):
        run.progress(f'installing {release.name}')
        environments.append(make_environment(release, wanted, run.cache / 'environments'))
    if all(environment.error for environment in environments):
        first = environments[0]
        raise ValueError(f'no release can be installed: {first.release.name} {first.error}')
    sweep = Sweep(
        root=settings.root,
        path=settings.path,
        folder=records_folder(run.cache, settings.root),
        limit=run.limit,
    )
    return compare_releases(sweep, settings.programs, environments, run.progress)
