"""Mistakes in the settings of a run that are found at once, before jax is imported.

Only what the gin files and flags say as plain values is looked at. Everything is checked again when
the run is made, so nothing depends on these checks.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from train.cli.command import gin_settings
from train.errors import ConfigError, check_counts, describe_error
from train.gin.checks import check_listed
from train.gin.parsing import Reference, Statement, follow_macros, read_statements
from train.machine.host_memory import check_batch_fits
from train.paths import as_folder, is_remote
from train.t5x.modules import ALIASES

# More files are not looked at here, because listing them may take long.
_MOST_FILES = 10_000


def check_run(options: argparse.Namespace, files: Sequence[str]) -> None:
    """Checks the folder and the data of a run.

    Raises a ConfigError if a gin file or a flag cannot be read, if a gin file names what none may
    use, if MODEL_DIR cannot be written or is in use, or if the files of the data leave nothing to
    train or to evaluate on.
    """
    settings = check_folder(options, files)
    place, folder = settings.find('', 'model_dir')
    is_alone = not (options.multihost or options.coordinator_address or options.process_count)
    if isinstance(folder, str) and not is_remote(folder) and is_alone:
        _check_free(place, folder)
    _check_counts(settings)
    if is_alone:
        _check_sizes(settings)
    _check_text_files(settings)


def check_folder(options: argparse.Namespace, files: Sequence[str]) -> Settings:
    """Checks the names in gin files and the folder of a run, and returns its settings.

    Raises a ConfigError; see `check_run`. With `--gin_allow`, names are only checked when the
    packages of the user have been imported.
    """
    bindings, folders, packages = gin_settings(options)
    statements = read_statements([*files, *options.gin_file], bindings, folders)
    if not packages:
        check_listed(statements, ALIASES)
    settings = Settings(statements)
    place, folder = settings.find('', 'model_dir')
    if isinstance(folder, str) and not is_remote(folder):
        _check_writable(place, folder)
    return settings


class Settings:
    """The values that statements set, as far as they are plain.

    `statements` are the statements of all files and flags, in the order in which they take effect.
    """

    def __init__(self, statements: Sequence[Statement]):
        self._macros: dict[str, Statement] = {}
        self._bindings: dict[tuple[str, str], Statement] = {}
        for one in statements:
            if one.macro:
                self._macros[one.macro] = one
            elif one.is_binding and not one.parsed.scope:
                name = one.parsed.selector.rpartition('.')[2]
                self._bindings[name, one.parsed.arg_name] = one

    def find(self, configurable: str, parameter: str) -> tuple[str, Any]:
        """Returns where a parameter is set, and its value: a Reference if it is no plain one.

        `configurable` is the last part of its name; the empty one stands for any.
        """
        found = [
            statement
            for (name, argument), statement in self._bindings.items()
            if argument == parameter and configurable in ('', name)
        ]
        if not found:
            return '', None
        statement = follow_macros(found[-1], self._macros)
        return statement.place, statement.parsed.value

    def find_reference(self, configurable: str, parameter: str) -> str:
        """The last part of the name that a parameter is bound to, or '' if it is another value."""
        value = self.find(configurable, parameter)[1]
        is_one = isinstance(value, Reference) and not value.is_macro and value.evaluate
        return value.name.rpartition('.')[2] if is_one and '/' not in value.name else ''

    @property
    def evaluates_held_out(self) -> bool:
        """Whether the run evaluates what its training task holds out."""
        evaluators = self.find('TrainConfig', 'evaluators')[1]
        if self.find('HeldOut', 'task')[1] is not None:
            return False
        used = evaluators.values() if isinstance(evaluators, Mapping) else ()
        return any(isinstance(one, Reference) and one.selector == 'HeldOut' for one in used)


def _check_writable(place: str, folder: str) -> None:
    """Checks that a folder, which may not exist yet, can be written, without leaving anything."""
    path = os.path.abspath(as_folder('MODEL_DIR', folder))
    existing = path
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        error.filename = None
        where = '' if existing == path else f' in {existing}'
        raise ConfigError(
            f'{place}: MODEL_DIR {folder} cannot be written: {describe_error(error)}{where}; use '
            'another folder: --gin.MODEL_DIR=...'
        ) from error


def _check_counts(settings: Settings) -> None:
    """Checks numbers of steps and rows before the run checks them."""
    positive = ('batch_size', 'num_microbatches', 'log_every', 'max_skips', 'max_roll_backs')
    for name, least in (('total_steps', 0), *((name, 1) for name in positive)):
        place, value = settings.find('TrainConfig', name)
        if place and not isinstance(value, Reference):
            try:
                check_counts(least, **{f'TrainConfig.{name}': value})
            except ConfigError as error:
                raise ConfigError(f'{place}: {error}') from error


def _check_sizes(settings: Settings) -> None:
    """Checks that this host can hold a batch."""
    place, rows = settings.find('TrainConfig', 'batch_size')
    _, length = settings.find('TrainConfig', 'sequence_length')
    if type(rows) is int and type(length) is int and rows > 0 and length > 0:
        try:
            check_batch_fits(rows, length)
        except ConfigError as error:
            raise ConfigError(f'{place}: {error}') from error


def _check_free(place: str, folder: str) -> None:
    """Checks that no living process of this machine holds a folder."""
    from etils import epath

    from train.processes.claims import ClaimedFolder, refusal

    files = ClaimedFolder(epath.Path(os.path.realpath(as_folder('MODEL_DIR', folder))))
    for claim in files.read():
        state = None if claim.owner is None else claim.owner.state()
        if claim.holds and state in ('alive', 'suspended') and claim.place == files.place:
            raise ConfigError(f'{place}: {refusal(f"MODEL_DIR {folder}", claim, files, state)}')


def _check_text_files(settings: Settings) -> None:
    """Checks that text files are found, and that they can be both trained and evaluated on."""
    from train.data.text.files import HOLDOUT_PERCENT, find_files

    task = settings.find_reference('TrainConfig', 'task')
    if not task or settings.find_reference(task, 'source') != 'TextFiles':
        return
    place, pattern = settings.find('TextFiles', 'pattern')
    values = {name: settings.find('TextFiles', name)[1] for name in ('exclude', 'root')}
    percent_place, percent = settings.find('TextFiles', 'holdout_percent')
    percent = HOLDOUT_PERCENT if percent is None else percent
    given = (pattern, *values.values(), percent)
    if pattern is None or any(isinstance(value, Reference) for value in given):
        return
    if not isinstance(percent, int | float) or not 0 <= percent <= 100:
        return
    if any(
        is_remote(str(one)) for one in (pattern if isinstance(pattern, list | tuple) else [pattern])
    ):
        return
    exclude, root = values['exclude'] or (), values['root'] or ''
    try:
        found = find_files(pattern, exclude, root, most=_MOST_FILES + 1)
    except ConfigError as error:
        raise ConfigError(f'{place}: TextFiles: {error}') from error
    if len(found) > _MOST_FILES:
        return
    names = [file.name for file in found]
    if not any(file.size for file in found):
        raise ConfigError(
            f'{place}: empty corpus: TextFiles.pattern {pattern!r} matches {len(found)} '
            f'file{"s" if len(found) > 1 else ""} of 0 bytes: write other files'
        )
    held_out = _count(names, percent)
    files = f'{len(names)} file{"s" if len(names) > 1 else ""}'
    if held_out == len(names):
        raise ConfigError(
            f'{percent_place or place}: all {files} of TextFiles.pattern {pattern!r} are held out, '
            f'because TextFiles.holdout_percent is {percent:g}: lower it, or add files'
        )
    if held_out or not settings.evaluates_held_out:
        return
    # Names decide, so the percentage that holds something out is known.
    enough = next((p for p in (5, 10, 20, 30, 50) if 0 < _count(names, p) < len(names)), None)
    advice = '--gin.TrainConfig.evaluators={} to evaluate nothing'
    if enough is not None:
        advice = (
            f'--gin.TextFiles.holdout_percent={enough} to hold out {_count(names, enough)}, or '
            f'{advice}'
        )
    raise ConfigError(
        f'{percent_place or place}: TextFiles.pattern {pattern!r} matches {files}, of which '
        f'TextFiles.holdout_percent {percent:g} holds out none, so there is nothing to evaluate '
        f'on: add more files, or {advice}'
    )


def _count(names: Sequence[str], percent: float) -> int:
    """The number of documents that are held out."""
    from train.data.text.files import is_held_out

    return sum(is_held_out(name, percent) for name in names)
