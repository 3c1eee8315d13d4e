"""Small models whose submodules have outputs to lay out, and ways to run them under a plan."""

import functools

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import create_mesh
from partitioning.compat.pytorch import ShardingPlan, constrain_outputs, shard_module

KEY = jax.random.key(0)
MESH = create_mesh((4, 2), ('data', 'model'))
OTHER_MESH = create_mesh((4,), ('model',), devices=jax.devices()[:4])
X = np.random.default_rng(0).normal(size=(8, 16)).astype('float32')


def outputs(**layouts):
    return ShardingPlan({}, layouts)


def has_spec(x, spec, mesh=MESH):
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name='fc2')(nn.relu(nn.Dense(64, name='fc1')(x)))


@functools.cache
def variables_of(model):
    return jax.jit(model.init)(KEY, X)


@functools.cache
def expected_of(model, method=None):
    """The output of a linen model on one device."""
    return jax.jit(functools.partial(model.apply, method=method))(variables_of(model), X)


def run(model, plan, x=X, mesh=MESH, **arguments):
    """The output of a linen model under a plan."""
    variables = variables_of(model)  # not inside set_mesh, which would place them on the mesh

    def apply(variables, x):
        with constrain_outputs(plan):
            return model.apply(variables, x, **arguments)

    with jax.set_mesh(mesh):
        return jax.jit(apply)(variables, x)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(16, 64, rngs=rngs)
        self.fc2 = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.fc2(nnx.relu(self.fc1(x)))


class Tower(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.by_name = nnx.Dict(top=nnx.Linear(16, 16, rngs=rngs))
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.by_name['top'](self.drop(x))


def tower(plan=None, mesh=MESH):
    module = Tower(nnx.Rngs(0))
    module.eval()
    return module if plan is None else shard_module(module, plan, mesh)


TOP = ShardingPlan({'by_name/top/kernel': P(None, 'model')}, {'by_name/top': P('data', 'model')})


def under_jit(module, x=X):
    return nnx.jit(lambda m, x: m(x))(module, x)
