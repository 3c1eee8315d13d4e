"""One checkpoint on many meshes, the pieces in which it is read, and what is said before that."""

import itertools
import re

import jax
import numpy as np
import pytest
from etils import epath
from hypothesis import given, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rich.console import Console
from small import small_config

from partitioning import PjitPartitioner, TrainState
from train.checkpoints import (
    CheckpointConfig,
    Checkpoints,
    RestoreConfig,
    open_checkpoints,
    open_restored,
)
from train.checkpoints.arrays.placing import split
from train.checkpoints.steps.manifest import DamagedCheckpoint
from train.reporting.console import RunConsole
from train.running.run import prepare

MESHES = [(1, 8), (8, 1), (2, 4), (1, 1)]


@pytest.mark.parametrize('shape', MESHES, ids=lambda s: f'{s[0]}x{s[1]}')
def test_a_checkpoint_of_4x2_has_the_same_bits_on_every_mesh(finished, texts, tmp_path, shape):
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = PjitPartitioner(mesh=Mesh(devices, ('data', 'model')))
    abstract = prepare(small_config(tmp_path, texts, partitioner=mesh)).plan.abstract_state
    saved = Checkpoints(finished.directory / 'checkpoints', CheckpointConfig())
    state = saved.restore(6, abstract)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, abstract)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(finished.state), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@given(
    bounds=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=3),
    chunks=st.lists(st.integers(1, 20), min_size=3, max_size=3),
    itemsize=st.sampled_from([1, 2, 2**20, 2**24]),
)
def test_pieces_cover_a_shard_once_and_do_not_cut_chunks(bounds, chunks, itemsize):
    shard = tuple((first, first + size) for first, size in bounds)
    chunk = tuple(chunks[: len(shard)])
    covered = list[tuple[int, ...]]()
    for piece in split(shard, chunk, itemsize):
        covered += itertools.product(*(range(first, last) for first, last in piece))
        for (first, last), (start, stop), size in zip(piece, shard, chunk, strict=True):
            assert first == start or first % size == 0
            assert last == stop or last % size == 0
    assert sorted(covered) == list(itertools.product(*(range(a, b) for a, b in shard)))


def saved_arrays(folder, arrays, **settings):
    """Saves arrays as the parameters of step 3, and returns a function that describes them."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('data', 'model'))

    def state(of, **changes):
        params = jax.tree.map(jax.numpy.asarray, of | changes)
        one = TrainState(step=jax.numpy.int32(3), params=params, opt_state=())
        sharding = NamedSharding(mesh, P())
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), one
        ), one

    saved = open_checkpoints(CheckpointConfig(**settings), epath.Path(folder))
    saved.save(3, state(arrays)[1])
    saved.close()
    return lambda **changes: state(arrays, **changes)[0]


def test_the_preflight_says_what_differs_in_one_table_before_any_array_is_read(tmp_path):
    arrays = {name: np.ones((256, 64), np.float32) for name in ('a', 'b', 'c')}
    abstract = saved_arrays(tmp_path, arrays)
    restore = RestoreConfig(path=str(tmp_path))
    reader = open_restored(restore, tmp_path / 'checkpoints')
    for file in (tmp_path / 'checkpoints/3/state').glob('params.*/0*'):
        file.unlink()  # No array can be read.
    wrong = abstract(
        a=np.ones((128, 64), np.float32), b=np.ones((256, 64), np.float16), d=np.ones(3)
    )
    preflight = reader.preflight(3, wrong)
    assert (preflight.num_bytes, preflight.process_bytes) == (3 * 2**16 + 4, (2 * 2**16 + 4,))
    console = Console(width=150)
    with console.capture() as capture:
        preflight.report(RunConsole(console))
    lines = capture.get().splitlines()
    assert '4 arrays with 196.6 kB to restore' in lines[0]
    rows = [re.split(r'  +', line.strip()) for line in lines[2:]]
    assert rows == [
        ['params/a', '(256, 64) float32', '(128, 64) float32', 'other shape, an error'],
        ['params/b', '(256, 64) float32', '(256, 64) float16', 'other dtype, an error'],
        ['params/d', 'absent', '(3,) float32', 'missing, an error'],
    ]
    with pytest.raises(ValueError, match=r'3 arrays differ. The first is params/a: '):
        preflight.check()
    good = reader.preflight(3, abstract())
    assert not good.differences and good.problem is None and good.read_amplification == 1


def test_dtypes_are_converted_only_if_asked(tmp_path):
    values = np.linspace(-1, 1, 64, dtype=np.float32)
    abstract = saved_arrays(tmp_path, {'a': values}, dtype='bfloat16')()
    reader = open_restored(RestoreConfig(path=str(tmp_path)), tmp_path / 'checkpoints')
    with pytest.raises(ValueError, match=r"other dtypes: 1 .*set RestoreConfig.dtype = 'float32'"):
        reader.restore(3, abstract)
    restore = RestoreConfig(path=str(tmp_path), dtype='float32')
    state = open_restored(restore, tmp_path / 'checkpoints').restore(3, abstract)
    expected = np.asarray(jax.numpy.asarray(values, jax.numpy.bfloat16), np.float32)
    assert np.array_equal(state.params['a'], expected) and not np.array_equal(expected, values)
    # The run's own settings ask for it.
    own = open_checkpoints(CheckpointConfig(dtype='bfloat16'), epath.Path(tmp_path))
    assert np.array_equal(own.restore(3, abstract).params['a'], expected)


def test_damage_of_an_array_is_named_when_it_is_read_and_not_before(tmp_path):
    abstract = saved_arrays(tmp_path, {'a': np.ones((256, 64), np.float32)})()
    reader = open_checkpoints(CheckpointConfig(), epath.Path(tmp_path))
    [chunk] = (tmp_path / 'checkpoints/3/state/params.a').glob('0*')
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 4
    chunk.write_bytes(content)
    reader.preflight(3, abstract).check()
    with pytest.raises(DamagedCheckpoint, match=rf'state/params.a/{chunk.name} does not have'):
        reader.restore(3, abstract)
