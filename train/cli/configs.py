"""`meshwright configs`: the shipped runs, models, layouts and launch files, and their purposes."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from partitioning.command_line import OneLineParser
from partitioning.spelling import nearest
from train.cli.command import add_traceback, run_command

_DESCRIPTION = """\
Lists the configurations that come with this package, or prints one of them.

  {prog}                       what there is, and what each is for
  {prog} pretrain              print configs/runs/pretrain.gin
  {prog} slurm.sh > slurm.sh   copy a launch file
"""
# The folders of configs/, with what they have and how it is used. The first has precedence.
_KINDS = {
    'runs': ('runs', 'meshwright train NAME'),
    'models': (
        'models, to be given after a run',
        'meshwright train pretrain configs/models/1b.gin',
    ),
    'partitioning': (
        'layouts, to be given after a run',
        'meshwright train pretrain configs/partitioning/fsdp_tensor.gin',
    ),
    'launch': ('launch files of clusters', 'meshwright configs slurm.sh > slurm.sh'),
    't5x': ('runs with the settings of T5X', 'meshwright train configs/t5x/pretrain.gin ...'),
}
_MOST_COLUMNS = 100


def show_configs(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright configs`, and returns its exit status."""
    parser = OneLineParser(prog, '[NAME]', _DESCRIPTION)
    parser.add_argument('name', metavar='NAME', nargs='?', help='the configuration to print')
    add_traceback(parser)
    options = parser.parse_args(arguments)

    def command() -> None:
        if options.name is None:
            print('\n'.join(_list_all()))
        else:
            sys.stdout.write(_find(options.name).read_text())

    return run_command(command, options)


def _list_all() -> Iterator[str]:
    """The lines of the list, as wide as the terminal."""
    from train.gin.parsing import find_config_root

    width = min(shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns, _MOST_COLUMNS)
    root = find_config_root() / 'configs'
    for folder, (title, usage) in _KINDS.items():
        files = sorted(path for path in (root / folder).iterdir() if path.is_file())
        names = {(p.name if p.suffix != '.gin' else p.stem): _purpose(p) for p in files}
        column = max(map(len, names)) + 4
        yield from (f'{title}:', f'  $ {usage}')
        for name, purpose in names.items():
            yield from textwrap.wrap(
                purpose,
                max(width, column + 20),
                initial_indent=f'  {name:<{column - 2}}',
                subsequent_indent=' ' * column,
            )
        yield ''
    yield 'meshwright configs NAME prints one of them.'


def _purpose(path: Path) -> str:
    """The first sentence of the comment with which a file begins."""
    words = list[str]()
    for line in path.read_text().splitlines():
        if line.startswith('#!'):
            continue
        text = line.removeprefix('#').strip()
        if not line.startswith('#') or not text:
            break
        words.append(text)
        if text.endswith(':'):
            break
    # A dot inside a name, such as tiny.gin, or an abbreviation of a number ends no sentence.
    sentence = re.split(r'(?<=\.)\s+(?=[A-Z])', ' '.join(words))[0]
    return sentence.rstrip('.:')


def _find(name: str) -> Path:
    """The file of a configuration: a name of the list, or a path such as `models/8b`."""
    from train.errors import ConfigError
    from train.gin.parsing import find_config_root

    root = find_config_root() / 'configs'
    files = {
        f'{folder}/{path.name}': path
        for folder in (*_KINDS, 'forecasting')
        for path in sorted((root / folder).iterdir())
        if path.is_file()
    }
    wanted = name.removeprefix('configs/')
    for key, path in files.items():
        known = (key, key.removesuffix('.gin'), path.name, path.stem)
        if wanted in known:
            return path
    hint = nearest(wanted, (path.stem for path in files.values()))
    raise ConfigError(f'no configuration {name!r}.{hint} `meshwright configs` lists all of them')
