"""What a search remembers, prints and draws."""

import dataclasses
import pickle
import sys

import pytest
from etils import epath
from rich.console import Console
from small import small_config

from train.cli.searching import Source, answer, compile_in_new_process
from train.planning import search_runs
from train.planning.candidates import Candidate
from train.planning.machines import Machine
from train.planning.presets import Layout
from train.planning.searching import Found, Outcome, Prediction, SearchResult
from train.planning.space import Choices
from train.planning.tables import (
    draw_search,
    find_frontier,
    list_points,
    search_table,
    summary_lines,
)

GIB = 2**30
LAYOUTS = [Layout('fsdp'), Layout('zero'), Layout('fsdp_tensor', (('NUM_PARTITIONS', 4),))]


def found(number, status, seconds=None, gib=None, fits=True, bound=1.0, guess=2.0):
    outcome = None
    if status == 'compiled':
        peak = None if gib is None else int(gib * GIB)
        outcome = Outcome(fits=fits, peak=peak, seconds=seconds, low=1, high=2, compile_seconds=31)
    return Found(
        candidate=Candidate(layout=LAYOUTS[number % 3], num_microbatches=number // 3 + 1),
        status=status,
        prediction=Prediction(peak=5 * GIB, seconds=guess, bound=bound),
        outcome=outcome,
    )


RESULT = SearchResult(
    found=(
        found(0, 'compiled', 2.0, 8, bound=2.0),
        found(1, 'compiled', 2.2, 6, bound=2.2),
        found(2, 'compiled', 2.4, 7),
        found(3, 'compiled', 1.5, 17, fits=False),
        found(4, 'not compiled', bound=1.6),
        found(5, 'too slow', bound=2.5),
        dataclasses.replace(found(6, 'impossible'), prediction=None, reason='12 heads on 8'),
    ),
    dropped={'the batch cannot be divided': 13},
    limit=16 * GIB,
)


def test_the_frontier_has_what_nothing_beats():
    """By hand: 7 GiB and 2.4 s are beaten by 6 GiB and 2.2 s; 17 GiB do not fit."""
    compiled, predicted = list_points(RESULT.found)
    assert [(p.memory, p.seconds) for p in compiled] == [(8, 2.0), (6, 2.2), (7, 2.4), (17, 1.5)]
    assert [p.found.status for p in predicted] == ['not compiled', 'too slow']
    frontier = find_frontier(p for p in compiled if p.found.seconds is not None)
    assert [(p.memory, p.seconds) for p in frontier] == [(6, 2.2), (8, 2.0)]


def test_the_picture_has_every_candidate(tmp_path):
    figure = draw_search(RESULT, tmp_path / 'search.png', title='8b')
    [axes] = figure.axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {'zero, not compiled: 1', 'ruled out by formulas: 1'} <= {*labels}
    assert {'fsdp, compiled: 2', 'zero, compiled: 1', 'fsdp_tensor, compiled: 1'} <= {*labels}
    assert 'usable: 16.0 GiB' in labels and 'no candidate is below 1.600 s' in labels
    assert (tmp_path / 'search.png').read_bytes()[:4] == b'\x89PNG'


def test_a_search_without_a_winner_is_drawn():
    nothing = dataclasses.replace(RESULT, found=RESULT.found[3:])
    assert draw_search(nothing).axes
    assert summary_lines(nothing)[-1].startswith('no compiled candidate fits')


def test_the_table():
    """The bound is 1.6 s, of the only candidate that could be faster: 2.0 / 1.6 is 25% above."""
    console = Console(width=140)
    with console.capture() as text:
        console.print(search_table(RESULT))
    lines = text.get().splitlines()
    figures = '2.000 s 1.000 to 2.000 8.00 GiB 2.000 s, 5.00 GiB 31 s'
    assert ' '.join(lines[1].split()) == f'fsdp {figures}'
    assert 'does not fit' in lines[4] and '17.00 GiB' in lines[4]
    summary = summary_lines(RESULT)
    assert summary[0] == '20 combinations, of which 4 were compiled'
    assert summary[1] == '  13: the batch cannot be divided'
    assert '    the first of them: 12 heads on 8' in summary
    assert 'at most 25.0% slower' in summary[-1] and 'below 1.600 s' in summary[-1]


MACHINE = Machine('v5e:4x4')


def test_a_second_search_compiles_nothing(tmp_path, monkeypatch):
    """The settings of the run, its machine and the compilers decide what is known."""
    compiled, predicted, versions = [], [], {'libtpu': '1'}
    monkeypatch.setattr(search_runs, '_versions', lambda: versions)
    config = small_config(tmp_path / 'run', tmp_path, batch_size=32)
    monkeypatch.setattr(search_runs, 'change_run', lambda config, candidate, machine: candidate)
    monkeypatch.setattr(search_runs, 'plan_step', predicted.append)
    prediction = Prediction(peak=7, seconds=1, bound=0.1)
    monkeypatch.setattr(search_runs, 'predict_step', lambda planned: prediction)

    def compile_candidate(candidate):
        compiled.append(candidate)
        return Outcome(fits=True, peak=7, seconds=float(len(compiled)), compile_seconds=1.5)

    def run(best, machine=MACHINE, name='mine'):
        found = search_runs.search_run(
            config,
            machine,
            epath.Path(tmp_path),
            best=best,
            choices=Choices.of_layouts(layouts=LAYOUTS[:2], num_microbatches=(1, 2)),
            compile_candidate=compile_candidate,
            write=lambda candidate, comment: f'{name}: {candidate}',
            say=lambda text: None,
        )
        return found.result

    first = run(best=2)
    assert len(compiled) == 2
    assert run(best=2) == first and (len(compiled), len(predicted)) == (2, 4)
    assert run(best=3).num_compiled == 3 and len(compiled) == 3
    run(best=1, name='another run')
    run(best=1, machine=Machine('v5e:2x4'))
    versions['libtpu'] = '2'
    run(best=1)
    assert len(compiled) == 6
    written = {file.name for file in tmp_path.iterdir()}
    assert written == {'best.gin', 'search.json', 'search.png', 'remembered.json'}


def test_settings_that_cannot_be_honoured_are_an_answer():
    outcome = answer(Source(files=['nowhere.gin']), MACHINE, Candidate(layout=LAYOUTS[2]))
    assert not outcome.fits and 'no such gin file' in outcome.error


@pytest.mark.parametrize(
    ('script', 'expected'),
    [
        ("""echo '{"fits": true, "peak": 7, "seconds": 0.5}'""", (True, 7, 0.5, '')),
        ('echo one >&2; echo two >&2; exit 1', (False, None, None, 'two')),
        ('kill -9 $$', (False, None, None, 'exit status -9')),
    ],
    ids=['an answer', 'an error', 'killed'],
)
def test_a_process_of_its_own(tmp_path, monkeypatch, script, expected):
    """The process is called with -P -m MODULE, and reads its request from standard input."""
    python = tmp_path / 'python'
    python.write_text(f'#!/bin/sh\ncat > {tmp_path}/request\n{script}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(python))
    candidate = Candidate(layout=LAYOUTS[2])
    outcome = compile_in_new_process(Source(files=['mine.gin']), MACHINE)(candidate)
    assert (outcome.fits, outcome.peak, outcome.seconds) == expected[:3]
    assert outcome.error.endswith(expected[3]) and bool(outcome.error) == bool(expected[3])
    request = pickle.loads((tmp_path / 'request').read_bytes())
    assert request == (Source(files=['mine.gin']), MACHINE, candidate)
