"""Damaged, foreign, copied and renamed steps: each is named, and none is restored.

`benchmarks/damage.py` damages every file; here are a few of each kind, in the same way.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from benchmarks.damage import (
    KINDS,
    damaged,
    damages_of,
    outcome,
    run_random,
    save_two_steps,
)
from train.checkpoints import CheckpointConfig, Checkpoints, complete_steps
from train.checkpoints.orbax.writer import StepWriter
from train.checkpoints.steps.finding import delete_step, newest_step
from train.checkpoints.steps.manifest import complete_step, find_files
from train.checkpoints.steps.record import read_record
from train.errors import ConfigError

FILES = (
    'manifest.json',
    'run/step.json',
    'state/_METADATA',
    'state/params.half/.zarray',
    'state/params.single/0.1',
    'state/opt_state.0.mu.half/0.0',
)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    return save_two_steps(tmp_path_factory.mktemp('saved'))


@pytest.mark.parametrize('file', FILES)
def test_a_damaged_file_is_named_and_the_step_before_is_restored(saved, file):
    content = (saved.newest / file).read_bytes()
    kinds = {}
    for kind, damage in damages_of(content, 2, np.random.default_rng(len(file))):
        with damaged(saved.newest / file, damage):
            kinds[kind] = outcome(saved, file)
    assert kinds == dict.fromkeys(
        ('truncated', 'emptied', 'a bit flipped', 'removed'), 'previous step'
    )


def test_an_added_chunk_is_noticed(saved):
    """It would be read in place of the values that Orbax does not write."""
    added = saved.newest / 'state/params.single/0.2'
    added.write_bytes(b'0')
    try:
        assert outcome(saved, 'state/params.single/0.2') == 'previous step'
    finally:
        added.unlink()
    assert outcome(saved, '') == 'unnoticed', 'the step is intact again'


def test_a_random_change_of_each_kind_is_named_or_harmless(saved, tmp_path):
    other = shutil.copytree(saved.run.directory, tmp_path / 'other')
    other = dataclasses.replace(saved, run=dataclasses.replace(saved.run, directory=other))
    found = [run_random(saved, other, number)['outcome'] for number in range(len(KINDS))]
    assert {*found} == {'previous step', 'unnoticed'}


# What else can be in the folder of checkpoints.


@pytest.fixture(scope='module')
def two_steps(tmp_path_factory):
    """A folder with steps 8 and 10. Tests copy it."""
    folder = tmp_path_factory.mktemp('two') / 'checkpoints'
    for step in (8, 10):
        save(folder, step)
    return Path(folder)


@pytest.fixture
def folder(two_steps, tmp_path):
    return Path(shutil.copytree(two_steps, tmp_path / 'checkpoints'))


def state(value):
    return {'params': {'kernel': jnp.full((4, 4), float(value))}}


def save(folder, step, value=None, **settings):
    saved = Checkpoints(folder, CheckpointConfig(**settings))
    saved.save(step, state(step if value is None else value))
    saved.close()
    return saved


def assert_holds(saved, step, value):
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0)
    )
    np.testing.assert_array_equal(saved.restore(step, abstract)['params']['kernel'], value)


def write(path, text=''):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def plain_orbax(folder, step):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(step, args=ocp.args.StandardSave(state(step)))


def unfinished(folder, step):
    """What a kill between the commit of Orbax and the manifest leaves."""
    shutil.copytree(folder / '10', folder / str(step))
    (folder / f'{step}/manifest.json').unlink()


def linked_to_nothing(path):
    path.unlink()
    path.symlink_to('gone')


FOREIGN = {
    'an empty folder': (lambda f: (f / '11').mkdir(), r'/11 is not a checkpoint'),
    'files of a user': (lambda f: write(f / '11/notes.txt'), r'/11 is not a checkpoint'),
    'a file': (lambda f: write(f / '11'), r'/11 is not a checkpoint'),
    'only a name': (
        lambda f: write(f / '11/_CHECKPOINT_METADATA', '{"version": 99}'),
        r'/11 is not a checkpoint',
    ),
    'leading zeros': (lambda f: (f / '011').mkdir(), r'/011 is not a checkpoint, because'),
    'another name': (lambda f: write(f / 'old/notes.txt'), r'/old is not a checkpoint'),
    'a temporary folder of Orbax': (
        lambda f: write(f / '11.orbax-checkpoint-tmp/state/array'),
        r'/11\.orbax-checkpoint-tmp is not a checkpoint',
    ),
    'a copy': (
        lambda f: shutil.copytree(f / '10', f / '12'),
        r'/12 is a copy of step 10 under another name',
    ),
    'an unfinished step': (lambda f: unfinished(f, 11), r'/11 was not saved completely'),
    'another version': (
        lambda f: write(f / '10/_CHECKPOINT_METADATA', '{"version": 99}'),
        r'/10 is damaged: _CHECKPOINT_METADATA has 15 bytes instead of',
    ),
    'a link to nothing': (
        lambda f: linked_to_nothing(f / '10/_CHECKPOINT_METADATA'),
        r'/10 is damaged: _CHECKPOINT_METADATA is missing',
    ),
    'a renamed step': (
        lambda f: (f / '10').rename(f / '14'),
        r'/14 is a copy of step 10 under another name',
    ),
}


def contents(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob('*')}


@pytest.mark.parametrize('what', FOREIGN)
def test_what_is_not_a_good_step_is_named_and_kept(folder, what):
    make, expected = FOREIGN[what]
    make(folder)
    said, before = [], contents(folder)
    newest = newest_step(folder, said.append)
    damaged_10 = what in ('another version', 'a renamed step', 'a link to nothing')
    assert newest == (8 if damaged_10 else 10)
    [line] = said
    assert re.search(expected, line) and '\n' not in line
    # A run resumes, and keeps one step only.
    save(folder, 16, keep=1)
    assert complete_steps(folder) == [16]
    ours = {'8', '10'} | ({'11'} if what == 'an unfinished step' else set())
    kept = {
        path: content
        for path, content in before.items()
        if path.relative_to(folder).parts[0] not in ours
    }
    assert kept.items() <= contents(folder).items()


def test_a_newer_step_without_a_manifest_is_an_error(folder):
    plain_orbax(folder, 12)
    with pytest.raises(ConfigError, match=r'/12 has no manifest: .*convert'):
        newest_step(folder, print)
    (folder / '12').rename(folder / '9')
    assert newest_step(folder, print) == 10, 'an older one does not matter'


def test_if_no_good_step_is_left_the_run_does_not_start_from_scratch(folder):
    for step in (8, 10):
        (folder / f'{step}/state/_METADATA').unlink()
    with pytest.raises(ConfigError, match=r'no good checkpoint is left .*/10 is damaged'):
        newest_step(folder, print)
    for step in (8, 10):
        (folder / f'{step}/manifest.json').unlink()
    with pytest.raises(ConfigError, match=r'no good checkpoint is left .*/10 was not saved'):
        newest_step(folder, print)


def test_a_first_save_that_was_killed_does_not_stop_a_new_run(folder):
    """Step 8 was saved when there was no good step yet, so nothing is lost."""
    shutil.rmtree(folder / '10')
    (folder / '8/manifest.json').unlink()
    said = []
    assert newest_step(folder, said.append) is None
    assert '/8 was not saved completely' in said[0]


@pytest.mark.parametrize('what', ['files of a user', 'a copy'])
def test_a_save_does_not_replace_what_is_in_its_place(folder, what):
    FOREIGN[what][0](folder)
    step = 12 if what == 'a copy' else 11
    before, saved = contents(folder), Checkpoints(folder, CheckpointConfig(keep=1))
    saved.save(step, state(step))
    assert f'/{step} cannot be saved' in str(failure := saved.failure())
    assert 'in its place: move it away' in str(failure)
    saved.close()
    assert contents(folder) == before


@pytest.mark.parametrize('leave', ['_CHECKPOINT_METADATA', 'run/step.json', 'manifest.json', ''])
def test_a_damaged_or_unfinished_step_is_saved_again(folder, leave):
    """Without its manifest, without its record, or with a file that has changed."""
    (folder / '10' / (leave or 'state/_METADATA')).write_text('')
    if leave == 'manifest.json':
        (folder / '10/manifest.json').unlink()
    assert newest_step(folder, print) == 8
    saved = save(folder, 10, -1)
    assert complete_steps(folder) == [8, 10]
    assert_holds(saved, 10, -1.0)


def test_a_step_whose_content_is_damaged_does_not_count_and_is_saved_again(folder):
    """Its names and sizes are right, so only reading it finds out."""
    [file] = (folder / '10/state/params.kernel').glob('0*')
    file.write_bytes(file.read_bytes()[:-1] + b'?')
    saved = Checkpoints(folder, CheckpointConfig(keep=2))
    assert saved.newest_step(print) == 10
    assert saved.newest_step(print, below=10) == 8
    assert saved.latest_step() == 8
    saved.save(9, state(-9))
    assert saved.latest_step() == 9
    assert sorted(path.name for path in folder.iterdir()) == ['10', '8', '9']
    saved.save(10, state(-10))
    saved.close()
    assert_holds(saved, 10, -10.0)


@pytest.mark.parametrize('field', ['step', 'previous', 'pending', 'scores', 'versions'])
def test_a_record_needs_all_its_fields_and_may_have_more(folder, field):
    file = folder / '10/run/step.json'
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, 'of a newer version': 1}))
    assert read_record(epath.Path(folder / '10')).step == 10
    del record[field]
    file.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=rf"run/step\.json cannot be read \('{field}'\)"):
        read_record(epath.Path(folder / '10'))


@pytest.mark.parametrize('kept', ['run/step.json', 'state/_METADATA'])
def test_an_interrupted_deletion_is_recognized_and_completed(folder, kept, monkeypatch):
    """A kill comes before the deletion of one of the items."""

    class Killed(BaseException):
        pass

    def rmtree(path, remove=shutil.rmtree):
        if path == folder / '8' / kept.split('/')[0]:
            raise Killed
        remove(path)

    monkeypatch.setattr(shutil, 'rmtree', rmtree)
    with pytest.raises(Killed):
        delete_step(epath.Path(folder / '8'))
    monkeypatch.undo()
    assert (folder / '8' / kept).exists() and not (folder / '8/manifest.json').exists()
    said = []
    assert newest_step(folder, said.append) == 10 and not said
    save(folder, 12, keep=5)
    assert sorted(p.name for p in folder.iterdir()) == ['10', '12']


FORMS = {
    'no files': {'files': None},
    'a number': {'files': 7},
    'no checksum': {'files': {'a': [1]}},
    'no size': {'files': {'a': ['x', '']}},
    'no versions': {'versions': None},
    'no step': {'step': None},
    'no format': {'format': None},
    'deep': {'files': json.loads('[' * 65 + ']' * 65)},
}


@pytest.mark.parametrize('changes', FORMS.values(), ids=FORMS)
def test_a_manifest_of_another_form_is_damaged(folder, changes):
    """Its own checksum is right, as a program that makes such a file would write it."""
    import xxhash

    def text_of(values):
        return json.dumps(values, indent=1, sort_keys=True) + '\n'

    file = folder / '10/manifest.json'
    written = json.loads(file.read_text())
    assert written.pop('checksum') == xxhash.xxh3_128_hexdigest(text_of(written).encode())
    made = {name: x for name, x in {**written, **changes}.items() if x is not None}
    checksum = xxhash.xxh3_128_hexdigest(text_of(made).encode())
    file.write_text(text_of(made | {'checksum': checksum}))
    said = []
    assert newest_step(folder, said.append) == 8
    [line] = said
    assert 'damaged' in line and 'manifest.json' in line


@pytest.mark.parametrize('left', ['10.orbax-checkpoint-tmp/state.orbax-checkpoint-tmp/a', '10/a/0'])
def test_what_a_kill_leaves_is_replaced(folder, left, monkeypatch):
    """Orbax may have begun with the arrays, and not with the record in the folder."""

    def start(self, *args):
        write(folder / left)
        raise KeyboardInterrupt

    shutil.rmtree(folder / '10')
    monkeypatch.setattr(StepWriter, 'start', start)
    with pytest.raises(KeyboardInterrupt):
        save(folder, 10)
    monkeypatch.undo()
    said = []
    assert newest_step(folder, said.append) == 8 and len(said) == 1
    if left.startswith('10/'):
        shutil.rmtree(folder / '10/a')  # Only names that a save writes are deleted.
    save(folder, 10)
    assert sorted(p.name for p in folder.iterdir()) == ['10', '8']


def test_the_manifest_lists_every_file_with_its_checksum(folder):
    """The checksums equal the ones of XXH3's reference implementation."""
    import xxhash

    written = json.loads((folder / '10/manifest.json').read_text())
    files = {p for p in (folder / '10').rglob('*') if p.is_file() and p.name != 'manifest.json'}
    assert written['files'].keys() == {str(p.relative_to(folder / '10')) for p in files}
    for path in files:
        size, checksum = written['files'][str(path.relative_to(folder / '10'))]
        assert size == path.stat().st_size
        assert checksum == xxhash.xxh3_128_hexdigest(path.read_bytes())
    assert written['step'] == 10 and written['versions']['jax'] == jax.__version__


def test_a_file_that_another_process_renames_does_not_fail_a_save(folder):
    """A link to nothing is a name without a file, as a name is that was listed before a rename."""
    files = find_files(epath.Path(folder / '10'))
    (folder / '10/manifest.part-manifest.part-1.json').symlink_to('renamed')
    complete_step(epath.Path(folder / '10'), 10)
    written = json.loads((folder / '10/manifest.json').read_text())
    assert written['files'].keys() == files.keys()


def test_a_step_whose_files_the_storage_has_lost_is_not_complete(tmp_path):
    folder = epath.Path(tmp_path / '10')
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match=r'10 has no files, although all were written$'):
        complete_step(folder, 10)
    assert list(folder.iterdir()) == []
