"""The start of a run: compiled programs are kept, errors keep their order, and the time is told."""

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax._src import compilation_cache as programs, compiler
from jax.experimental.compilation_cache import compilation_cache
from small import small_config

from train import train
from train.errors import ConfigError
from train.machine.compiling import _Folders, _remove_oldest, use_compilation_cache
from train.reporting import meter as start_up
from train.running.programs import keep_programs

SECRET = b'32 bytes that one user alone has'


@pytest.fixture
def cache(monkeypatch):
    """Returns a function (setting, run_directory) -> (jax's folder, what was said)."""
    before = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )

    def use(setting, directory='run', secret=SECRET):
        said = []
        use_compilation_cache(setting, Path(directory), secret, said.append)
        return jax.config.jax_compilation_cache_dir, said

    changed = (compiler, 'distributed'), (programs, 'get_executable_and_time')
    for module, name in (*changed, (programs, '_get_cache')):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(_Folders, 'of_user', None)
    monkeypatch.setattr(_Folders, 'of_run', None)
    jax.config.update('jax_compilation_cache_dir', None)
    yield use
    jax.config.update('jax_compilation_cache_dir', before[0])
    jax.config.update('jax_persistent_cache_min_compile_time_secs', before[1])
    compilation_cache.reset_cache()


def test_programs_are_kept_in_the_folder_of_the_user(cache, tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    folder, said = cache('auto')
    assert Path(folder).parent == tmp_path / 'cache/meshwright/programs' and Path(folder).is_dir()
    assert not said
    assert cache(tmp_path / 'mine') == (str(tmp_path / 'mine'), [])
    assert cache(None) == (None, [])
    assert cache(tmp_path / 'mine', secret=None) == (None, [])
    assert cache('auto') == (folder, []), (
        'the folder of the run before is not the choice of the user'
    )
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    assert cache('auto', '/shared/run') == ('/shared/run/programs', [])


def test_the_folder_that_jax_was_given_stays(cache, tmp_path):
    jax.config.update('jax_compilation_cache_dir', str(tmp_path / 'given'))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 7.0)
    assert cache('auto') == (str(tmp_path / 'given'), [])
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 7.0
    assert cache(tmp_path / 'other')[0] == str(tmp_path / 'other')
    assert cache('auto')[0] == str(tmp_path / 'given')


def test_a_folder_that_cannot_be_written_is_said(cache, tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    folder, [said] = cache('auto')
    assert folder is None and str(tmp_path / 'file') in said
    with pytest.raises(ConfigError, match=r'compilation_cache .*file/x: '):
        cache(tmp_path / 'file/x')


def test_the_oldest_programs_are_removed(tmp_path):
    for age, name in enumerate(['c-cache', 'b-cache', 'a-cache', 'other']):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    _remove_oldest(epath.Path(tmp_path), most_bytes=250)
    assert {file.name for file in tmp_path.iterdir()} == {'c-cache', 'b-cache', 'other'}


def test_the_programs_of_several_processes_have_a_limit(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    limited = []
    monkeypatch.setattr('train.machine.compiling._remove_oldest', limited.append)
    folder, _ = cache('auto', tmp_path / 'run')
    assert limited == [epath.Path(folder)] == [tmp_path / 'run/programs']
    monkeypatch.setattr(jax, 'process_index', lambda: 1)
    cache('auto', tmp_path / 'run')
    assert len(limited) == 1, 'one process suffices'


@pytest.fixture
def compute():
    """A function that compiles a program, or reads it, and returns its result."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs

    def compute(factor=3):
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
        jax.clear_caches()
        return jax.jit(lambda x: jnp.sin(x @ x) * factor)(np.full((8, 8), 0.3, np.float32))

    yield compute
    jax.config.update('jax_persistent_cache_min_compile_time_secs', before)


def test_a_damaged_program_is_compiled_again_and_replaced(cache, compute, tmp_path):
    """Without a checksum, a changed bit may crash the process or change what it computes."""
    _, said = cache(tmp_path)
    right = np.asarray(compute())
    [file] = tmp_path.glob('jit__lambda*-cache')
    good, rng = file.read_bytes(), np.random.default_rng(0)
    assert not said
    os.utime(file, (1000, 1000))
    np.testing.assert_array_equal(compute(), right)
    assert file.stat().st_mtime > 1000, 'a program that is used is removed last'
    changes = [good[:200], b'', *(_with_flip(good, rng.integers(len(good) * 8)) for _ in range(8))]
    for number, damaged in enumerate(changes):
        file.write_bytes(damaged)
        np.testing.assert_array_equal(compute(), right)
        assert file.read_bytes() != damaged and len(said) == number + 1
    assert said[0].startswith('a compiled program was damaged or is not yours, and is compiled')
    assert said[0].endswith(f': {file}')


def test_a_program_that_someone_else_has_put_there_is_never_run(cache, compute, tmp_path):
    """A stranger knows the names of files, and has the same jax, but not the secret."""
    right, wrong = np.asarray(compute(3)), np.asarray(compute(5))
    cache(tmp_path / 'theirs', secret=b'32 bytes that the stranger has..')
    compute(5)
    [theirs] = (tmp_path / 'theirs').glob('jit__lambda*-cache')
    _, said = cache(tmp_path / 'mine')
    compute(5)
    [other] = (tmp_path / 'mine').glob('jit__lambda*-cache')
    compute(3)
    [mine] = {*(tmp_path / 'mine').glob('jit__lambda*-cache')} - {other}
    assert not np.array_equal(right, wrong) and not said
    for put in (theirs, other):  # also the user's own program under the name of another one
        shutil.copy(put, mine)
        np.testing.assert_array_equal(compute(3), right)
        assert 'is not yours' in said.pop()
    # Two users may share a folder: each finds their own.
    before = theirs.read_bytes()
    _, said = cache(tmp_path / 'theirs')
    np.testing.assert_array_equal(compute(5), wrong)
    assert len([*(tmp_path / 'theirs').glob('jit__lambda*-cache')]) == 2
    assert theirs.read_bytes() == before and not said


def test_only_process_0_removes_a_program(cache, compute, tmp_path, monkeypatch):
    cache(tmp_path)
    right = np.asarray(compute())
    [file] = tmp_path.glob('jit__lambda*-cache')
    file.write_bytes(b'damaged')
    monkeypatch.setattr(jax, 'process_index', lambda: 1)
    _, said = cache(tmp_path)
    np.testing.assert_array_equal(compute(), right)
    assert file.read_bytes() == b'damaged' and not said


def _with_flip(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.long
def test_a_second_start_reads_the_programs_and_tells_its_time(cache, texts, tmp_path, monkeypatch):
    """jax's events say what it read. The times are in the first record only."""
    # Programs that a fast machine compiles at once are kept, too.
    monkeypatch.setattr('train.machine.compiling._WORTH_KEEPING_SECONDS', 0.0)
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    hit = '/jax/compilation_cache/cache_hits'
    config = small_config(
        tmp_path / 'one', texts, total_steps=2, compilation_cache=tmp_path / 'programs'
    )
    keep_programs(config)
    assert not (tmp_path / 'one').exists()
    jax.clear_caches()
    train(config)
    assert events.count(hit) >= 1, 'the train step that was compiled ahead'
    kept = {file.name.split('-')[0] for file in (tmp_path / 'programs').glob('*-cache')}
    assert {'jit_train_step', 'jit_make', 'jit_eval_step'} <= kept
    jax.clear_caches()
    events.clear()
    shutil.copytree(tmp_path / 'one', tmp_path / 'two')
    train(dataclasses.replace(config, model_dir=tmp_path / 'two', total_steps=4))
    assert events.count(hit) >= 2, 'the train step and the evaluation'

    records = [json.loads(x) for x in (tmp_path / 'two/metrics.jsonl').read_text().splitlines()]
    starts = [r for r in records if 'start/seconds_to_first_step' in r]
    assert [record['step'] for record in starts] == [1, 3]
    assert 'start/seconds_restoring_the_state' not in starts[0]
    for record in starts:
        total = record.pop('start/seconds_to_first_step')
        parts = [value for name, value in record.items() if name.startswith('start/')]
        assert len(parts) > 4 and 0 < sum(parts) <= total
    assert starts[1]['start/seconds_restoring_the_state'] > 0


class Broken:
    every = 1

    def prepare(self, run, name):
        raise ConfigError('broken evaluator')

    def run(self, state, step):
        return {}


def test_errors_of_the_compiler_come_before_those_of_what_is_opened_meanwhile(texts, tmp_path):
    settings = {'evaluators': {'broken': Broken()}}
    with pytest.raises(ConfigError, match='broken evaluator'):
        train(small_config(tmp_path / 'run', texts, **settings))
    with pytest.raises(ValueError, match='xla_fast'):
        train(small_config(tmp_path / 'run', texts, compiler_options={'xla_fast': 1}, **settings))
    assert not (tmp_path / 'run').exists()


def test_the_age_of_the_process_is_that_of_the_system():
    if shutil.which('ps') is None:
        pytest.skip('ps is not installed')
    before = start_up._age_of_process()
    command = ['ps', '-o', 'etimes=', '-p', str(os.getpid())]
    seconds = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert before - 2 <= seconds <= start_up._age_of_process() + 2
