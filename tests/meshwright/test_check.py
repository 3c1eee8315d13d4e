"""`meshwright check`: versions, its answer in three forms, comments, and mistakes."""

import dataclasses
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from contract import define_types
from test_records import recorded

from meshwright.checking import document
from meshwright.checking.drawing import check_text
from meshwright.checking.markdown import MARKER, check_markdown
from meshwright.checking.processes import Recorded
from meshwright.checking.pull_request import comment
from meshwright.checking.settings import read_settings
from meshwright.records.verdicts import exit_status, judge
from train.cli import main

ROOT = Path(__file__).parents[2]
NEW = {'jax': '0.11.0', 'libtpu': '0.0.60'}


def record(peak=1_000_000, versions=(), files=None, **changes):
    made = {'jax': '0.10.2', 'libtpu': '0.0.52', 'meshwright': '0.2.0', **dict(versions)}
    return dataclasses.replace(
        recorded(), peak=peak, versions=made, files=files or {'model.py': '1'}, **changes
    )


def verdict(before, now, other=None):
    given = None if other is None else Recorded(record=other)
    file = Path('/r/goldens/step.json')
    return judge('step', 'v5e:2x4', file, Path('/r'), before, Recorded(record=now), given)


@pytest.mark.smoke
def test_versions_and_code_are_told_apart():
    """A version moves the peak from 1 to 2 MB; the code, if it changes, moves it to 3 MB."""
    same = verdict(record(), record())
    assert (same.status, exit_status([same])) == ('same', 0)
    code = verdict(record(), record(3_000_000))
    assert (code.status, exit_status([code])) == ('changed', 1)
    alone = verdict(record(), record(2_000_000, NEW))
    assert (alone.status, exit_status([alone]), exit_status([alone], strict=True)) == (
        'versions',
        0,
        1,
    )
    assert 'the files of the program are the same' in alone.message
    assert [d.now for d in alone.by_versions] == [2_000_000]
    probable = verdict(record(), record(2_000_000, NEW, {'model.py': '2'}))
    assert probable.status == 'versions' and '--python=PATH' in probable.message
    lost = {'constraints': ()}
    both = verdict(record(), record(3_000_000, NEW, {'model.py': '2'}, **lost))
    assert both.status == 'changed' and '--python=PATH' in both.message
    apart = verdict(
        record(),
        record(4_000_000, NEW, {'model.py': '2'}),
        record(3_000_000, files={'model.py': '2'}),
    )
    assert [(d.was, d.now) for d in apart.differences] == [(1_000_000, 3_000_000)]
    assert [(d.was, d.now) for d in apart.by_versions] == [(3_000_000, 4_000_000)]
    other = verdict(record(), record(2_000_000, NEW), record(versions={'libtpu': '0.0.9'}))
    assert exit_status([other]) == 2
    assert '--python has libtpu 0.0.9' in other.message and 'libtpu 0.0.52' in other.message
    without = verdict(record(), dataclasses.replace(record(), versions={'jax': '0.10.2'}))
    assert (
        exit_status([without]) == 2 and 'libtpu 0.0.52, which is not installed' in without.message
    )
    assert exit_status([verdict(None, record())]) == 1


def test_the_schema_describes_every_entry_of_the_answer():
    definitions = {}
    define_types(document.AnswerProgram, definitions)
    assert document.check_schema()['$defs'] == definitions
    found = [verdict(record(), record(2_000_000, constraints=())), verdict(None, record())]
    held = json.loads(json.dumps(document.check_document(found, 'out/forecast.html')))
    pytest.importorskip('jsonschema').Draft202012Validator(document.check_schema()).validate(held)
    assert held['status'] == 'missing'
    [constraint, peak] = held['programs'][0]['differences']
    assert (constraint['of_code'], constraint['kind'], constraint['after']) == (
        True,
        'constraint',
        '',
    )
    assert (peak['was'], peak['now'], peak['unit']) == (1_000_000, 2_000_000, 'bytes')


def test_text_and_markdown_have_the_lines_and_no_text_breaks_them():
    changed = verdict(record(), record(2_000_000, constraints=()))
    text = check_text([changed], 80)
    assert 'step on v5e:2x4: 2 changes' in text and '1.0 MB -> 2.0 MB (+100%)' in text
    assert 'with_sharding_constraint' in text and max(map(len, text.splitlines())) <= 100
    [one, *_] = changed.differences
    place = dataclasses.replace(one.at, text='x = a | b  # </details> @all `c` [d](e) <!-- *f*')
    evil = dataclasses.replace(changed, differences=(dataclasses.replace(one, at=place),))
    made = check_markdown([evil])
    assert made.startswith(f'{MARKER}\n') and made.count('</details>') == 1 == made.count('<!--')
    [row] = [line for line in made.splitlines() if line.startswith('| layout')]
    assert row.count('|') == 5 and not re.search(r'[@`]', row)
    many = dataclasses.replace(changed, differences=(one,) * 2000)
    assert len(check_markdown([many])) < 65_536
    assert 'nothing changed' in check_markdown([verdict(record(), record())])


class Service(http.server.BaseHTTPRequestHandler):
    """The part of GitHub's interface that comments need."""

    comments: ClassVar[list] = []
    asked: ClassVar[list] = []
    refuse = 0

    def do_GET(self):
        page = int(re.search(r'page=(\d+)$', self.path)[1])
        self._answer(self.comments[(page - 1) * 100 : page * 100])

    def do_POST(self):
        self.comments.append(self._given(len(self.comments)))
        self._answer(self.comments[-1])

    def do_PATCH(self):
        number = int(self.path.rpartition('/')[2])
        self.comments[number] = self._given(number)
        self._answer(self.comments[number])

    def _given(self, number):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))['body']
        return {'id': number, 'body': body, 'user': {'type': 'Bot'}}

    def _answer(self, held):
        self.asked.append((self.command, self.path, self.headers['Authorization']))
        self.send_response(self.refuse or 200)
        self.end_headers()
        self.wfile.write(json.dumps(held).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def service(tmp_path):
    """The environment of a run for pull request 7, and the service that it talks to."""
    kind = type('Kind', (Service,), {'comments': [], 'asked': []})
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    event = tmp_path / 'event.json'
    event.write_text(json.dumps({'pull_request': {'number': 7}}))
    yield (
        {
            'GITHUB_API_URL': f'http://127.0.0.1:{server.server_port}',
            'GITHUB_REPOSITORY': 'some/where',
            'GITHUB_TOKEN': 'secret',
            'GITHUB_EVENT_PATH': str(event),
        },
        kind,
    )
    server.shutdown()
    server.server_close()


def test_a_pull_request_has_one_comment_which_is_updated(service):
    environment, kind = service
    same = f'{MARKER}\n**Layouts:** 1 program, nothing changed.\n'
    changed = f'{MARKER}\n<details>1</details>\n'
    assert comment(same, environment) == 'no comment: nothing changed'
    person = {'id': 0, 'body': f'> {MARKER}', 'user': {'type': 'User'}}
    quoting = {**person, 'body': changed}
    kind.comments += [person, quoting] + [{**person, 'body': 'x'}] * 120  # two pages
    assert comment(changed, environment) == 'commented on pull request 7'
    assert comment(changed, environment) == 'the comment says so already'
    assert comment(changed.replace('1', '2'), environment).startswith('updated comment 122 ')
    assert comment(same, environment).startswith('updated comment 122 ')
    assert [c['body'] for c in kind.comments[122:]] == [same]
    assert {token for _, _, token in kind.asked} == {'Bearer secret'}
    assert ('POST', '/repos/some/where/issues/7/comments', 'Bearer secret') in kind.asked
    kind.refuse = 403
    with pytest.raises(ValueError, match=r'says 403.* pull-requests: write`; runs for forks'):
        comment(changed, environment)
    Path(environment['GITHUB_EVENT_PATH']).write_text('{"ref": "main"}')
    assert 'not for a pull request' in comment(changed, environment)
    with pytest.raises(ValueError, match='GITHUB_TOKEN is not set'):
        comment(changed, {**environment, 'GITHUB_TOKEN': ''})


TABLE = '[tool.meshwright.goldens.step]\n'
MISTAKES = {
    'nothing': ('', 'nothing to check: declare a program in pyproject.toml'),
    'toml': ('[tool', 'pyproject.toml: '),
    'key': ('[tool.meshwright]\nfolders = "x"', "has no 'folders'.* Did you mean 'folder'"),
    'neither': (f'{TABLE}topology = "v5e:2x4"', 'write function = "module:name" or script'),
    'both': (f'{TABLE}function = "a:b"\nscript = "c.py"', 'or script = "train.py"'),
    'function': (f'{TABLE}function = "layouts.step"', 'write "module:name"'),
    'machine': (f'{TABLE}function = "a:b"\ntopology = "v55:2x4"', "unknown topology 'v55:2x4'"),
    'script': (f'{TABLE}script = "a.py"', 'a script needs a machine'),
    'axes': (f'{TABLE}function = "a:b"\naxes = {{data = 2}}', 'axes are sizes on a machine'),
    'compile': (f'{TABLE}function = "a:b"\ncompile = "no"', 'write true or false'),
    'share': (f'{TABLE}function = "a:b"\ntolerances = {{peak = 5}}', 'peak = 5: write a share'),
    'tests': ('[tool.meshwright]\ntests = ["tests/test_x.py"]', 'there is no tests/test_x.py'),
    'name': ('[tool.meshwright.goldens."a/b"]\nfunction = "a:b"', 'the name is the name of a file'),
}


@pytest.mark.parametrize('mistake', MISTAKES)
def test_a_mistake_in_pyproject_is_one_line(mistake, tmp_path, capsys):
    text, message = MISTAKES[mistake]
    (tmp_path / 'pyproject.toml').write_text(text)
    assert main(['check', f'--root={tmp_path}']) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and re.search(message, said), said


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['stepp'], "no golden 'stepp'.* Did you mean 'step'"),
        (['--jobs=0'], '--jobs=0 must be at least 1'),
        (['--json', '--markdown'], 'choose one'),
        (['--update', '--json'], 'use it alone'),
        (['--python=no/python'], 'there is no such program'),
        (['--root=nowhere'], 'there is no such folder'),
    ],
)
def test_a_mistake_in_an_argument_is_one_line(arguments, message, tmp_path, capsys):
    (tmp_path / 'pyproject.toml').write_text(f'{TABLE}function = "a:b"')
    assert main(['check', f'--root={tmp_path}', *arguments]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and re.search(message, said), said


def test_the_tests_with_golden_forecasts_are_found(tmp_path):
    (tmp_path / 'tests').mkdir()
    for name, text in (('a', 'mw.golden(f, x)'), ('b', 'golden(f)'), ('c', 'check_golden([f])')):
        (tmp_path / f'tests/test_{name}.py').write_text(text)
    assert read_settings(tmp_path).tests == ('tests/test_a.py', 'tests/test_c.py')


LAYOUTS = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))

def forward():
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))
    fn = jax.jit(lambda w, x: jnp.tanh(x @ w))
    return fn, (struct((64, 256), SPEC), struct((32, 64), 'data'))

def wrong():
    return jax.jit(jnp.tanh)

def broken():
    return {}['x'], ()
"""
DECLARED = ''.join(
    f'[tool.meshwright.goldens.{name}]\nfunction = "layouts:{name}"\n' for name in ('forward',)
)


def run_steps(service, folder, out):
    """Runs the steps of the action as the service does; returns the status and the summary."""
    environment, _ = service
    action = yaml.safe_load((ROOT / 'action.yml').read_text())
    inputs = {name: one['default'] for name, one in action['inputs'].items()}
    values = {
        **{f'inputs.{name}': str(value) for name, value in inputs.items()},
        'inputs.root': str(folder),
        'inputs.token': 'secret',
        'runner.temp': str(out),
    }
    files = {name: out / name for name in ('GITHUB_OUTPUT', 'GITHUB_STEP_SUMMARY')}
    status = 0
    for step in action['runs']['steps']:
        if 'run' not in step or step['name'] == 'Install':
            continue
        own = {
            name: re.sub(r'\$\{\{ (.*?) \}\}', lambda m: values[m[1]], str(value))
            for name, value in step['env'].items()
        }
        ran = subprocess.run(
            ['bash', '--noprofile', '--norc', '-eo', 'pipefail', '-c', step['run']],
            env={
                **os.environ,
                **environment,
                **{name: str(file) for name, file in files.items()},
                'GITHUB_ACTION_PATH': str(ROOT),
                'GITHUB_SERVER_URL': 'https://service',
                'GITHUB_RUN_ID': '5',
                'PYTHON': sys.executable,
                'PYTHONPATH': str(ROOT),
                **own,
            },
            cwd=out,
            capture_output=True,
            text=True,
        )
        status = ran.returncode or status
        for line in files['GITHUB_OUTPUT'].read_text().splitlines():
            values[f'steps.{step.get("id")}.outputs.{line.partition("=")[0]}'] = line.partition(
                '='
            )[2]
    return status, files['GITHUB_STEP_SUMMARY'].read_text()


def test_the_steps_of_the_action_comment_a_change(service, tmp_path, capfd):
    """The weights of 64 x 256 floats are whole on 8 devices, and then gathered: 7 of 8 shards."""
    _, kind = service
    folder, out = tmp_path / 'repository', tmp_path / 'out'
    (folder / 'train').mkdir(parents=True)  # a package that must not hide the command
    (folder / 'train/__init__.py').write_text('raise SystemExit(9)')
    out.mkdir()
    (folder / 'pyproject.toml').write_text(DECLARED)
    (folder / 'layouts.py').write_text(LAYOUTS.replace('SPEC', ''))
    assert main(['check', '--update', f'--root={folder}']) == 0
    assert main(['check', f'--root={folder}', '--json']) == 0
    held = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (held['status'], held['programs'][0]['after']['sent']) == ('same', 0)
    (folder / 'layouts.py').write_text(LAYOUTS.replace('SPEC', "'data'"))
    status, summary = run_steps(service, folder, out)
    assert status == 1
    [made] = kind.comments
    assert made['body'] == summary and "P('data', None)" in summary
    assert 'all-gather over data of f32' in summary and '57.3 kB' in summary  # 7 / 8 of 65,536
    assert '[the page](https://service/some/where/actions/runs/5)' in summary
    assert {file.name for file in (out / 'meshwright-check').iterdir()} == {
        'check.json',
        'check.md',
        'forecast.html',
    }


def test_what_a_declared_function_does_wrong_is_one_line_each(tmp_path, capsys):
    names = {'wrong': 'layouts:wrong', 'broken': 'layouts:broken', 'gone': 'layouts:gone'}
    names['none'] = 'nowhere.at_all:step'
    (tmp_path / 'pyproject.toml').write_text(
        ''.join(f'[tool.meshwright.goldens.{n}]\nfunction = "{f}"\n' for n, f in names.items())
    )
    (tmp_path / 'layouts.py').write_text(LAYOUTS)
    assert main(['check', '--update', f'--root={tmp_path}']) == 2
    wrong, broken, gone, none = capsys.readouterr().err.splitlines()
    assert 'return the jitted function and the tuple of its arguments' in wrong
    assert "layouts.py:17: KeyError: 'x'" in broken
    assert 'module layouts has no function gone' in gone
    assert 'there is no module nowhere.at_all' in none
