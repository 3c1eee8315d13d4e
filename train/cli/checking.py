"""`meshwright check` and `radar`: what the code, or a release of jax, changed in your programs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partitioning.command_line import OneLineParser
from train.cli.command import add_traceback, run_command

if TYPE_CHECKING:
    from meshwright.checking.processes import CheckRun
    from meshwright.checking.settings import CheckSettings
    from meshwright.records.verdicts import Verdict

_CHECK = """\
Compares the programs of a repository with their golden files: layouts,
donation, constraints, remat, types, exchanges, memory and time. Names, lines,
comments and order do not count. pyproject.toml declares the programs:

  [tool.meshwright.goldens.train-step]
  function = "layouts:train_step"   # returns step, (state, batch)
  topology = "v5e:4x4"

  {prog} --update      writes goldens/train-step.json; commit it
  {prog}               says what changed, and at which line
  {prog} --out=check   also writes check.json, check.md and a page
  {prog} --history=v1.0..   says which commit since v1.0 changed what

The exit status is 0 if nothing changed, 1 if something did, and 2 if a program
could not be compared. Figures that only another version of jax or of its
compiler moved are reported, and are no change, except with --strict.
"""


def check(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright check`, and returns its exit status."""
    parser = _make_parser(prog, '[NAME ...] [--update] [...]', _CHECK)
    parser.add_argument('--update', action='store_true', help='write the golden files that changed')
    parser.add_argument(
        '--python',
        metavar='PATH',
        default='',
        help='a Python with the versions of the golden files, to tell apart what the code '
        'changed and what the versions moved; it need not have this package',
    )
    parser.add_argument(
        '--history',
        metavar='A..B',
        help='record each commit of a range, and compare it with the one before; with --python, '
        'by that Python',
    )
    parser.add_argument(
        '--strict', action='store_true', help='figures that versions moved are a change'
    )
    parser.add_argument('--jobs', type=int, metavar='N', help='programs at once (2, or 1 per core)')
    parser.add_argument('--out', metavar='DIR', help='write the answer and the page to DIR')
    parser.add_argument('--markdown', action='store_true', help='print a comment as Markdown')
    options = parser.parse_args(arguments)
    return run_command(lambda: _check(options), options)


def _make_parser(prog: str, usage: str, description: str) -> OneLineParser:
    parser = OneLineParser(prog, usage, description)
    parser.add_argument('names', nargs='*', metavar='NAME', help='only these programs')
    parser.add_argument('--root', metavar='DIR', default='.', help='the folder of pyproject.toml')
    parser.add_argument('--json', action='store_true', help='print exact figures as JSON')
    add_traceback(parser)
    return parser


def _find_root(options: argparse.Namespace) -> Path:
    root = Path(options.root)
    if not root.is_dir():
        raise ValueError(f'--root={options.root}: there is no such folder')
    return root.absolute()


def _find_python(options: argparse.Namespace) -> str:
    if (python := shutil.which(options.python)) is None:
        raise ValueError(f'--python={options.python}: there is no such program')
    return os.path.abspath(python)


def _check(options: argparse.Namespace) -> int:
    from meshwright.checking.command import check_programs, update_goldens, write_check
    from meshwright.checking.processes import CheckRun
    from meshwright.checking.settings import read_settings
    from meshwright.records.verdicts import exit_status

    jobs = min(2, os.cpu_count() or 1) if options.jobs is None else options.jobs
    if jobs < 1:
        raise ValueError(f'--jobs={jobs} must be at least 1')
    if options.json and options.markdown:
        raise ValueError('--json and --markdown: choose one; --out=DIR writes both')
    if options.update and (options.python or options.out or options.json or options.markdown):
        raise ValueError('--update writes golden files and compares nothing: use it alone')
    if options.history is not None and (
        options.update or options.out or options.markdown or options.strict
    ):
        raise ValueError('--history goes with --json, --python and --jobs only')
    root, python = _find_root(options), _find_python(options) if options.python else ''
    settings = read_settings(root, options.names)
    run = CheckRun(python=python, jobs=jobs, progress=_show_progress)
    if options.history is not None:
        return _history(settings, run, options)
    if options.update:
        written, errors = update_goldens(settings, run)
        for file in written:
            print(f'wrote {os.path.relpath(file)}')
        for error in errors:
            print(f'error: {error}', file=sys.stderr)
        if not written and not errors:
            print('nothing changed')
        return 2 if errors else 0
    verdicts = check_programs(settings, run)
    page = write_check(verdicts, Path(options.out)) if options.out else None
    print(_answer(options, verdicts, page))
    return exit_status(verdicts, strict=options.strict)


def _history(settings: CheckSettings, run: CheckRun, options: argparse.Namespace) -> int:
    from meshwright.checking.document import history_document
    from meshwright.checking.drawing import commit_text, history_summary
    from meshwright.checking.history import check_history
    from meshwright.report.terminal import terminal_width

    found = []
    for made in check_history(settings, run, options.history):
        found.append(made)
        if not options.json and (text := commit_text(made, terminal_width())):
            print(f'{text}\n', flush=True)
    print(json.dumps(history_document(found)) if options.json else history_summary(found))
    if any(made.changed for made in found):
        return 1
    return 2 if all(v.status == 'error' for made in found for v in made.verdicts) else 0


def _show_progress(text: str) -> None:
    """Shows on a terminal what is compiled."""
    if sys.stderr.isatty():
        print(f'compiling {text}', file=sys.stderr)


def _answer(options: argparse.Namespace, verdicts: Sequence[Verdict], page: str | None) -> str:
    from meshwright.checking.document import check_document
    from meshwright.checking.drawing import check_text
    from meshwright.checking.markdown import check_markdown
    from meshwright.report.terminal import terminal_width

    if options.json:
        return json.dumps(check_document(verdicts, page))
    if options.markdown:
        return check_markdown(verdicts, page or '').rstrip('\n')
    return check_text(verdicts, terminal_width())


_RADAR = """\
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
    parser = _make_parser(prog, '[NAME ...] [--versions=...] [...]', _RADAR)
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

    root, python = _find_root(options), _find_python(options)
    if not options.limit > 0:
        raise ValueError(f'--limit={options.limit:g} must be a number of seconds above 0')
    notes = known_notes() + (read_notes(Path(options.notes)) if options.notes else ())
    settings = read_radar(root, tuple(options.names))
    cache = Path(options.cache) if options.cache else default_cache()
    found = run_radar(
        settings,
        RadarRun(
            python=python,
            cache=cache.absolute(),
            versions=options.versions,
            limit=options.limit,
            progress=_show_stage,
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


def _show_stage(text: str) -> None:
    """Shows what happens, because a run takes long; a pipe gets it, too, on stderr."""
    print(text, file=sys.stderr, flush=True)
