"""Restores the checkpoint of one process in all processes together, and saves it again."""

from pathlib import Path

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from job_failures import error_of

from partitioning import TrainState
from train.checkpoints import CheckpointConfig, open_checkpoints
from train.processes.together import raise_on_all_processes

# Shapes, dtypes and specs on a mesh of 4x2. The state of 1 process is on a mesh of 2x4.
ARRAYS = {
    'sharded': ((512, 1024), 'float32', P('data', 'model')),
    'partly replicated': ((1024, 1024), 'bfloat16', P(None, 'model')),
    **{f'replicated {i}': ((256, 1024), 'float32', P()) for i in range(8)},
    'not divisible': ((1023, 257), 'int32', P()),
    'small': ((100,), 'float32', P()),
}
SAVED, SAVED_AGAIN = 'of one process', 'of all processes'
STEP = 7


def abstract_state(data):
    """The state on a mesh of `data` rows."""
    mesh = Mesh(np.array(jax.devices()).reshape(data, -1), ('data', 'model'))

    def struct(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=NamedSharding(mesh, spec))

    params = {name: struct(*values) for name, values in ARRAYS.items()}
    return TrainState(step=struct((), 'int32', P()), params=params, opt_state=())


def values_of(struct):
    """Arbitrary bits, among which are numbers that are not finite, and negative zeros."""
    size = struct.size * struct.dtype.itemsize
    values = np.frombuffer(np.random.default_rng(3).bytes(size), struct.dtype)
    if struct.dtype.itemsize == 2:
        # bfloat16 values are finite, because XLA's emitters in the tests change the bits of NaN.
        values = (values.view(np.uint16) & 0xBFFF).view(struct.dtype)
    return values.reshape(struct.shape)


def make_state(abstract):
    """The state with known values."""

    def make(struct):
        values = values_of(struct)
        return jax.make_array_from_callback(struct.shape, struct.sharding, lambda i: values[i])

    return jax.tree.map(make, abstract)


def assert_has_values(state, abstract):
    """Checks the bits of every shard of this process."""
    for array, struct in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert array.sharding == struct.sharding and array.dtype == struct.dtype
        values = values_of(struct)
        for shard in array.addressable_shards:
            found, expected = (
                np.atleast_1d(x).view(np.uint8)
                for x in (np.asarray(shard.data), values[shard.index])
            )
            np.testing.assert_array_equal(found, expected, err_msg=str(struct))


def save_alone(folder):
    """Saves the state in the calling process, which has 8 devices."""
    save(Path(folder) / SAVED, make_state(abstract_state(2)))


def save(folder, state):
    checkpoints = open_checkpoints(CheckpointConfig(), epath.Path(folder))
    checkpoints.save(STEP, state)
    checkpoints.close()


def run(folder):
    """Restores and saves; reports the bytes that this process has read, and read amplification."""
    folder, abstract = Path(folder), abstract_state(4)
    checkpoints = open_checkpoints(CheckpointConfig(), epath.Path(folder / SAVED))
    preflight = checkpoints.preflight(STEP, abstract)
    checkpoints.restore(STEP, abstract)  # It imports modules, whose files do not count.
    before = bytes_read()
    state = checkpoints.restore(STEP, abstract)
    read = bytes_read() - before
    assert_has_values(state, abstract)
    save(folder / SAVED_AGAIN, state)
    damage(folder / SAVED)
    return {
        'folder': str(folder / SAVED_AGAIN),
        'read': read,
        'size': preflight.num_bytes,
        'expected': preflight.process_bytes,
        'amplification': preflight.read_amplification,
        'error': error_of(checkpoints.restore, STEP, abstract),
    }


def damage(folder):
    """Changes a bit of an array that all processes hold and one of them reads."""
    with raise_on_all_processes():  # All have read the array before that.
        pass
    if jax.process_index() == 0:
        [file] = (folder / f'checkpoints/{STEP}/state/params.not divisible').glob('[0-9]*')
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with raise_on_all_processes():
        pass


def bytes_read():
    """The bytes that this process has read from files since its start, cached or not."""
    [line] = [x for x in Path('/proc/self/io').read_text().split('\n') if x.startswith('rchar')]
    return int(line.split()[1])
