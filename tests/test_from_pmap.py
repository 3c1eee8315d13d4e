"""The programs of docs/from_pmap.md run, and the one with a partitioner trains like pmap's."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import constrain
from tests.code_blocks import read_blocks, run_block

pytestmark = pytest.mark.core

SHARED, BEFORE, AFTER = read_blocks('docs/from_pmap.md', 'python')


def run(*blocks):
    names = {'__name__': 'from_pmap'}
    for block in blocks:
        run_block(block, names)
    return names


@pytest.fixture(scope='module')
def programs():
    return run(SHARED, BEFORE), run(SHARED, AFTER)


def test_both_programs_train_alike(programs):
    before, after = programs
    assert len({*before['losses']}) == 5
    np.testing.assert_allclose(after['losses'], before['losses'], rtol=1e-5)
    for old, new in zip(
        jax.tree.leaves(before['state']), jax.tree.leaves(after['state']), strict=True
    ):
        np.testing.assert_allclose(new, old[0], rtol=1e-4, atol=1e-6)
        assert new.sharding.is_fully_replicated and len(new.sharding.device_set) == 8
    assert after['step'].num_traces() == 1


def test_a_replicated_state_of_pmap_goes_on(programs):
    """The first dimension is dropped, and the state is moved, as the table says."""
    before, after = programs
    whole = NamedSharding(after['partitioner'].mesh, P())
    state = jax.device_put(jax.tree.map(lambda x: np.asarray(x[0]), before['state']), whole)
    batch = after['batches'][0]
    _, metrics = after['step'](state, after['partitioner'].to_global(batch))
    shards = {name: rows.reshape(8, 4, *rows.shape[1:]) for name, rows in batch.items()}
    donated = jax.tree.map(np.asarray, before['state'])
    _, expected = before['step'](donated, shards)
    np.testing.assert_allclose(metrics['loss'], expected['loss'][0], rtol=1e-5)


def test_the_leftovers_give_the_messages_of_the_page(programs):
    _, after = programs
    partitioner = after['partitioner']
    rows = partitioner.data_partition_spec
    x = np.ones((8, 2, 4), np.float32)
    with pytest.raises(NameError, match='unbound axis name: batch'):
        jax.jit(lambda x: jax.lax.pmean(x, 'batch'))(x)
    with pytest.raises(ValueError, match="there is no axis 'batch' as in pmap"):
        partitioner.partition(lambda x: jax.lax.pmean(x, 'batch'), rows, rows)(x)
    with pytest.raises(ValueError, match="mesh axis 'data' does not exist; the mesh is batch 8"):
        jax.pmap(lambda x: constrain(x, ('batch', None), [('batch', 'data')]), 'batch')(x)
    with pytest.raises(ValueError, match='has 2 entries, but the array has 3 dimensions'):
        partitioner.partition(lambda x: constrain(x, ('batch', 'embed')), rows, rows)(x)


def test_rows_of_the_table(programs):
    """Evaluation without all_gather, batches by map, and random numbers per row."""
    _, after = programs
    partitioner = after['partitioner']
    rows = partitioner.data_partition_spec
    batches = list(map(partitioner.to_global, after['batches'][:2]))
    for spec in (None, rows):
        predict = partitioner.partition(lambda batch: batch['x'] * 2, rows, spec)
        found = predict(batches[1])
        assert found.sharding.is_fully_replicated is (spec is None)
        np.testing.assert_allclose(
            partitioner.to_local(found), np.float32(after['batches'][1]['x']) * 2, rtol=1e-6
        )

    def noise(key, batch):
        return jax.random.normal(jax.random.fold_in(key, 3), batch['x'].shape)

    drawn = partitioner.partition(noise, (None, rows), rows)(jax.random.key(1), batches[0])
    np.testing.assert_allclose(
        drawn, noise(jax.random.key(1), after['batches'][0]), rtol=1e-5, atol=1e-6
    )
    assert len(np.unique(np.asarray(drawn)[:, 0])) == 32
