"""`meshwright check --history`: which commit of a repository changed what."""

import json
import os
import subprocess
import sys

import pytest

from meshwright.checking.commits import pinned_versions
from train.cli import main

LAYOUTS = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from package.model import SPEC, forward

mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))

def step():
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))
    return jax.jit(forward), (struct((64, 256), *SPEC), struct((32, 64), 'data'))
"""
MODEL = """
import pathlib
import jax.numpy as jnp
SPEC = tuple(pathlib.Path(__file__).with_name('spec.txt').read_text().split())

def forward(w, x):
    return jnp.tanh(x @ w)
"""
DECLARED = '[tool.meshwright.goldens.step]\nfunction = "layouts:step"\n'


@pytest.fixture
def commit(tmp_path):
    """Writes files and commits them; the declaration and its module are in no commit."""
    environment = {**os.environ, 'GIT_CONFIG_GLOBAL': os.devnull, 'GIT_CONFIG_NOSYSTEM': '1'}
    for name in ('AUTHOR', 'COMMITTER'):
        environment |= {f'GIT_{name}_NAME': 'A', f'GIT_{name}_EMAIL': 'a@b.c'}

    def run(*arguments):
        done = subprocess.run(['git', '-C', str(tmp_path), *arguments], env=environment)
        assert done.returncode == 0

    def make(subject, **files):
        for name, text in files.items():
            file = tmp_path / name.replace('__', '/').replace('_txt', '.txt').replace('_py', '.py')
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        run('add', 'src', 'requirements.txt')
        run('commit', '--quiet', '-m', subject)

    run('init', '--quiet')
    (tmp_path / 'pyproject.toml').write_text(DECLARED)
    (tmp_path / 'layouts.py').write_text(LAYOUTS)
    return make


def test_each_commit_is_compared_with_the_one_before(commit, tmp_path, monkeypatch, capfd):
    """The weights of 64 x 256 floats are gathered after one commit: 7 of 8 shards."""
    pins = 'jax==0.9.0\nlibtpu>=0.0.37\n'
    commit(
        'first',
        src__package__model_py=MODEL,
        src__package__spec_txt='',
        src__package__README_txt='',
        requirements_txt=pins,
    )
    commit('notes', src__package__README_txt='x')
    commit('rename', src__package__model_py=MODEL.replace('w, x', 'a, b').replace('x @ w', 'b @ a'))
    commit('shard', src__package__spec_txt='data')
    commit('newer jax', requirements_txt=pins.replace('0.9.0', '0.10.0'))
    commit('break', src__package__model_py='raise RuntimeError("no")')
    commit('mend', src__package__model_py=MODEL)
    # An editable installation has the present files on the path, by an absolute name.
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(tmp_path / 'src'), *sys.path]))
    history = ['check', f'--root={tmp_path}', '--history=HEAD~6..']
    assert main([*history, '--json']) == 1
    held = json.loads(capfd.readouterr().out.splitlines()[-1])['commits']
    found = {one['subject']: (one['programs'][0]['status'], len(one['recorded'])) for one in held}
    assert found == {
        'notes': ('same', 0),
        'rename': ('same', 1),
        'shard': ('changed', 1),
        'newer jax': ('same', 0),
        'break': ('error', 1),
        'mend': ('same', 1),
    }
    kinds = {d['kind']: d for d in held[2]['programs'][0]['differences']}
    assert kinds['exchange']['now'] == 57_344 and kinds['exchange']['line'].endswith('model.py:7')
    required = {'package': 'jax', 'before': '0.9.0', 'after': '0.10.0'}
    assert [one['required'] for one in held] == [[], [], [], [required], [], []]

    # All records are kept except for the broken commit, so nothing else is made again.
    kept = [*(tmp_path / '.git/meshwright-history').iterdir()]
    assert len(kept) == 4  # the first, rename, shard, mend
    before = {file: file.stat().st_mtime_ns for file in kept}
    assert main(history) == 1
    said = capfd.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in kept} == before
    assert "P(None, None), 65.5 kB per device -> P('data', None), 8.2 kB per device" in said
    assert 'required versions: jax 0.9.0 -> 0.10.0; the code is the same' in said
    assert 'notes' not in said and 'rename' not in said
    assert said.splitlines()[-1].startswith(
        '6 commits: 1 changed something, 1 changed only required versions, 1 could not be recorded'
    )
    assert not [*tmp_path.glob('.git/worktrees/*')]


@pytest.mark.parametrize(
    ('before', 'after', 'expected'),
    [
        ('jax>=0.9.2', 'jax>=0.10.0', {'jax': ('0.9.2', '0.10.0')}),
        ('  "jax[tpu]==0.9.2",', '  "jax[tpu]==0.9.3",', {'jax': ('0.9.2', '0.9.3')}),
        ("libtpu = '0.0.37'", "libtpu = '0.0.38'", {'libtpu': ('0.0.37', '0.0.38')}),
        ('jaxtyping==1.0', 'jaxtyping==2.0', {}),
        ('jax>=0.9.2 ; x', 'jax>=0.9.2', {}),
    ],
)
def test_required_versions_are_read_from_lists_of_requirements(
    commit, tmp_path, before, after, expected
):
    commit('before', src__a_txt='', requirements_txt=before)
    commit('after', requirements_txt=after)
    assert pinned_versions(tmp_path, 'HEAD~1', 'HEAD') == expected


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--history=HEAD'], "--history='HEAD': write a range of commits, such as v1.0.."),
        (['--history=HEAD..'], '--history=HEAD..: the range has no commits'),
        (['--history=nothing..'], "git log: fatal: bad revision 'nothing..'"),
        (['--history=-p..'], 'write a range of commits'),
        (['--history=a..', '--update'], '--history goes with --json, --python and --jobs only'),
    ],
)
def test_a_range_that_git_does_not_know_is_one_line(arguments, message, commit, tmp_path, capsys):
    commit('first', src__a_txt='', requirements_txt='')
    assert main(['check', f'--root={tmp_path}', *arguments]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and message in said, said
