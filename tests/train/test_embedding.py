"""The lookup of embeddings: what moves between devices, and its gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from partitioning import MeshConfig, PjitPartitioner
from train.models.elementary import look_up

VOCAB = 96


@pytest.mark.parametrize('sizes', [{'data': 8, 'model': 1}, {'data': 4, 'model': 2}], ids=str)
def test_rows_move_and_the_table_does_not(sizes):
    rules = [('batch', 'data'), ('vocab', 'model'), ('embed', 'data'), ('length', None)]
    partitioner = PjitPartitioner(mesh=MeshConfig(axes=sizes), logical_axis_rules=rules)
    rng = np.random.default_rng(0)
    table_VD = rng.normal(size=(VOCAB, 16)).astype(np.float32)
    tokens_BL = rng.integers(0, VOCAB, (8, 4))

    def loss(table_VD, tokens_BL):
        return jnp.sum(jnp.sin(look_up(table_VD, tokens_BL)))

    gradient = jax.value_and_grad(loss)
    spec = P('model', 'data')
    step = partitioner.partition(gradient, (spec, P('data')), (None, spec))
    found = step(table_VD, tokens_BL)
    value, expected = gradient(table_VD, tokens_BL)
    np.testing.assert_allclose(found[0], value, rtol=1e-5)
    np.testing.assert_allclose(found[1], expected, rtol=1e-5, atol=1e-5)
    text = step.lower(table_VD, tokens_BL).compile().as_text()
    moved = re.findall(
        r'= (.*?) (?:all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)\(', text
    )
    assert moved
    shards = VOCAB, VOCAB // sizes['model']
    assert not [shape for shape in moved if re.search(rf'\[(?:{shards[0]}|{shards[1]}),', shape)]
