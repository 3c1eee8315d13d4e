"""A file that is written in parts, so that a program which was stopped resumes after the last one.

The parts are in a folder next to the file, which also says what they belong to.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from partitioning.untrusted_text import parse_json
from train.errors import ConfigError
from train.paths import replacing

SETTINGS = 'settings.json'


@dataclasses.dataclass(frozen=True)
class PartFiles:
    """The parts of a file. Only one process may use it.

    Attributes:
      path: the whole file.
      folder: the folder of the parts.
    """

    path: epath.Path
    folder: epath.Path

    def begin(self, settings: Mapping[str, Any]) -> int:
        """Creates the folder, or finds the parts in it.

        Args:
          settings: what determines the parts, as JSON.

        Returns:
          The number of finished parts.

        Raises:
          ConfigError: if the folder has parts of other settings, or cannot be written.
        """
        settings, file = json.loads(json.dumps(dict(settings))), self.folder / SETTINGS
        if file.exists():
            found = parse_json(file.read_text())
            changed = [k for k in {**found, **settings} if found.get(k) != settings.get(k)]
            if changed:
                name = changed[0]
                raise ConfigError(
                    f'{self.folder} has parts of another run: {name} was '
                    f'{str(found.get(name))[:60]} and is {str(settings.get(name))[:60]}; delete '
                    'the folder, or write to another output_dir'
                )
        else:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with replacing(file) as unfinished:
                    unfinished.write_text(json.dumps(settings))
            except OSError as error:
                raise ConfigError(
                    f'{self.folder} cannot be written: {error.strerror or error}'
                ) from error
        count = 0
        while self.part(count).exists():
            count += 1
        return count

    def part(self, number: int) -> epath.Path:
        """The path of a part."""
        return self.folder / f'{self.path.name}-chunk_{number:05}'

    def write(self, number: int, lines: Iterable[str]) -> None:
        """Writes a part. It is never half-written."""
        with replacing(self.part(number)) as unfinished:
            unfinished.write_text(''.join(f'{line}\n' for line in lines))

    def finish(self, count: int, merge: bool) -> Sequence[epath.Path]:
        """Joins the parts into the file and deletes their folder, or keeps the parts as they are.

        Returns:
          The paths that were written.
        """
        parts = [self.part(number) for number in range(count)]
        if not merge:
            return parts
        with replacing(self.path) as unfinished, unfinished.open('wb') as whole:
            for part in parts:
                with part.open('rb') as file:
                    shutil.copyfileobj(file, whole)
        self.folder.rmtree()
        return [self.path]
