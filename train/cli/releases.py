"""`meshwright radar`: what each release of jax changes in a repository's programs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from partitioning.command_line import OneLineParser
from train.cli.command import add_traceback, run_command

_DESCRIPTION = """\
Compiles the programs that pyproject.toml declares for `meshwright check` with
several releases of jax, each in an environment of its own, and says what each
release changed: exchanges, peak, time and layouts, with the line of the
program, whether jax or its compiler changed it, and what the release notes
say of it.

  {prog}                                      all releases of jax that exist
  {prog} --versions=jax==0.10.2,jax==0.11.2   these two
  {prog} --versions=jax==0.11.2+flax==0.12.8,jax==0.11.2+flax==0.12.12
  {prog} --page=radar.md                      also writes a page

Environments and records are kept, so that a run that was stopped continues.
What the programs need is declared, too:

  [tool.meshwright.radar]
  requirements = ["flax", "optax"]
  path = ["src"]

The exit status is 0, or 2 if a program works with none of the releases.
"""


def radar(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright radar`, and returns its exit status."""
    parser = OneLineParser(prog, '[NAME ...] [--versions=...] [...]', _DESCRIPTION)
    parser.add_argument('names', nargs='*', metavar='NAME', help='only these programs')
    parser.add_argument('--root', metavar='DIR', default='.', help='the folder of pyproject.toml')
    parser.add_argument(
        '--versions',
        metavar='LIST',
        default='',
        help='releases with commas between them; a release is jax==0.10.2, or several packages '
        'with + between them',
    )
    parser.add_argument(
        '--python',
        metavar='PATH',
        default=sys.executable,
        help='the Python of the environments (this one); newer releases of jax need newer ones',
    )
    parser.add_argument(
        '--cache', metavar='DIR', default='', help='where environments and records are kept'
    )
    parser.add_argument(
        '--limit', type=float, metavar='S', default=900, help='seconds for one program (900)'
    )
    parser.add_argument(
        '--notes', metavar='FILE', default='', help="a change log, such as jax's CHANGELOG.md"
    )
    parser.add_argument('--page', metavar='FILE', default='', help='write the tables as Markdown')
    parser.add_argument('--json', action='store_true', help='print exact figures as JSON')
    add_traceback(parser)
    options = parser.parse_args(arguments)
    return run_command(lambda: _radar(options), options)


def _radar(options: argparse.Namespace) -> int:
    from meshwright.checking.radar.command import RadarRun, run_radar
    from meshwright.checking.radar.document import radar_document
    from meshwright.checking.radar.drawing import radar_text
    from meshwright.checking.radar.notes import known_notes, read_notes
    from meshwright.checking.radar.page import write_radar
    from meshwright.checking.radar.settings import default_cache, read_radar
    from meshwright.report.terminal import terminal_width

    root, python = Path(options.root), shutil.which(options.python)
    if not root.is_dir():
        raise ValueError(f'--root={options.root}: there is no such folder')
    if python is None:
        raise ValueError(f'--python={options.python}: there is no such program')
    if not options.limit > 0:
        raise ValueError(f'--limit={options.limit:g} must be a number of seconds above 0')
    notes = known_notes() + (read_notes(Path(options.notes)) if options.notes else ())
    settings = read_radar(root.absolute(), tuple(options.names))
    cache = Path(options.cache) if options.cache else default_cache()
    found = run_radar(
        settings,
        RadarRun(
            python=os.path.abspath(python),
            cache=cache.absolute(),
            versions=options.versions,
            limit=options.limit,
            progress=_show_progress,
        ),
    )
    if options.page:
        write_radar(found, notes, Path(options.page))
    if options.json:
        print(json.dumps(radar_document(found, notes)))
    else:
        print(radar_text(found, notes, terminal_width()))
    columns = [found.first, *(step.programs for step in found.steps)]
    works = {p.name for column in columns for p in column if p.after is not None}
    return 0 if len(works) == len(settings.programs) else 2


def _show_progress(text: str) -> None:
    """Shows what happens, because a run takes long; a pipe gets it, too, on stderr."""
    print(text, file=sys.stderr, flush=True)
