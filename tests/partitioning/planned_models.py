"""Small models, plans for them, and the layouts that the plans should give."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from jax.sharding import PartitionSpec as P

from partitioning import create_mesh
from partitioning.compat.pytorch import Sharder, ShardingPlan, parameters, place

KEY = jax.random.key(0)
MESH = create_mesh((4, 2), ('data', 'model'))
ONE = create_mesh((4, 1, 2), ('data', 'one', 'model'))
RULES = [('embed', 'data'), ('mlp', 'model')]
SHAPES = {'fc1/bias': (64,), 'fc1/kernel': (16, 64), 'fc2/bias': (16,), 'fc2/kernel': (64, 16)}
ENTRIES = {'fc1/kernel': P(None, 'model'), 'fc2/kernel': P(('model', 'data'))}
SPECS = {
    'fc1/bias': P(None),
    'fc1/kernel': P(None, 'model'),
    'fc2/bias': P(None),
    'fc2/kernel': P(('model', 'data'), None),
}
SHARDS = {'fc1/bias': (64,), 'fc1/kernel': (16, 32), 'fc2/bias': (16,), 'fc2/kernel': (8, 16)}


def params() -> Any:
    rng = np.random.default_rng(0)
    flat = {path: rng.normal(size=shape).astype('float32') for path, shape in SHAPES.items()}
    return {m: {k: flat[f'{m}/{k}'] for k in ('bias', 'kernel')} for m in ('fc1', 'fc2')}


class NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(16, 64, rngs=rngs)
        self.fc2 = nnx.Linear(64, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.fc2(self.drop(nnx.relu(self.fc1(x))))


class Pair(NamedTuple):
    fc1: Any
    fc2: Any


def linen(names=False):
    """Linen variables; with `names`, their kernels are in boxes with logical names."""
    made = params()
    if names:
        for module, axes in (('fc1', ('embed', 'mlp')), ('fc2', ('mlp', 'embed'))):
            kernel = made[module]['kernel']
            made[module]['kernel'] = nn.LogicallyPartitioned(kernel, axes)
    return {'params': made}


MODELS = {
    'a FrozenDict': lambda: freeze(params()),
    'a NamedTuple': lambda: Pair(**params()),
    'linen boxes': lambda: linen(names=True),
    'an nnx module': lambda: NnxMlp(nnx.Rngs(0)),
    'an nnx state': lambda: nnx.state(NnxMlp(nnx.Rngs(0)), nnx.Param),
}
OF_MODELS = pytest.mark.parametrize('model', MODELS)


def held(module):
    """The arrays of the parameters by path, without nnx variables."""
    return {
        '/'.join(path): x[...] if isinstance(x, nnx.Variable) else x
        for path, x in parameters(module).items()
    }


class ByData(Sharder):
    """Shards the rows of all arrays over 'data'."""

    def shard(self, module, mesh):
        if isinstance(module, nnx.Module):
            nnx.update(module, place(nnx.state(module, nnx.Param), mesh, P('data')))
            return module
        return place(module, mesh, P('data'))


class Returns(Sharder):
    """Replaces the module by the result of a function of the module and the mesh."""

    def __init__(self, function):
        self.function = function

    def shard(self, module, mesh):
        return self.function(module, mesh)


def resolve(plan, module=None, mesh=MESH, rules=None, **policies):
    return ShardingPlan(plan).resolve(
        params() if module is None else module, mesh, rules, **policies
    )
