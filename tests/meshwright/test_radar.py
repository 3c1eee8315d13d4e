"""`meshwright radar`: what releases change, which package does it, and runs that continue."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_records import recorded

from meshwright.checking.processes import _environment, record_in_turn
from meshwright.checking.radar import command, environments
from meshwright.checking.radar.document import radar_document
from meshwright.checking.radar.drawing import radar_text
from meshwright.checking.radar.environments import Environment, Wanted, make_environment
from meshwright.checking.radar.notes import known_notes, read_notes
from meshwright.checking.radar.page import BEGIN, END, write_radar
from meshwright.checking.radar.releases import parse_releases, supported_versions
from meshwright.checking.radar.settings import read_radar
from meshwright.checking.radar.steps import compare_releases
from meshwright.checking.radar.sweep import Sweep, read_record, write_record
from meshwright.checking.settings import CheckedProgram
from train.cli import main

STEP = CheckedProgram(name='step', function='layouts:step', topology='v5e:2x4')


def record(jax, libtpu, **changes):
    versions = {'jax': jax, 'jaxlib': jax, 'libtpu': libtpu}
    return dataclasses.replace(recorded(), versions=versions, files={}, **changes)


def environment(tmp_path, jax, libtpu, error=''):
    [release, _] = parse_releases(f'jax=={jax},jax==0')
    folder = tmp_path / 'environments' / f'jax-{jax}'
    library = folder / 'lib/python3/site-packages/libtpu/libtpu.so'
    library.parent.mkdir(parents=True)
    library.write_bytes(b'')
    versions = {'jax': jax, 'jaxlib': jax, 'libtpu': libtpu}
    return Environment(release=release, folder=folder, versions=versions, error=error)


@pytest.fixture
def radar(tmp_path):
    """jax 0.10.2 makes the step slower, its libtpu doubles the peak, and 0.11.0 breaks it.

    0.11.1 has the peak of 0.10.2 and twice its exchanges. No program is compiled.
    """
    old, new, broken, last = (
        environment(tmp_path, '0.10.0', '0.0.40'),
        environment(tmp_path, '0.10.2', '0.0.42'),
        environment(tmp_path, '0.11.0', '0.0.44', "has no attribute 'get_opaque_trace_state'"),
        environment(tmp_path, '0.11.1', '0.0.46'),
    )
    sweep = Sweep(root=tmp_path, path=(), folder=tmp_path / 'records')
    one = dataclasses.replace(STEP, name='other')
    for program in (STEP, one):
        peak = 2_000_000 if program is STEP else 1_000_000
        slow = {'seconds': 2.0} if program is STEP else {'seconds': 1.0}
        before = record('0.10.0', '0.0.40', peak=1_000_000, seconds=1.0)
        write_record(sweep, program, before, old)
        mixed = record('0.10.2', '0.0.40', peak=1_000_000, **slow)
        write_record(sweep, program, mixed, new, old)
        write_record(sweep, program, record('0.10.2', '0.0.42', peak=peak, **slow), new)
        write_record(sweep, program, record('0.11.1', '0.0.46', peak=peak, **slow), last)
    said = []
    found = compare_releases(sweep, (STEP, one), (old, new, broken, last), said.append)
    assert said == []  # all records were there
    return found


def test_jax_and_its_compiler_are_told_apart(radar):
    first, second, third = radar.steps
    assert first.title == 'jax 0.10.0 -> 0.10.2, libtpu 0.0.40 -> 0.0.42'
    step, other = first.programs
    assert other.changes == ()
    assert {(c.difference.kind, c.difference.now, c.cause) for c in step.changes} == {
        ('time', 2.0, 'jax'),
        ('memory', 2_000_000, 'libtpu'),
    }
    assert all(p.broke and 'get_opaque_trace_state' in p.error for p in second.programs)
    assert [(p.repaired, p.since, p.changes) for p in third.programs] == [
        (True, 'jax==0.10.2', ())
    ] * 2


def test_the_answer_has_three_forms_and_a_page_keeps_what_is_around_the_tables(radar, tmp_path):
    text = radar_text(radar, known_notes(), 60)
    assert max(map(len, text.splitlines())) <= 130  # an address is not broken
    assert re.search(r'^step +pt +broke +works$', text, re.MULTILINE), text
    assert 'peak: 1 program, +100% (by libtpu)' in text
    assert 'jax 0.11.0: names of jax.core that 0.10.0 deprecated are removed' in ' '.join(
        text.split()
    )
    held = json.loads(json.dumps(radar_document(radar, known_notes())))
    assert held['format'] == 'meshwright radar 1' and len(held['releases']) == 4
    [time, peak] = sorted(held['steps'][0]['programs'][0]['changes'], key=lambda c: c['unit'])[::-1]
    assert (time['cause'], peak['cause'], peak['was'], peak['now']) == ('jax', 'libtpu', 1e6, 2e6)
    [note] = held['steps'][1]['programs'][0]['notes']
    assert note['release'] == '0.11.0' and note['link'].startswith('https://docs.jax.dev/')
    page = tmp_path / 'page.md'
    page.write_text(f'# Ours\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nafter\n')
    write_radar(radar, known_notes(), page)
    made = page.read_text()
    assert made.startswith('# Ours\n\nbefore\n') and made.endswith(f'{END}\n\nafter\n')
    assert 'old\n' not in made and '| step | v5e:2x4 | pt | broke | works |' in made
    write_radar(radar, known_notes(), page)
    assert page.read_text() == made
    page.write_text('# Another page\n')
    with pytest.raises(ValueError, match='is another page'):
        write_radar(radar, known_notes(), page)


def test_a_record_is_made_anew_when_the_program_changes(tmp_path):
    place = environment(tmp_path, '0.10.0', '0.0.40')
    (tmp_path / 'layouts.py').write_text('1')
    sweep = Sweep(root=tmp_path, path=(), folder=tmp_path / 'records')
    made = record('0.10.0', '0.0.40')
    write_record(sweep, STEP, made, place)
    assert read_record(sweep, STEP, place) == made
    assert read_record(sweep, dataclasses.replace(STEP, topology='v6e:2x4'), place) is None
    (tmp_path / 'layouts.py').write_text('2')
    assert read_record(sweep, STEP, place) is None
    [file] = sweep.folder.rglob('*.json')
    file.write_text('{"format": ')
    assert read_record(sweep, STEP, place) is None


LAYOUTS = """
import os, time
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def forward():
    mesh = jax.make_mesh((8,), ('data',))
    x = jax.ShapeDtypeStruct((64, 64), 'float32', sharding=NamedSharding(mesh, P()))
    return jax.jit(lambda w, x: jnp.tanh(x @ w)), (x, x)

def broken():
    return {}['x'], ()

def crash():
    os.write(2, b'lost in the middle')
    os._exit(3)

def sleep():
    time.sleep(1000)
"""
DECLARED = ''.join(
    f'[tool.meshwright.goldens.{name}]\nfunction = "layouts:{name}"\n'
    for name in ('forward', 'broken', 'crash')
)


def test_a_run_continues_and_one_broken_program_is_one_line(tmp_path, monkeypatch, capsys):
    """Both releases are this environment, and then the peak in a record is written by hand."""
    (tmp_path / 'pyproject.toml').write_text(DECLARED)
    (tmp_path / 'layouts.py').write_text(LAYOUTS)

    def make(release, wanted, folder):
        place = folder / release.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(sys.prefix)
        return Environment(release=release, folder=place, versions=dict(release.pins))

    monkeypatch.setattr(command, 'make_environment', make)
    asked = ['radar', f'--root={tmp_path}', f'--cache={tmp_path}/cache']
    asked.append('--versions=jax==0.9.0,jax==0.9.1')
    assert main(asked) == 2  # two programs work nowhere
    out, said = capsys.readouterr()
    assert re.search(r'^forward +\.$', out, re.MULTILINE) and re.search(r'^crash +-$', out, re.M)
    assert re.search(r"^broken with jax==0.9.1: layouts.py:12: KeyError: 'x'$", said, re.MULTILINE)
    assert 'crash with jax==0.9.0: the process ended with 3: lost in the middle' in said
    [file] = [f for f in (tmp_path / 'cache').rglob('*.json') if 'jax==0.9.1' in f.name]
    held = json.loads(file.read_text())
    held['record']['peak'] += 1_000_000
    file.write_text(json.dumps(held))
    assert main([*asked, 'forward', '--json']) == 0
    out, said = capsys.readouterr()
    assert 'forward with' not in said
    [change] = json.loads(out)['steps'][0]['programs'][0]['changes']
    assert (change['kind'], change['now'] - change['was']) == ('memory', 1_000_000)


def test_other_environments_compile_with_their_own_compiler(tmp_path, monkeypatch):
    """jax names the compiler of this environment in a variable, which processes would inherit."""
    told = CheckedProgram(name='told', function='layouts:told')
    ours, theirs = f'{sys.prefix}/lib/libtpu.so', '/theirs/libtpu.so'
    for inherited, given, expected in (
        (ours, {}, sys.prefix),
        (theirs, {}, theirs),
        (ours, {'TPU_LIBRARY_PATH': theirs}, theirs),
    ):
        monkeypatch.setenv('TPU_LIBRARY_PATH', inherited)
        found = _environment(told, tmp_path, given).get('TPU_LIBRARY_PATH', sys.prefix)
        assert found == expected


def test_a_program_that_never_ends_is_stopped(tmp_path):
    (tmp_path / 'layouts.py').write_text(LAYOUTS)
    slow = CheckedProgram(name='sleep', function='layouts:sleep')
    [found] = record_in_turn([slow], tmp_path, sys.executable, variables={}, limit=0.5)
    assert found.error == 'it was stopped after 0.5 s'
    [found] = record_in_turn([slow], tmp_path, 'no/python', variables={}, limit=1)
    assert found.error == 'no/python cannot be started: No such file or directory'


def test_what_is_installed(tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        status = int('install' in command)
        return subprocess.CompletedProcess(command, status, '', 'error: no\n  such version')

    monkeypatch.setattr(subprocess, 'run', run)
    wanted = Wanted(python=sys.executable, requirements=('flax>=0.12', 'optax'))
    texts = 'jax==0.9.0,flax==0.12.6+jax==0.10.0,jax==0.10.0+libtpu==0.0.41'
    for find, kind in ((lambda: 'uv', 'uv'), (lambda: None, '-m')):
        monkeypatch.setattr(environments, 'find_uv', find)
        for release in parse_releases(texts):
            made = make_environment(release, wanted, tmp_path)
            assert made.error == 'cannot be installed: error: no such version'
        assert all(kind in c for c in commands[-2:])
    installed = [[part for part in c if '=' in part or part == 'optax'] for c in commands[1:6:2]]
    assert installed == [
        ['jax[tpu]==0.9.0', 'flax>=0.12', 'optax'],
        ['jax[tpu]==0.10.0', 'flax==0.12.6', 'optax'],
        ['jax==0.10.0', 'libtpu==0.0.41', 'flax>=0.12', 'optax'],
    ]
    listed = '0.12.0.1, 0.12.0, 0.12.0rc1, 0.10.2, 0.9.2, 0.9.0, 0.8.3'
    assert supported_versions(listed, (0, 9)) == ['0.9.0', '0.9.2', '0.10.2', '0.12.0', '0.12.0.1']


def test_the_items_of_a_change_log_are_about_the_names_that_they_write_as_code(tmp_path):
    file = tmp_path / 'CHANGELOG.md'
    file.write_text(
        '## Unreleased\n* `not_yet` released\n\n## JAX 0.11.0 (July)\n* New\n'
        '  * {func}`jax.lax.top_k` now\n    does more.\n\n## flax 0.12.1\n- `nnx.scan` is new.\n'
    )
    assert [(n.package, n.release, n.names, n.text) for n in read_notes(file)] == [
        ('jax', '0.11.0', ('top_k',), '{func}`jax.lax.top_k` now does more.'),
        ('flax', '0.12.1', ('scan',), '`nnx.scan` is new.'),
    ]
    file.write_text('# Ours\n')
    with pytest.raises(ValueError, match='has no heading with a version'):
        read_notes(file)


RADAR = '[tool.meshwright.radar]\n'
FORWARD = '[tool.meshwright.goldens.forward]\nfunction = "layouts:forward"\n'


@pytest.mark.parametrize(
    ('text', 'arguments', 'message'),
    [
        ('', [], 'nothing to check'),
        (f'{RADAR}version = []\n{FORWARD}', [], "has no 'version'.* Did you mean 'versions'"),
        (f'{RADAR}path = ["src"]\n{FORWARD}', [], 'path: there is no folder src'),
        (f'{RADAR}requirements = "flax"\n{FORWARD}', [], "= 'flax': write a list of texts"),
        (f'{RADAR}versions = ["jax==0.9.0"]\n{FORWARD}', [], 'has 1 of the 2 releases'),
        (FORWARD, ['--versions=jax==0.9.0,jax==0.9.0'], 'names jax==0.9.0 twice: keep one'),
        (FORWARD, ['--versions=jax>=0.9.0,jax==0.9'], "'jax>=0.9.0' is not a version of a package"),
        (FORWARD, ['--versions=jax==0.9+jax==0.8,jax==0.9'], 'names jax twice'),
        (FORWARD, ['backward'], "no golden 'backward'.* pyproject.toml has forward"),
        (FORWARD, ['--python=no/python'], 'there is no such program'),
        (FORWARD, ['--limit=0'], '--limit=0 must be a number of seconds above 0'),
        (FORWARD, ['--notes=no.md'], '--notes=no.md: No such file'),
        (FORWARD, ['--root=nowhere'], 'there is no such folder'),
    ],
)
def test_a_mistake_is_one_line(text, arguments, message, tmp_path, capsys):
    (tmp_path / 'pyproject.toml').write_text(text)
    assert main(['radar', f'--root={tmp_path}', f'--cache={tmp_path}', *arguments]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and re.search(message, said), said


def test_the_programs_of_the_page_are_thirty_with_several_releases():
    settings = read_radar(Path(__file__).parents[2] / 'benchmarks/radar')
    assert len(settings.programs) >= 30 and settings.needs_tpu
    releases = settings.releases('', sys.executable)
    assert len({dict(release.pins)['jax'] for release in releases}) >= 6
