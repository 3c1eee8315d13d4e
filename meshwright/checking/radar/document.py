"""What `meshwright radar --json` prints, for programs.

    {
     "format": "meshwright radar 1",
     "releases": [{"name": "jax==0.10.2", "versions": {"jax": "0.10.2", ...}, "error": ""}],
     "steps": [
      {
       "before": "jax==0.10.0",
       "after": "jax==0.10.2",
       "moved": {"jax": ["0.10.0", "0.10.2"], "libtpu": ["0.0.40", "0.0.42.1"]},
       "programs": [{"name": "step", "machine": "v5e:2x4", "error": "", "changes": [...]}]
      }
     ]
    }

An entry of "changes" has the entries of a difference of `meshwright check --json`, and "cause", the
packages that made it, and "notes".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.checking.document import AnswerFigures, figures_of, plain_difference
from meshwright.checking.radar.notes import Note, notes_of_change, notes_of_error, plain_note
from meshwright.checking.radar.steps import ProgramStep, Radar, Step
from meshwright.report.plain_values import to_plain

FORMAT = 'meshwright radar 1'


def radar_document(radar: Radar, notes: Sequence[Note]) -> dict[str, Any]:
    """The answer as values that JSON can hold; sizes are in bytes, and times in seconds."""
    return {
        'format': FORMAT,
        'releases': [
            {'name': e.release.name, 'versions': dict(e.versions), 'error': e.error}
            for e in radar.environments
        ],
        'first': [_program(p, [], []) for p in radar.first],
        'steps': [_step(step, notes) for step in radar.steps],
    }


def _step(step: Step, notes: Sequence[Note]) -> dict[str, Any]:
    programs = []
    for program in step.programs:
        changes = [
            {
                **to_plain(plain_difference(change.difference)),
                'cause': change.cause,
                'notes': list(map(plain_note, notes_of_change(step, change, notes))),
            }
            for change in program.changes
        ]
        told = notes_of_error(step, program, notes) if program.broke else []
        programs.append(_program(program, changes, list(map(plain_note, told))))
    return {
        'before': step.before.release.name,
        'after': step.after.release.name,
        'moved': {name: list(pair) for name, pair in step.moved.items()},
        'programs': programs,
    }


def _program(
    program: ProgramStep, changes: list[dict[str, Any]], notes: list[dict[str, Any]]
) -> dict[str, Any]:
    before, after = (figures_of(record) for record in (program.before, program.after))
    return {
        'name': program.name,
        'machine': program.machine,
        'error': program.error,
        'since': program.since,
        'before': _plain(before),
        'after': _plain(after),
        'changes': changes,
        'notes': notes,
    }


def _plain(figures: AnswerFigures | None) -> Any:
    return None if figures is None else to_plain(figures)
