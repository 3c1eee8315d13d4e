"""Checkpoints of other formats: recognized, opened, and converted bit by bit.

The other systems write the sources and read the results: Orbax, safetensors and T5X's own files.
"""

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import t5x_reference
from etils import epath
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from train.checkpoints.arrays.stored import StoredArray, chunk_shape, in_memory, piece_shape, split
from train.checkpoints.formats.opening import (
    choose_place,
    examine_place,
    find_place,
    list_steps,
    open_checkpoint,
    other_content,
)
from train.checkpoints.formats.t5x_files import sources_for_t5x, sources_in_t5x
from train.checkpoints.offline.converting import plan_conversion, write
from train.checkpoints.offline.summary import group_arrays
from train.errors import ConfigError

rng = np.random.default_rng(0)
TREE = {
    'params': {
        'layers_0': {'kernel': rng.standard_normal((5, 7), np.float32)},
        'bias': rng.standard_normal(3).astype(ml_dtypes.bfloat16),
    },
    'opt_state': [{'mu': rng.standard_normal((5, 7), np.float32)}, None],
    'ids': np.arange(4, dtype=np.uint16),
    'mask': np.array([True, False]),
    'step': np.int32(12),
}
NAMES = {
    'params/layers_0/kernel': TREE['params']['layers_0']['kernel'],
    'params/bias': TREE['params']['bias'],
    'opt_state/0/mu': TREE['opt_state'][0]['mu'],
    'ids': TREE['ids'],
    'mask': TREE['mask'],
    'step': TREE['step'],
}


def save_orbax(path, tree=TREE):
    """Writes a checkpoint as users of Orbax do."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def save_items(path, **items):
    """Writes a step with several items as users of Orbax do, and returns its folder."""
    with ocp.CheckpointManager(path) as manager:
        saved = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        manager.save(12, args=ocp.args.Composite(**saved))
    return path / '12'


def open_path(path, step=None):
    return open_checkpoint(choose_place(epath.Path(path), step)[0])


def convert(source, to, format, **settings):
    """Converts a checkpoint, and returns the folder of the result."""
    conversion = plan_conversion(open_path(source), epath.Path(to), format, **settings)
    write(conversion, lambda count: None)
    return conversion.folder


def assert_equal(found, expected):
    """Compares arrays by name, dtype, shape and bits."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        ours, theirs = np.asarray(found[name]), np.asarray(values)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
        assert ours.tobytes() == theirs.tobytes(), name


def read_with_orbax(path):
    """The tree that Orbax reads, which need not know who wrote it."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def names_of(tree):
    """The arrays of a tree by the names that checkpoints give them."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): x for path, x in flat}


@pytest.fixture
def weights(tmp_path):
    """The path of a safetensors file."""
    (tmp_path / 'weights').mkdir()
    save_file(
        {'b': NAMES['params/bias'], 'ids': NAMES['ids']}, tmp_path / 'weights/model.safetensors'
    )
    return tmp_path / 'weights/model.safetensors'


# What is at a path.


def test_orbax_writes_one_item_or_several(tmp_path):
    plain = open_path(save_orbax(tmp_path / 'plain'))
    assert (plain.place.format, plain.step()) == ('orbax', 12), 'the step is an array'
    assert_equal(plain.arrays, NAMES)
    one = open_path(save_items(tmp_path / 'one', default=TREE))
    assert (one.place.items, one.step()) == (('default',), 12)
    assert_equal(one.arrays, NAMES)
    several = open_path(save_items(tmp_path / 'two', model=TREE['params'], ids={'x': TREE['ids']}))
    assert sorted(several.arrays) == ['ids/x', 'model/bias', 'model/layers_0/kernel']
    newest = open_path(tmp_path / 'one')
    assert newest.place.path.name == '12', 'a folder of checkpoints'


def test_safetensors_are_files_folders_or_models(weights):
    expected = load_file(weights)
    for path, format in ((weights, 'safetensors'), (weights.parent, 'safetensors')):
        found = open_path(path)
        assert (found.place.format, found.step()) == (format, None)
        assert_equal(found.arrays, expected)
    (weights.parent / 'config.json').write_text('{}')
    (weights.parent / 'tokenizer.json').write_text('{}')
    place = find_place(epath.Path(weights.parent))
    assert place.format == 'huggingface'
    assert other_content(place) == ['config.json', 'tokenizer.json']
    assert examine_place(place).status == 'without a manifest'


@pytest.mark.parametrize('name', ['t5_1_1-orbax-10', 'decoder_only-legacy-10'])
def test_t5x_writes_two_formats(name):
    path = t5x_reference.checkpoint(name)
    found = open_path(path)
    assert (found.place.format, found.step()) == ('t5x', 10)
    parameters = t5x_reference.facts(name.split('-')[0])['params']
    assert {f'target/{key}' for key in parameters} < set(found.arrays)


def test_a_run_has_steps(finished, tmp_path):
    assert [(s.step, s.status) for s in list_steps(epath.Path(finished.directory))] == [
        (2, 'good'),
        (4, 'good'),
        (6, 'good'),
    ]
    found = open_path(finished.directory)
    assert (found.place.format, found.step()) == ('meshwright', 6)
    assert_equal(found.arrays, names_of(finished.state))
    assert open_path(finished.directory, step=4).step() == 4
    assert open_path(finished.directory / 'checkpoints/2').step() == 2


def test_the_newest_step_that_is_complete_is_chosen(finished, tmp_path):
    run = epath.Path(finished.copy(tmp_path / 'run'))
    (run / 'checkpoints/6/manifest.json').write_text('{}')
    (run / 'checkpoints/8.orbax-checkpoint-tmp').mkdir()
    (run / 'checkpoints/9').mkdir()
    statuses = {s.step: s.status for s in list_steps(run)}
    assert statuses[6] == 'damaged' and statuses[8] == 'unfinished'
    assert statuses[9] == 'not a checkpoint'
    place, skipped = choose_place(run)
    assert place.step == 4
    assert len(skipped) == 3 and 'manifest.json' in skipped[2]


# Conversions.


@pytest.mark.parametrize('through', ['meshwright', 'safetensors'])
def test_a_tree_of_orbax_comes_back(tmp_path, through):
    source = save_orbax(tmp_path / 'source')
    between = convert(source, tmp_path / 'between', through)
    back = convert(between, tmp_path / 'back', 'orbax')
    tree = read_with_orbax(back)
    assert_equal(names_of(tree), NAMES)
    if through == 'meshwright':
        assert jax.tree.structure(tree) == jax.tree.structure(read_with_orbax(source))
        assert between == epath.Path(tmp_path / 'between/checkpoints/12')
        assert examine_place(find_place(between)).status == 'good'
    else:
        assert_equal(load_file(between / 'model.safetensors'), NAMES)


@pytest.mark.parametrize('name', ['t5_1_1-orbax-10', 't5_1_1-legacy_bfloat16-10'])
@pytest.mark.parametrize('through', ['meshwright', 'safetensors'])
def test_a_checkpoint_of_t5x_comes_back(tmp_path, name, through):
    """Orbax reads the result as T5X does. The other path was tested on its own."""
    source = t5x_reference.checkpoint(name)
    between = convert(source, tmp_path / 'between', through)
    back = convert(between, tmp_path / 'back', 't5x')
    assert back == epath.Path(tmp_path / 'back/checkpoint_10')
    assert (back / 'dataset').is_dir(), 'T5X looks for it'
    expected = {name: array.read() for name, array in open_path(source).arrays.items()}
    assert_equal(flatten_dict(read_with_orbax(back / 'state'), sep='/'), expected)
    if name == 't5_1_1-orbax-10':
        assert_equal(flatten_dict(read_with_orbax(source / 'state'), sep='/'), expected)


def test_names_of_t5x_are_translated():
    """As `train.t5x.checkpoints` names the state of a run."""
    statistics = ('m', 'v', 'v_col', 'v_row')
    ours = ['step', 'opt_state/step', 'params/v/m', *(f'opt_state/{s}/v/m' for s in statistics)]
    theirs = ['state/step', 'target/v/m', *(f'state/param_states/v/m/{s}' for s in statistics)]
    assert sources_in_t5x(theirs).keys() == set(ours)
    assert sources_in_t5x(theirs)['opt_state/v_col/v/m'] == 'state/param_states/v/m/v_col'
    assert sources_for_t5x(ours).keys() == set(theirs)
    assert sources_for_t5x(ours)['state/param_states/v/m/v'] == 'opt_state/v/v/m'
    nested = [n.replace('opt_state/', 'opt_state/inner/0/') for n in ours]
    assert sources_for_t5x(nested).keys() == set(theirs), 'Adafactor within other transformations'
    adam = ['step', 'params/w', 'opt_state/0/count', 'opt_state/0/mu/w']
    assert sorted(sources_for_t5x(adam)) == [
        'state/param_states/0/count',
        'state/param_states/0/mu/w',
        'state/step',
        'target/w',
    ]
    assert set(sources_in_t5x(sources_for_t5x(adam))) == set(adam)


def test_a_run_resumes_from_a_converted_step(finished, run, tmp_path, capsys):
    """An older version wrote no manifest and no record, so the run does not resume from it."""
    old = finished.copy(tmp_path / 'old')
    step = epath.Path(old / 'checkpoints/6')
    (step / 'manifest.json').unlink()
    (step / 'run').rmtree()
    with pytest.raises(ConfigError, match=r'checkpoints/6 has no manifest.*checkpoint convert'):
        run(old, total_steps=8)
    new = finished.copy(tmp_path / 'new', last_step=4)
    convert(old, new, 'meshwright')
    state = run(new, total_steps=8)
    assert 'resumed from step 6' in capsys.readouterr().out
    undisturbed = run(tmp_path / 'undisturbed', total_steps=8)
    assert_equal(names_of(state), names_of(undisturbed))


def test_a_dtype_is_converted_on_request(tmp_path):
    folder = convert(save_orbax(tmp_path / 'a'), tmp_path / 'b', 'orbax', dtype='bfloat16')
    kernel = NAMES['params/layers_0/kernel'].astype(ml_dtypes.bfloat16)
    found = names_of(read_with_orbax(folder))
    assert_equal(found, NAMES | {'params/layers_0/kernel': kernel})
    save_file({'w': np.array([7e4], np.float32)}, tmp_path / 'large.safetensors')
    with pytest.raises(ConfigError, match=r'w has values up to 70000, which float16 cannot'):
        convert(tmp_path / 'large.safetensors', tmp_path / 'c', 'safetensors', dtype='float16')
    assert not list((tmp_path / 'c').iterdir())


def test_arrays_are_renamed_and_left_out(tmp_path):
    source = open_path(save_orbax(tmp_path / 'a'))
    renames = [(r'params/(.*)', r'model/\1'), (r'opt_state/.*|ids', '')]
    to = epath.Path(tmp_path / 'b')
    conversion = plan_conversion(source, to, 'safetensors', renames=renames)
    write(conversion, lambda count: None)
    assert set(load_file(to / 'model.safetensors')) == {
        'model/bias',
        'model/layers_0/kernel',
        'mask',
        'step',
    }
    assert conversion.lost[0].startswith('2 arrays that --renames leaves out, such as ids')
    assert 'lists' in conversion.lost[1]


def test_what_is_not_carried_over_is_listed(finished, tmp_path):
    source = open_path(finished.directory)
    lost = plan_conversion(source, epath.Path(tmp_path / 'a'), 'orbax').lost
    assert lost == [
        f'run/{path.name}'
        for path in sorted(finished.directory.glob('checkpoints/6/run/*'))
        if path.name not in ('step.json', 'commit_success.txt')
    ]
    assert plan_conversion(source, epath.Path(tmp_path / 'a'), 'meshwright').lost == []


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'renames': [('nothing', 'x')]}, r"pattern 'nothing' matches no array"),
        ({'renames': [('.*', 'x')]}, r"two arrays the name 'x'"),
        ({'renames': [('.*', '')]}, 'leaves out all arrays'),
        ({'renames': [('ids', 'params')]}, 'Orbax saves trees, but params'),
        ({'format': 't5x', 'renames': [('target/', 'p')]}, 'matches no array'),
        ({'to': 'b/checkpoints/13'}, r'is of step 12, and .* names another step'),
        ({'to': 'a', 'format': 'orbax'}, r'/a exists already'),
    ],
)
def test_what_cannot_be_converted(tmp_path, settings, message):
    source = open_path(save_orbax(tmp_path / 'a'))
    settings = {'format': 'meshwright', 'to': 'b'} | settings
    to = epath.Path(tmp_path / settings.pop('to'))
    with pytest.raises(ConfigError, match=message):
        plan_conversion(source, to, **settings)
    assert not (tmp_path / 'b').exists()


def test_what_the_formats_cannot_have(tmp_path, weights):
    to = epath.Path(tmp_path / 'to')
    with pytest.raises(ConfigError, match='no parameters below params/ or target/'):
        plan_conversion(open_path(weights), to, 't5x')
    save_file({'x': np.zeros((0, 3), np.float32)}, tmp_path / 'empty.safetensors')
    with pytest.raises(ConfigError, match=r'x of shape \(0, 3\) has no elements'):
        plan_conversion(open_path(tmp_path / 'empty.safetensors'), to, 'orbax')


def test_nothing_complete_remains_of_a_conversion_that_fails(finished, tmp_path):
    run = finished.copy(tmp_path / 'run')
    largest = max(run.glob('checkpoints/6/state/params*/*'), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    for format in ('orbax', 'safetensors', 'meshwright'):
        with pytest.raises(ConfigError, match=largest.parent.name):
            convert(run / 'checkpoints/6', tmp_path / format, format)
        left = [path for path in (tmp_path / format).rglob('*') if path.is_file()]
        assert left == [] and find_place(epath.Path(tmp_path / format)) is None


# Arrays in pieces and in groups.


def stored(shape, chunk=None, dtype='float32'):
    array = in_memory(np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype))
    return StoredArray(shape=array.shape, dtype=array.dtype, start=array.start, chunk=chunk)


@pytest.mark.parametrize(
    ('shape', 'chunk'),
    [
        ((), ()),
        ((7,), None),
        ((4, 6), (2, 6)),
        ((5, 6, 3), (2, 4, 3)),
        ((8, 8), (8, 2)),
        ((0, 3), None),
    ],
)
@pytest.mark.parametrize('limit', [4, 40, 2**28])
def test_pieces_cover_an_array_once_and_cut_no_chunk(monkeypatch, shape, chunk, limit):
    monkeypatch.setattr('train.checkpoints.arrays.stored.PIECE_BYTES', limit)
    array = stored(shape, chunk)
    seen = np.zeros(shape, int)
    for index in split(array):
        seen[index] += 1
        for cut, size, whole in zip(index, chunk or (), shape, strict=False):
            assert cut.start % size == 0 and (cut.stop % size == 0 or cut.stop == whole)
    assert (seen == 1).all()


def test_pieces_are_not_larger_than_necessary():
    array = stored((64, 4), (2, 4))
    assert piece_shape(array) == (64, 4)
    huge = StoredArray(
        shape=(2**20, 2**10), dtype=np.dtype('float32'), start=array.start, chunk=(3, 2**10)
    )
    rows, columns = piece_shape(huge)
    assert columns == 2**10 and rows == 3 * 2**14 and 2**27 < rows * columns * 4 <= 2**28


@pytest.mark.parametrize(
    ('shape', 'chunk'),
    [((96, 64), None), ((32003, 8), None), ((120, 7, 3), (5, 7, 3)), ((6007, 4), (3001, 4))],
)
def test_chunks_are_parts_of_pieces_and_small(monkeypatch, shape, chunk):
    monkeypatch.setattr('train.checkpoints.arrays.stored.PIECE_BYTES', 2**12)
    array = stored(shape, chunk)
    piece, written = piece_shape(array), chunk_shape(array, 2**10)
    for size, part, whole in zip(piece, written, shape, strict=True):
        assert size % part == 0 or size == whole
    if chunk != (3001, 4):  # a prime number of rows cannot be divided
        assert 2**8 < np.prod(written) * 4 <= 2**10


def test_arrays_of_many_layers_are_one_group():
    names = [f'params/layers_{i}/w' for i in range(80)] + ['params/embedding', 'step']
    names += [
        f'opt_state/0/{s}/{name.partition("/")[2]}' for s in ('mu', 'nu') for name in names[:-1]
    ]
    arrays = {name: stored((2, 2)) for name in names}
    groups = [(group.name, group.count, group.role) for group in group_arrays(arrays)]
    assert groups == [
        ('params/layers_[0-79]/w', 80, 'parameters'),
        ('params/embedding', 1, 'parameters'),
        ('opt_state/0/mu/*', 81, 'optimizer'),
        ('opt_state/0/nu/*', 81, 'optimizer'),
        ('step', 1, 'other'),
    ]
